"""What surrounds a matrix product: activations widened to fp32, and the epilogue that rounds once."""

from __future__ import annotations

import numba
import numpy as np

from fp4rt.cpu.kernels.bits import float_of, round_to_kind, widen
from fp4rt.cpu.kernels.compiled import COUNT, FLAG, FLOAT, FLOATS, Kernel, const, device_function

__all__ = ["finish_rows", "widen_row", "widen_rows"]

u32 = np.uint32


@device_function
def widen_row(out, flat, start, stride, kind):
    """One row as fp32."""
    if stride == 1:
        row = flat[start : start + out.size]
        for c in range(out.size):
            out[c] = float_of(u32(widen(u32(row[c]), kind)))
    else:
        for c in range(out.size):
            out[c] = float_of(u32(widen(u32(flat[start + c * stride]), kind)))


def _widen_rows(flat, start, row_stride, column_stride, kind, n, first_row, out):
    """Rows ``first_row`` ... as fp32 into ``out`` (rows x n, dense)."""
    for i in range(out.size // n):
        widen_row(out[i * n : (i + 1) * n], flat, start + (first_row + i) * row_stride, column_stride, kind)


def _finish_rows(out, sums, alpha, bias, has_bias, width, row_stride, first_column, kind):
    """round(alpha * sums + bias): ``sums`` is (rows, width), dense; ``out`` starts at its first row."""
    for i in range(sums.size // width):
        target = out[i * row_stride + first_column : i * row_stride + first_column + width]
        row = sums[i * width : (i + 1) * width]
        if has_bias:
            for c in range(width):
                target[c] = round_to_kind(alpha * row[c] + bias[first_column + c], kind)
        else:
            for c in range(width):
                target[c] = round_to_kind(alpha * row[c], kind)


def _widen_signature(element):
    return (const(element), COUNT, COUNT, COUNT, COUNT, COUNT, COUNT, FLOATS)


def _finish_signature(element):
    floats = const(numba.float32)
    return (element[::1], floats, FLOAT, floats, FLAG, COUNT, COUNT, COUNT, COUNT)


widen_rows = Kernel(_widen_rows, {np.uint16: _widen_signature(numba.uint16), np.uint32: _widen_signature(numba.uint32)})
finish_rows = Kernel(
    _finish_rows, {np.uint16: _finish_signature(numba.uint16), np.uint32: _finish_signature(numba.uint32)}
)
