"""Checks of what a tensor is made of: its extents, its padding, and the dtypes and sizes of its arrays."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from fp4rt.errors import DtypeError, ShapeError
from fp4rt.format import BLOCK
from fp4rt.layout import round_up

if TYPE_CHECKING:
    from fp4rt.interop import ArrayView

__all__ = ["check_bytes", "check_integer", "check_matrix_shape", "check_one_float", "check_padded_n", "check_parts"]


def check_matrix_shape(shape: Any, what: str, columns: str = "n") -> tuple[int, int]:
    """(m, n) as integers; ``what`` opens the error, e.g. "quantize needs x"; ``columns`` is what n is called there.

    Raises:
        ShapeError: not two extents, m negative, or no columns.
        DtypeError: an extent is no integer.
    """
    try:
        shape = tuple(shape)
    except TypeError:
        raise DtypeError(f"{what} as (m, {columns}), got {shape!r}") from None
    if len(shape) != 2:
        raise ShapeError(f"{what} with 2 dimensions (m, {columns}), got shape {shape}; reshape it to two dimensions")
    try:
        m, n = int(shape[0]), int(shape[1])
        whole = (m, n) == shape
    except (TypeError, ValueError, OverflowError):
        whole = False
    if not whole:
        raise DtypeError(f"{what} with integers (m, {columns}), got shape {shape}")
    if m < 0 or n <= 0:
        raise ShapeError(
            f"{what} with m >= 0 rows and {columns} >= 1 columns, got shape {shape}; there is nothing to scale"
        )
    return m, n


def check_padded_n(function: str, shape: tuple[int, int], padded_n: Any, name: str = "x.shape") -> int:
    """The number of columns in memory for a matrix of ``shape``.

    Raises:
        ShapeError: n is not a multiple of 16 and there is no ``padded_n``, or ``padded_n`` does not fit.
    """
    n = shape[1]
    if padded_n is None:
        if n % BLOCK:
            raise ShapeError(
                f"{function} needs n divisible by {BLOCK}, got {name} = {shape}; pass padded_n={round_up(n, BLOCK)}"
            )
        return n
    padded = check_integer(function, "padded_n", padded_n)
    if padded % BLOCK or padded < n:
        fitting = round_up(max(padded, n), BLOCK)
        raise ShapeError(
            f"{function} needs padded_n divisible by {BLOCK} and not below n = {n}, got padded_n = {padded} with "
            f"{name} = {shape}; pass padded_n={fitting}"
        )
    return padded


def check_integer(function: str, name: str, value: Any) -> int:
    """An integer of any library as an int.

    Raises:
        DtypeError: it is none.
    """
    try:
        return operator.index(value)
    except TypeError:
        raise DtypeError(f"{function} needs {name} as an integer, got {value!r}") from None


def check_bytes(owner: str, name: str, view: ArrayView, dtypes: tuple[str, ...], shape: tuple[int, ...]) -> None:
    """An array of bytes of this very shape, C-contiguous; ``owner`` opens the error."""
    if view.dtype not in dtypes:
        raise DtypeError(
            f"{owner} needs {name} as one of {', '.join(dtypes)}, got {view.dtype}; "
            "bytes are reinterpreted, never converted"
        )
    if tuple(view.shape) != shape:
        raise ShapeError(f"{owner} needs {name} of shape {shape}, got {tuple(view.shape)}; reshape or repack it")
    if not view.contiguous:
        raise ShapeError(
            f"{owner} needs {name} C-contiguous, got strides of {tuple(view.strides)} elements for shape {shape}; "
            "pass a contiguous copy"
        )


def check_parts(owner: Any, arrays: Iterable[tuple[str, Any, tuple[tuple[int, ...], str]]]) -> None:
    """Arrays, views or tracers of these very shapes and dtypes."""
    for name, array, (shape, dtype) in arrays:
        what = f"{type(owner).__name__} of shape {owner.shape} needs {name}"
        if not (hasattr(array, "shape") and hasattr(array, "dtype")):
            raise DtypeError(f"{what} as an array, got {type(array).__name__}")
        found = tuple(array.shape)
        if found != shape:
            raise ShapeError(
                f"{what} of shape {shape}, got {found}; several in one, as jax.vmap returns them, are taken by "
                "jax.vmap again, or one at a time"
            )
        if str(array.dtype).removeprefix("torch.") != dtype:
            raise DtypeError(f"{what} as {dtype}, got {array.dtype}; its bytes cannot be cast")
        if not getattr(array, "contiguous", True):  # what only a view knows
            strides = tuple(array.strides)
            raise ShapeError(f"{what} C-contiguous, got strides of {strides} elements; pass a contiguous copy")


def check_one_float(owner: str, name: str, view: ArrayView) -> None:
    """One fp32 element."""
    if view.dtype != "float32":
        raise DtypeError(f"{owner} needs {name} as float32, got {view.dtype}")
    elements = 1
    for extent in view.shape:
        elements *= extent
    if elements != 1:
        raise ShapeError(f"{owner} needs {name} with one element, got shape {tuple(view.shape)}")
