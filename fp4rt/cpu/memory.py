"""Arrays in and out of kernels: any strides as flat memory, results from the current pool."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fp4rt import fp32, interop
from fp4rt.cpu.kernels.bits import KINDS
from fp4rt.layout import ScaleLayout
from fp4rt.pool import PaddingTag, current_pool

if TYPE_CHECKING:
    from fp4rt.interop import ArrayView

__all__ = ["BITS", "Matrix", "Target", "aligned", "flat_bytes", "matrix", "new_array", "offsets", "scalar"]

# The unsigned integer that holds an element's bits.
BITS: dict[str, np.dtype[Any]] = {
    "float16": np.dtype(np.uint16),
    "bfloat16": np.dtype(np.uint16),
    "float32": np.dtype(np.uint32),
}


class Matrix(NamedTuple):
    """A matrix of any strides: element (r, c) is ``flat[start + r * row_stride + c * column_stride]``."""

    flat: np.ndarray
    start: int
    row_stride: int
    column_stride: int
    kind: int


def matrix(view: ArrayView) -> Matrix:
    """The matrix behind a host view of one (a single row) or two dimensions, without a copy.

    Only memory that is not aligned to its elements is copied: machine code reads whole elements.
    """
    bits = np.atleast_2d(view.bits())
    kind = KINDS[view.dtype]
    if bits.size == 0:
        return Matrix(np.empty(0, bits.dtype), 0, 0, 1, kind)
    if not bits.flags.aligned:
        bits = bits.copy()
    # An extent of 1 has no stride; left alone it could point far outside.
    row_stride, column_stride = (
        stride // bits.itemsize if extent > 1 else 1 for stride, extent in zip(bits.strides, bits.shape, strict=True)
    )
    corner = bits[:: -1 if row_stride < 0 else 1, :: -1 if column_stride < 0 else 1]  # the lowest address first
    reach = [(extent - 1) * stride for extent, stride in zip(bits.shape, (row_stride, column_stride), strict=True)]
    extent = sum(map(abs, reach)) + 1
    flat = np.lib.stride_tricks.as_strided(corner, (extent,), (bits.itemsize,), writeable=False)
    return Matrix(flat, -sum(min(0, distance) for distance in reach), row_stride, column_stride, kind)


def flat_bytes(view: ArrayView) -> np.ndarray:
    """A C-contiguous uint8 host view as one dimension."""
    return view.bits().reshape(-1)


def aligned(memory: np.ndarray) -> np.ndarray:
    """uint8 memory at an address that 32-bit words may be read from; copied only where it is not."""
    return memory if memory.ctypes.data % 4 == 0 else memory.copy()


def scalar(value: ArrayView | float) -> np.float32:
    """An fp32 number, or the one element of an fp32 host view; no conversion, which could flush it."""
    bits = np.uint32(fp32.bits_of(value)) if isinstance(value, float) else value.bits().reshape(-1)[0]
    found: np.float32 = bits.view(np.float32)
    return found


def offsets(layout: ScaleLayout, columns: int, first_row: int, end_row: int) -> tuple[np.ndarray, np.ndarray]:
    """Row and column parts of the scales' offsets for some physical rows: an offset is the sum of the two."""
    physical_columns = layout.shape(1, columns)[1]
    rows = layout.offset(np.arange(first_row, end_row, dtype=np.int64), 0, columns)
    return rows, layout.offset(0, np.arange(physical_columns, dtype=np.int64), columns)


def new_array(shape: tuple[int, ...], dtype: Any = np.uint8, tag: PaddingTag | None = None) -> np.ndarray:
    """Host memory from the current pool, not initialized."""
    dtype = np.dtype(dtype)
    buffer = current_pool().allocate(math.prod(shape) * dtype.itemsize, interop.CPU, 0, tag)
    return buffer.numpy(shape, dtype)


class Target:
    """Where a dense result goes: the caller's ``out``, or new memory that becomes an array of ``library``.

    Attributes:
        bits: C-contiguous, writable, aligned: for a kernel to fill.
    """

    def __init__(self, shape: tuple[int, ...], dtype: str, out: ArrayView | None, library: str) -> None:
        self.dtype, self.library = dtype, library
        self.final = None if out is None else out.bits()
        aligned = self.final is not None and self.final.flags.aligned
        self.bits = self.final if aligned and self.final is not None else new_array(shape, BITS[dtype])

    def finish(self) -> Any:
        """The result in its library, or None where it went to ``out``."""
        if self.final is None:
            return interop.from_host(self.bits, self.library, self.dtype)
        if self.final is not self.bits:
            self.final[...] = self.bits
        return None
