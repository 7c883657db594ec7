"""The checks at the door: every argument of a public function is looked at here, once; inside, nobody looks again.

Each check returns what a backend takes (``fp4rt.backend``), or raises before anything has been written.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, cast

from fp4rt import fp32, interop
from fp4rt.backend import PrepackedViews, QuantizedViews
from fp4rt.errors import DtypeError, LayoutError, ScaleError, ShapeError
from fp4rt.format import INPUT_DTYPES
from fp4rt.interop import ArrayView
from fp4rt.layout import data_shape
from fp4rt.prepacked import PrepackedWeight
from fp4rt.tensor import QuantizedTensor
from fp4rt.tensor_checks import check_matrix_shape

__all__ = [
    "ACTIVATION_DTYPES",
    "check_apart",
    "check_array_out",
    "check_bias",
    "check_dtype",
    "check_global_scale",
    "check_is_no_weight",
    "check_is_quantized",
    "check_is_weight",
    "check_left",
    "check_matrix",
    "check_positive",
    "check_quantized",
    "check_quantized_out",
    "check_right",
    "check_scalar",
    "number_as_fp32",
]

ACTIVATION_DTYPES = ("float16", "bfloat16")
DTYPE_SPELLINGS = {"half": "float16", "fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "float": "float32"}


def check_matrix(
    function: str, view: ArrayView, name: str = "x", dtypes: tuple[str, ...] = INPUT_DTYPES, columns: str = "n"
) -> tuple[int, int]:
    """(m, n) of a two-dimensional array of one of ``dtypes``; errors call n ``columns``."""
    shape = view.shape
    if len(shape) == 2 and shape[1] > 0 and view.dtype in dtypes:  # the errors take longer to write than to rule out
        return shape[0], shape[1]
    shape = check_matrix_shape(shape, f"{function} needs {name}", columns)
    if view.dtype not in dtypes:
        raise DtypeError(f"{function} needs {name} as {', '.join(dtypes)}, got {view.dtype}; cast it yourself")
    return shape


def check_dtype(function: str, name: str, dtype: Any) -> str:
    """The name of a dtype given as a name or as a dtype object of any library."""
    named = dtype if isinstance(dtype, str) else getattr(dtype, "name", getattr(dtype, "__name__", str(dtype)))
    text: str = named.removeprefix("torch.") if isinstance(named, str) else ""
    text = DTYPE_SPELLINGS.get(text, text)
    if text not in INPUT_DTYPES:
        is_array = hasattr(dtype, "shape") and not isinstance(dtype, type)
        got = f"an array of {type(dtype).__name__}" if is_array else repr(dtype)
        raise DtypeError(f"{function} needs {name} as one of {', '.join(INPUT_DTYPES)}, got {got}")
    return text


def check_is_quantized(function: str, name: str, q: Any) -> None:
    """Refuse what is no QuantizedTensor."""
    if not isinstance(q, QuantizedTensor):
        remedy = "make one with fp4rt.quantize or fp4rt.QuantizedTensor(...)"
        if isinstance(q, PrepackedWeight) and name != "out":  # what is read has a tensor that it was made from
            remedy = ".unpack() gives back the one that it was made from"
        raise DtypeError(f"{function} needs {name} as a QuantizedTensor, got {type(q).__name__}; {remedy}")


def check_quantized(function: str, name: str, q: Any, stream: Any) -> QuantizedViews:
    """The views of a QuantizedTensor."""
    check_is_quantized(function, name, q)
    return q.views(stream)


def check_scalar(function: str, name: str, value: Any, beside: ArrayView, stream: Any) -> ArrayView | float:
    """A number as fp32, or a view of a one-element fp32 array on the device of ``beside``."""
    if type(value) is float and value != 0:  # 0.0 and -0.0 would be remembered as one
        return _remembered_fp32(value)
    number = None if hasattr(value, "__dlpack__") else number_as_fp32(value)  # the second question is the dearer one
    if number is not None:
        return number
    try:
        view = interop.view(value, name, stream)
    except DtypeError:
        if interop.is_array(value):
            raise
        got = type(value).__name__
        raise DtypeError(f"{function} needs {name} as a number or a float32 array, got {got}") from None
    if view.dtype != "float32":
        raise DtypeError(f"{function} needs {name} as a number or a float32 array, got {view.dtype}")
    if view.shape != (1,) and math.prod(view.shape) != 1:
        raise ShapeError(f"{function} needs {name} with one element, got shape {tuple(view.shape)}")
    if view.device != beside.device:
        interop.same_device(beside, view)
    return view


def number_as_fp32(value: Any) -> float | None:
    """A real number of Python or NumPy as fp32; None where it is none: a truth value is no scale."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return None
    try:
        return fp32.nearest(value)
    except OverflowError:  # an integer beyond even fp64
        return math.inf if cast(Any, value) > 0 else -math.inf


