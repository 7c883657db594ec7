"""What a kernel needs to know of how a matrix lies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fp4rt.errors import ShapeError, counted
from fp4rt.interop.dtypes import itemsize

if TYPE_CHECKING:
    from fp4rt.interop import ArrayView

__all__ = ["byte_strides", "check_address", "check_alignment", "distances"]


def distances(m: int, n: int, row_stride: int, column_stride: int, dtype: str) -> tuple[int, int]:
    """Bytes between rows and between columns of a matrix whose strides count elements.

    An extent of 1 has no distance: it gets what asks least of a kernel.
    """
    size = itemsize(dtype)
    return (row_stride * size if m > 1 else 0), (column_stride * size if n > 1 else size)


def byte_strides(x: ArrayView) -> tuple[int, int]:
    """:func:`distances` of a view."""
    (m, n), (row, column) = x.shape, x.strides
    return distances(m, n, row, column, x.dtype)


def check_address(address: int, dtype: str, name: str = "x") -> None:
    """Elements must lie at multiples of their size, as in every array that a library made itself.

    Args:
        address: of the first element; one modulo 16 will do.
        dtype: name of the element type.
        name: what the caller calls the array.

    Raises:
        ShapeError: they do not.
    """
    size = itemsize(dtype)
    if address % size:
        raise ShapeError(
            f"{name} starts {counted(address % size, 'byte')} into an element of {dtype}, which takes {size}; "
            "the device reads whole elements: pass a copy"
        )


def check_alignment(x: ArrayView) -> None:
    """:func:`check_address` of a view."""
    check_address(x.pointer, x.dtype, x.name)
