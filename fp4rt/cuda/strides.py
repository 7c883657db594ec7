"""What a kernel needs to know of how a matrix lies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fp4rt.errors import ShapeError
from fp4rt.interop.dtypes import itemsize

if TYPE_CHECKING:
    from fp4rt.interop import ArrayView

__all__ = ["byte_strides", "check_alignment"]


def byte_strides(x: ArrayView) -> tuple[int, int]:
    """Distance in bytes between rows and between columns. An extent of 1 has no distance: any would do."""
    (m, n), (row, column), size = x.shape, x.strides, itemsize(x.dtype)
    return (row * size if m > 1 else 0), (column * size if n > 1 else size)


def check_alignment(x: ArrayView) -> None:
    """Elements must lie at multiples of their size, as in every array that a library made itself.

    Raises:
        ShapeError: they do not.
    """
    if x.pointer % itemsize(x.dtype):
        raise ShapeError(
            f"{x.name} starts at {x.pointer:#x}, not at a multiple of the {itemsize(x.dtype)} bytes of {x.dtype}; "
            "the device cannot read such elements: pass a copy"
        )
