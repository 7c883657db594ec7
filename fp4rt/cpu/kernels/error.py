"""What quantization cost, row by row: signal and noise power, largest error, and what happened to each block.

Reads x and its quantized form together, so nothing is kept but a few numbers a row. Elements that are not finite in x,
or NaN in its quantized form, count in no sum: there is no error to speak of.
"""

from __future__ import annotations

import numba
import numpy as np

from fp4rt.cpu.kernels.bits import INFINITY_BITS, MAGNITUDE_MASK, float_of
from fp4rt.cpu.kernels.compiled import COUNT, OFFSETS, Kernel, const, device_function
from fp4rt.cpu.kernels.dequantize import decode_row
from fp4rt.cpu.kernels.product import widen_row
from fp4rt.format import BLOCK

__all__ = ["CLIPPED", "COUNTERS", "FLUSHED", "LARGEST", "NOISE", "NONFINITE", "POWERS", "SIGNAL", "error_rows"]

# Places in a row of ``powers`` (float64) and of ``counts`` (int64; by scale byte, then these).
SIGNAL, NOISE, LARGEST, POWERS = 0, 1, 2, 3
CLIPPED, FLUSHED, NONFINITE, COUNTERS = 256, 257, 258, 259

u32 = np.uint32
LIMITS = numba.float64[::1]
POWER_ROWS = numba.float64[:, ::1]
COUNTS = numba.int64[::1]


@device_function
def drop_uncountable(values, products):
    """Makes errorless zeros of elements that are infinite or NaN, whose number it returns, and of NaN products."""
    bits = values.view(np.uint32)
    dropped = 0
    for c in range(values.size):
        if u32(bits[c] & MAGNITUDE_MASK) >= INFINITY_BITS:
            values[c] = products[c] = 0
            dropped += 1
        elif np.isnan(products[c]):
            values[c] = products[c] = 0
    return dropped


@device_function
def add_row(values, products, lanes, powers):
    """Powers of a row. A lane a column of the block: sums that do not depend on each other run side by side."""
    lanes[:] = 0
    signal, noise, largest = lanes[SIGNAL], lanes[NOISE], lanes[LARGEST]
    for block in range(values.size // BLOCK):
        for j in range(BLOCK):
            value = np.float64(values[block * BLOCK + j])
            error = abs(value - np.float64(products[block * BLOCK + j]))
            signal[j] += value * value
            noise[j] += error * error
            largest[j] = error if error > largest[j] else largest[j]
    powers[SIGNAL], powers[NOISE], powers[LARGEST] = signal.sum(), noise.sum(), largest.max()


def _error_rows(
    flat,
    start,
    row_stride,
    column_stride,
    kind,
    n,
    products,
    data,
    row_bytes,
    scales,
    row_offsets,
    column_offsets,
    clip_limits,
    first_row,
    powers,
    counts,
):
    padded_n = -(-n // BLOCK) * BLOCK
    values, decoded = np.zeros(padded_n, np.float32), np.zeros(padded_n, np.float32)
    magnitudes = values.view(np.uint32)
    lanes = np.empty((POWERS, BLOCK), np.float64)
    for i in range(row_offsets.size):
        row = first_row + i
        codes = data[row * row_bytes : (row + 1) * row_bytes]
        widen_row(values[:n], flat, start + row * row_stride, column_stride, kind)
        decode_row(decoded[:n], products, codes, scales, row_offsets[i], column_offsets)
        highest = u32(0)
        for block in range(padded_n // BLOCK):
            largest = u32(0)
            for j in range(BLOCK):
                largest = max(largest, u32(magnitudes[block * BLOCK + j] & MAGNITUDE_MASK))
            byte = scales[row_offsets[i] + column_offsets[block]]
            counts[byte] += 1
            counts[FLUSHED] += byte == 0 and largest > 0
            counts[CLIPPED] += largest <= INFINITY_BITS and np.float64(float_of(largest)) > clip_limits[byte]
            highest = max(highest, largest)
        if highest >= INFINITY_BITS:
            counts[NONFINITE] += drop_uncountable(values[:n], decoded[:n])
        add_row(values, decoded, lanes, powers[row])
        if np.isnan(powers[row, NOISE]):
            drop_uncountable(values[:n], decoded[:n])
            add_row(values, decoded, lanes, powers[row])


def _signature(element):
    source = (const(element), COUNT, COUNT, COUNT, COUNT, COUNT)
    quantized = (const(numba.float32), const(numba.uint8), COUNT, const(numba.uint8), OFFSETS, OFFSETS)
    return (*source, *quantized, LIMITS, COUNT, POWER_ROWS, COUNTS)


error_rows = Kernel(_error_rows, {np.uint16: _signature(numba.uint16), np.uint32: _signature(numba.uint32)})