_remembered_fp32 = lru_cache(maxsize=1024)(fp32.nearest)  # which costs as much as a view


def check_global_scale(function: str, value: Any, beside: ArrayView, stream: Any) -> ArrayView | float | None:
    """A global scale: None, a number, or a one-element array; on the host also its value."""
    if value is None:
        return None
    scale = check_scalar(function, "global_scale", value, beside, stream)
    if isinstance(scale, float):
        number = scale
    elif scale.device.kind == "cpu":
        number = fp32.number_of(int(scale.bits().reshape(())))
    else:
        return scale  # on the device: looking would synchronize
    check_positive(function, number)
    return scale


def check_positive(function: str, number: float) -> None:
    """Refuse a global scale that is none."""
    if not (math.isfinite(number) and number > 0):
        raise ScaleError(
            f"{function} needs global_scale finite and positive in fp32, got {number}; "
            "it is the encode scale 2688 / amax; None computes it"
        )


def _check_out_view(
    function: str, name: str, view: ArrayView, beside: ArrayView, shape: tuple[int, ...], dtype: str, said_by: str = ""
) -> None:
    """``said_by``: the argument that says which dtype it is, where one does."""
    if view.dtype != dtype:
        remedy = f"; pass {said_by}={view.dtype!r} for that" if said_by and view.dtype in INPUT_DTYPES else ""
        raise DtypeError(f"{function} needs {name} as {dtype}, got {view.dtype}{remedy}")
    if view.shape != shape:
        raise ShapeError(f"{function} needs {name} of shape {shape}, got {tuple(view.shape)}")
    if not view.contiguous:
        raise ShapeError(
            f"{function} needs {name} C-contiguous, got strides of {tuple(view.strides)} elements for shape {shape}"
        )
    if view.readonly:
        raise ShapeError(f"{function} needs {name} writable, got a read-only array; pass a writable one")
    if view.device != beside.device:
        interop.same_device(beside, view)


def _check_wants_no_gradient(function: str, name: str, out: Any) -> None:
    if interop.wants_gradient(out):
        raise DtypeError(f"{function} needs {name} that wants no gradient, which could not go through it; .detach() it")


def check_array_out(
    function: str,
    out: Any,
    beside: ArrayView,
    shape: tuple[int, int],
    dtype: str,
    stream: Any,
    said_by: str = "dtype",
) -> ArrayView:
    """The view of an array to write a dense result to; the call's argument ``said_by`` says of which dtype."""
    _check_wants_no_gradient(function, "out", out)
    view = interop.view(out, "out", stream)
    _check_out_view(function, "out", view, beside, shape, dtype, said_by)
    return view


def check_quantized_out(
    function: str,
    out: Any,
    beside: ArrayView,
    shape: tuple[int, int],
    layout: str,
    padded_n: int,
    stream: Any,
) -> QuantizedViews:
    """The views of a QuantizedTensor to write a result to."""
    if not isinstance(out, QuantizedTensor):
        check_quantized(function, "out", out, stream)
    if out.shape != shape or out.padded_n != padded_n:
        raise ShapeError(
            f"{function} needs out with shape {shape} and padded_n = {padded_n}, "
            f"got shape {out.shape} and padded_n = {out.padded_n}"
        )
    if out.layout != layout:
        raise LayoutError(f"{function} needs out in layout {layout!r}, got {out.layout!r}; layout= says which")
    views = out.views(stream)
    if not out.is_checked_out(views):
        _check_quantized_parts(function, views)
        out.remember_checked_out(views)
    if views.data.device != beside.device:
        interop.same_device(beside, views.data)
    return views


