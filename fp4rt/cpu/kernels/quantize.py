"""Quantize rows: codes and scales of every physical row, padding included.

On entry: the global scale is finite and positive. Writes data row-major, and scales where ``row_offsets`` +
``column_offsets`` put them, which is any layout. Rule: the steps of ``fp4rt.format``.
"""

from __future__ import annotations

import numba
import numpy as np

from fp4rt.cpu.kernels.bits import (
    INFINITY_BITS,
    MAGNITUDE_MASK,
    e2m1_of_magnitude,
    e4m3_of_magnitude,
    float_of,
    widen,
)
from fp4rt.cpu.kernels.compiled import BYTES, COUNT, FLOAT, OFFSETS, Kernel, const, device_function
from fp4rt.format import BLOCK, CODES_PER_BYTE, E2M1, E4M3, E4M3_NAN_BYTE, NEGATIVE_ZERO_CODE, R6

__all__ = ["quantize_rows"]

u8 = np.uint8
u32 = np.uint32
f32 = np.float32

CHUNK = 1024  # columns at a time: the scratch stays in the first-level cache
SCALE_VALUES = E4M3.values[: E4M3.magnitude_count]
SIGN_SHIFT = u32(28)  # brings fp32's sign bit to bit 3, the sign of a code
SIGN_OF_CODE = u8(NEGATIVE_ZERO_CODE)
LARGEST_MAGNITUDE = u8(E2M1.magnitude_count - 1)
NAN_BYTE = u8(E4M3_NAN_BYTE)
ALL_BITS = u8(0xFF)


@device_function
def encode_tables(global_scale):
    """By scale byte: enc (step 4), and which bits of a code to keep: none where the block is all zero codes."""
    encode = np.empty(SCALE_VALUES.size, np.float32)
    keep = np.full(SCALE_VALUES.size, ALL_BITS)
    reciprocal = f32(1) / global_scale
    for byte in range(SCALE_VALUES.size):
        encode[byte] = f32(1) / (SCALE_VALUES[byte] * reciprocal)
    encode[0] = encode[NAN_BYTE] = 0
    keep[0] = keep[NAN_BYTE] = 0
    return encode, keep


@device_function
def load(flat, start, stride, kind, scratch, magnitudes, codes):
    """fp32 magnitudes of ``scratch.size`` columns, and their signs where codes have them."""
    if stride == 1:
        split(flat[start : start + scratch.size], kind, magnitudes, codes)
    else:
        for c in range(scratch.size):
            scratch[c] = flat[start + c * stride]
        split(scratch, kind, magnitudes, codes)


@device_function
def split(row, kind, magnitudes, codes):
    """Magnitudes and signs of adjacent elements."""
    for c in range(row.size):
        bits = widen(u32(row[c]), kind)
        magnitudes[c] = bits & MAGNITUDE_MASK
        codes[c] = u8(bits >> SIGN_SHIFT) & SIGN_OF_CODE


@device_function
def scale_blocks(magnitudes, global_scale, scales):
    """Steps 1 to 3. Magnitudes order as integers do, with infinity and then NaN above all."""
    for block in range(scales.size):
        largest = u32(0)
        for j in range(BLOCK):
            largest = max(largest, magnitudes[block * BLOCK + j])  # 1
        if largest > INFINITY_BITS:
            scales[block] = NAN_BYTE
        else:
            t = global_scale * (float_of(largest) * R6)  # 2
            scales[block] = e4m3_of_magnitude(t)  # 3


@device_function
def encode_blocks(magnitudes, scales, encode, keep, codes):
    """Steps 4 and 5: magnitudes of codes below the signs that ``codes`` holds."""
    values = magnitudes.view(np.float32)
    for block in range(scales.size):
        enc, kept = encode[scales[block]], keep[scales[block]]  # 4
        for j in range(BLOCK):
            c = block * BLOCK + j
            codes[c] = (codes[c] | e2m1_of_magnitude(values[c] * enc)) & kept  # 5; 0 * inf gives 0
        if enc == 0 and kept != 0:  # enc underflowed: inf * 0 is the largest code
            for c in range(block * BLOCK, (block + 1) * BLOCK):
                if magnitudes[c] == INFINITY_BITS:
                    codes[c] |= LARGEST_MAGNITUDE


@device_function
def pack(pairs, row):
    """Two codes a byte, the even column in the low nibble; a pair is a little-endian 16-bit integer."""
    for i in range(row.size):
        pair = pairs[i]
        row[i] = u8(pair | (pair >> np.uint16(4)))


def _quantize_rows(
    flat,
    start,
    row_stride,
    column_stride,
    kind,
    m,
    n,
    padded_n,
    global_scale,
    data,
    scales,
    row_offsets,
    column_offsets,
    first_row,
):
    """Physical rows ``first_row`` ..., as many as there are ``row_offsets``; rows from m on are padding."""
    encode, keep = encode_tables(global_scale)
    scratch = np.empty(CHUNK, flat.dtype)
    magnitudes = np.empty(CHUNK, np.uint32)
    codes = np.empty(CHUNK, np.uint8)
    block_scales = np.empty(CHUNK // BLOCK, np.uint8)
    columns = column_offsets.size

    for i in range(row_offsets.size):
        row = first_row + i
        if row >= m:
            for c in range(columns):
                scales[row_offsets[i] + column_offsets[c]] = 0
            continue
        for chunk in range(0, padded_n, CHUNK):
            width = min(CHUNK, padded_n - chunk)
            valid = max(0, min(width, n - chunk))
            source = start + row * row_stride + chunk * column_stride
            load(flat, source, column_stride, kind, scratch[:valid], magnitudes, codes)
            magnitudes[valid:width] = 0
            codes[valid:width] = 0
            blocks = block_scales[: width // BLOCK]
            scale_blocks(magnitudes, global_scale, blocks)
            encode_blocks(magnitudes, blocks, encode, keep, codes)
            target = (row * padded_n + chunk) // CODES_PER_BYTE
            pack(codes.view(np.uint16), data[target : target + width // CODES_PER_BYTE])
            for c in range(blocks.size):
                scales[row_offsets[i] + column_offsets[chunk // BLOCK + c]] = blocks[c]
        for c in range(padded_n // BLOCK, columns):
            scales[row_offsets[i] + column_offsets[c]] = 0


def _signature(element):
    source = (const(element), COUNT, COUNT, COUNT, COUNT)
    return (*source, COUNT, COUNT, COUNT, FLOAT, BYTES, BYTES, OFFSETS, OFFSETS, COUNT)


quantize_rows = Kernel(_quantize_rows, {np.uint16: _signature(numba.uint16), np.uint32: _signature(numba.uint32)})
