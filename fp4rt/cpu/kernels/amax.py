"""The largest finite magnitude of some rows, as fp32 bits; and the global scale that follows from it."""

from __future__ import annotations

import numba
import numpy as np

from fp4rt.cpu.kernels.bits import INFINITY_BITS, MAGNITUDE_MASK, float_of, widen
from fp4rt.cpu.kernels.compiled import COUNT, Kernel, const, device_function
from fp4rt.format import AMAX_TARGET, FP32_MAX

__all__ = ["amax_rows", "encode_scale"]

u32 = np.uint32
f32 = np.float32


@device_function
def largest_finite(row, kind):
    """The largest finite magnitude of adjacent elements; fp32 magnitudes order as integers do."""
    largest = u32(0)
    for c in range(row.size):
        magnitude = u32(widen(u32(row[c]), kind) & MAGNITUDE_MASK)
        largest = max(largest, magnitude if magnitude < INFINITY_BITS else u32(0))
    return largest


def _amax_rows(flat, start, row_stride, column_stride, kind, n, first_row, end_row):
    scratch = np.empty(0 if column_stride == 1 else n, flat.dtype)
    largest = u32(0)
    for row in range(first_row, end_row):
        source = start + row * row_stride
        if column_stride == 1:
            largest = max(largest, largest_finite(flat[source : source + n], kind))
        else:
            for c in range(n):
                scratch[c] = flat[source + c * column_stride]
            largest = max(largest, largest_finite(scratch, kind))
    return largest


def _encode_scale(amax_bits):
    amax = float_of(amax_bits[0])
    if amax == 0:
        return f32(1)
    return min(f32(AMAX_TARGET) / amax, FP32_MAX)


def _signature(element):
    return (const(element), COUNT, COUNT, COUNT, COUNT, COUNT, COUNT, COUNT)


amax_rows = Kernel(_amax_rows, {np.uint16: _signature(numba.uint16), np.uint32: _signature(numba.uint32)})
encode_scale = Kernel(_encode_scale, {np.uint32: (const(numba.uint32),)})