def _check_quantized_parts(function: str, views: QuantizedViews) -> None:
    m, beside = views.shape[0], views.data
    _check_out_view(function, "out.data", views.data, beside, data_shape(m, views.padded_n), "uint8")
    scale_shape = views.layout.shape(m, views.columns)
    _check_out_view(function, "out.scales", views.scales, beside, scale_shape, "uint8")
    _check_out_view(function, "out.global_scale", views.global_scale, beside, (1,), "float32")
    _check_wants_no_gradient(function, "out.global_scale", views.global_scale.owner)
    check_apart(function, (views.data,), (views.scales, views.global_scale))
    check_apart(function, (views.scales,), (views.global_scale,))


def check_apart(function: str, targets: Sequence[ArrayView], sources: Iterable[Any]) -> None:
    """That what is written shares no byte with what is read: kernels read in another order than they write.

    An array counts from its first byte to its last, gaps between its rows included; sources that are no views are
    passed over.
    """
    written = [target.span for target in targets]
    for source in sources:
        if type(source) is ArrayView:
            first, end = source.span
            for start, stop in written:
                if start < end and first < stop:
                    raise ShapeError(
                        f"{function} needs out in memory of its own, got one that overlaps {source.name}; pass another"
                    )


def check_is_no_weight(a: Any) -> None:
    """Refuse a prepacked weight as operand ``a`` of matmul."""
    if isinstance(a, PrepackedWeight):
        raise DtypeError(
            "matmul needs a as activations, an array or a QuantizedTensor, got a PrepackedWeight: the operands look "
            "swapped; the weight is b"
        )


def check_is_weight(b: Any) -> None:
    """Refuse what is no operand ``b`` of matmul."""
    if not isinstance(b, (PrepackedWeight, QuantizedTensor)):
        raise DtypeError(
            f"matmul needs b as a QuantizedTensor or the result of prepack, got {type(b).__name__}; "
            "quantize the weight first"
        )


def check_left(a: Any, stream: Any) -> tuple[QuantizedViews | ArrayView, int, int]:
    """Operand ``a`` of matmul, and its (m, k)."""
    if isinstance(a, QuantizedTensor):
        return a.views(stream), *a.shape
    check_is_no_weight(a)
    view = interop.view(a, "a", stream)
    return view, *check_matrix("matmul", view, "a", ACTIVATION_DTYPES, "k")


def check_right(b: Any, k: int, first: ArrayView, stream: Any) -> tuple[QuantizedViews | PrepackedViews, int]:
    """Operand ``b`` of matmul on the device of ``first`` with the same k, and its n."""
    check_is_weight(b)
    right, (n, k_of_b) = b.views(stream), b.shape
    if right.data.device != first.device:
        interop.same_device(first, right.data)
    if k_of_b != k:
        raise ShapeError(
            f"matmul needs a (m, k) and b (n, k) with one k, got k = {k} and k = {k_of_b}; "
            "columns that only pad belong into padded_n, not into the shape"
        )
    return right, n


def check_bias(bias: Any, n: int, first: ArrayView, stream: Any) -> ArrayView:
    """The view of a bias of n elements."""
    view = interop.view(bias, "bias", stream)
    if view.dtype not in INPUT_DTYPES:
        raise DtypeError(f"matmul needs bias as {', '.join(INPUT_DTYPES)}, got {view.dtype}; cast it yourself")
    if tuple(view.shape) != (n,):
        raise ShapeError(f"matmul needs bias of shape ({n},), got {tuple(view.shape)}")
    interop.same_device(first, view)
    return view
