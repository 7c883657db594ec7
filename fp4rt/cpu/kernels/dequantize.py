"""Dequantize rows by table: the 4096 products of a scale byte and a code, rounded once, are looked up.

Reads any layout through ``row_offsets`` + ``column_offsets``; never reads a byte that belongs to no column below n.
Writes ``out`` row-major without gaps.
"""

from __future__ import annotations

import numba
import numpy as np

from fp4rt.cpu.kernels.bits import round_to_kind
from fp4rt.cpu.kernels.compiled import COUNT, FLOAT, OFFSETS, Kernel, const, device_function
from fp4rt.format import BLOCK, CODES_PER_BYTE, E2M1, E4M3

__all__ = ["TABLE_SIZE", "decode_row", "dequantize_rows", "product_table"]

SCALE_VALUES = E4M3.values
CODE_VALUES = E2M1.values
CODES = CODE_VALUES.size
TABLE_SIZE = SCALE_VALUES.size * CODES
CODE_MASK = CODES - 1
CODE_BITS = CODE_MASK.bit_length()
BLOCK_BYTES = BLOCK // CODES_PER_BYTE


def _product_table(table, global_scale, kind):
    """``table[scale byte * 16 + code]`` = code * fp32(scale / global_scale) as bits of the output type."""
    for byte in range(SCALE_VALUES.size):
        scale = SCALE_VALUES[byte] / global_scale
        for code in range(CODES):
            table[byte * CODES + code] = round_to_kind(CODE_VALUES[code] * scale, kind)


@device_function
def decode_row(target, table, codes, scales, row_offset, column_offsets):
    """One row; ``target`` has its n columns."""
    whole_blocks = target.size // BLOCK
    for block in range(whole_blocks):
        first = np.int64(scales[row_offset + column_offsets[block]]) * CODES
        products = table[first : first + CODES]
        for j in range(BLOCK_BYTES):
            byte = np.int64(codes[block * BLOCK_BYTES + j])
            target[block * BLOCK + 2 * j] = products[byte & CODE_MASK]
            target[block * BLOCK + 2 * j + 1] = products[byte >> CODE_BITS]
    for c in range(whole_blocks * BLOCK, target.size):  # a partial last block
        byte = np.int64(codes[c // CODES_PER_BYTE])
        code = byte & CODE_MASK if c % CODES_PER_BYTE == 0 else byte >> CODE_BITS
        target[c] = table[np.int64(scales[row_offset + column_offsets[whole_blocks]]) * CODES + code]


def _dequantize_rows(out, table, data, row_bytes, scales, row_offsets, column_offsets, n, first_row):
    for i in range(row_offsets.size):
        codes = data[(first_row + i) * row_bytes : (first_row + i + 1) * row_bytes]
        decode_row(out[i * n : (i + 1) * n], table, codes, scales, row_offsets[i], column_offsets)


def _signatures(element):
    rows = (element[::1], const(element), const(numba.uint8), COUNT, const(numba.uint8))
    return (element[::1], FLOAT, COUNT), (*rows, OFFSETS, OFFSETS, COUNT, COUNT)


_TABLE_16, _ROWS_16 = _signatures(numba.uint16)
_TABLE_32, _ROWS_32 = _signatures(numba.uint32)

product_table = Kernel(_product_table, {np.uint16: _TABLE_16, np.uint32: _TABLE_32})
dequantize_rows = Kernel(_dequantize_rows, {np.uint16: _ROWS_16, np.uint32: _ROWS_32})
