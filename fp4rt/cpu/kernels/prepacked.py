"""Prepacked tiles to fp32 products code * scale, rows in order. Where each bit lies: ``fp4rt.prepacked``.

Records of blocks that the arithmetic cannot see are not needed here: their products are zeros either way, or the sign
of the scale is in the codes already. Columns from k on and rows from n on are not written.
"""

from __future__ import annotations

import numba
import numpy as np

from fp4rt.cpu.kernels.compiled import COUNT, FLOATS, Kernel, const, device_function, element_function
from fp4rt.format import BLOCK, E2M1
from fp4rt.prepacked import (
    CHUNK_COLUMNS,
    CODE_BITS,
    E4M3_OF_E5M3,
    SIGN_BITS,
    TILE_BYTES,
    TILE_CODE_BYTES,
    TILE_COLUMNS,
    TILE_ROWS,
)

__all__ = ["prepacked_rows"]

u32 = np.uint32
CODES = E2M1.values.size
CHUNKS = TILE_COLUMNS // CHUNK_COLUMNS
BLOCKS_PER_CHUNK = CHUNK_COLUMNS // BLOCK
TILE_WORDS, CODE_WORDS = TILE_BYTES // 4, TILE_CODE_BYTES // 4
CHUNK_WORDS = CODE_WORDS // CHUNKS
HALF_ROWS = TILE_ROWS // 2


@element_function
def rotate(word, bits):
    """Rotate left by 0 ... 31 bits."""
    return u32(word << u32(bits)) | u32(word >> u32((32 - bits) & 31)) if bits else word


@device_function
def scale_byte(words, tile, row, chunk, j):
    """The e4m3 byte of block ``j`` of a chunk, in a row of the tile."""
    rr, g = row // HALF_ROWS, row % HALF_ROWS
    word = words[tile + CODE_WORDS + 32 * (chunk // 2) + 4 * g + 2 * (chunk % 2) + rr]
    turned = rotate(word, 8 * (j % 2))
    return np.int64(E4M3_OF_E5M3[(turned >> u32(4 + 16 * (j // 2))) & u32(0xFF)])


@device_function
def decode_row(words, tile, row, products, out):
    """One row of a tile: up to 256 columns into ``out``."""
    rr, g = row // HALF_ROWS, row % HALF_ROWS
    for block in range(-(-out.size // BLOCK)):
        chunk, j = block // BLOCKS_PER_CHUNK, block % BLOCKS_PER_CHUNK
        first = scale_byte(words, tile, row, chunk, j) * CODES
        table = products[first : first + CODES]
        for kk in range(2):
            for t in range(4):
                word = words[tile + CHUNK_WORDS * chunk + 16 * g + 4 * t + j]
                eem, sign = CODE_BITS[rr + 2 * kk], SIGN_BITS[rr + 2 * kk]
                column = block * BLOCK + 8 * kk + 2 * t
                if column < out.size:
                    out[column] = table[(word >> u32(eem)) & u32(7) | (word >> u32(sign - 3)) & u32(8)]
                if column + 1 < out.size:
                    out[column + 1] = table[(word >> u32(eem + 16)) & u32(7) | (word >> u32(sign + 13)) & u32(8)]


def _prepacked_rows(words, row_tiles, products, k, first_row, out):
    """Rows ``first_row`` ... into ``out`` (rows x k, dense); ``row_tiles`` tiles lie side by side in a column group."""
    for i in range(out.size // k):
        row = first_row + i
        for group in range(-(-k // TILE_COLUMNS)):
            tile = (group * row_tiles + row // TILE_ROWS) * TILE_WORDS
            first = group * TILE_COLUMNS
            target = out[i * k + first : i * k + min(first + TILE_COLUMNS, k)]
            decode_row(words, tile, row % TILE_ROWS, products, target)


prepacked_rows = Kernel(
    _prepacked_rows,
    {np.uint32: (const(numba.uint32), COUNT, const(numba.float32), COUNT, COUNT, FLOATS)},
)
