"""The public functions: check once at the door, then the backend of the device where the arrays live.

A host array runs on ``fp4rt.cpu``, a device array on ``fp4rt.cuda``; nothing moves between devices unasked. What is
handed to a backend, and what it must do, is the contract in ``fp4rt.backend``.

Clipping. With a global scale that is too large for the tensor, blocks whose maximum exceeds 2688 / global_scale
saturate (scale byte 0x7E, codes +-6) without an error, as the hardware does. ``quantization_error(x, q)`` counts these
blocks, and reports the error they cause; the automatic global scale never clips a finite value of a tensor whose amax
is at least 4.05e-33.

Below that the order of the arithmetic has a limit: the factor 1 / (scale * (1 / global_scale)) of a block with the
smallest scale, 2^-9, exceeds fp32 where the global scale reaches 2^119 = 6.65e35 (or, by rounding, three units in the
last place less), that is where amax falls to 2688 / 2^119 = 4.0445e-33. All elements of such a block but zeros get
code +-6; blocks with larger scales follow as amax shrinks.
"""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any, cast

from fp4rt import interop
from fp4rt.arguments import (
    check_apart,
    check_array_out,
    check_bias,
    check_dtype,
    check_global_scale,
    check_left,
    check_matrix,
    check_quantized,
    check_quantized_out,
    check_right,
    check_scalar,
)
from fp4rt.backend import Backend, BackendStatus, Explanation, PrepackedViews, QuantizedViews
from fp4rt.errors import BackendUnavailable, DeviceError, ShapeError
from fp4rt.layout import get_layout
from fp4rt.prepacked import PrepackedWeight, check_packable
from fp4rt.tensor import QuantizedTensor
from fp4rt.tensor_checks import check_padded_n

if TYPE_CHECKING:
    from fp4rt.cpu.statistics import QuantizationError
    from fp4rt.interop import ArrayView

__all__ = [
    "backends",
    "dequantize",
    "explain",
    "global_scale",
    "matmul",
    "prepack",
    "quantization_error",
    "quantize",
    "relayout",
    "unpack",
    "weight_values",
]


def quantize(
    x: Any,
    global_scale: Any = None,
    *,
    layout: str = "128x4",
    padded_n: int | None = None,
    out: QuantizedTensor | None = None,
    stream: Any = None,
) -> QuantizedTensor:
    """Quantize a matrix to NVFP4, following the steps of ``fp4rt.format`` to the bit.

    Multiply a tensor whose amax is below 4.05e-33, or whose ``global_scale`` is above 6.6e35, by a power of two first:
    the factor of a block may there exceed fp32, and all of its elements then saturate (see the module).

    A NaN makes its block NaN; infinities become the largest value that there is, 6 * 448 / global scale.

    Args:
        x: (m, n) float16, bfloat16 or float32, any strides, read-only or not; never modified.
        global_scale: the encode scale 2688 / amax: a number or a one-element fp32 array on x's device. None computes it
            from the finite values of x, on the device.
        layout: where the block scales lie: "128x4", "linear" or "8x4".
        padded_n: columns in memory, a multiple of 16 not below n; columns n ... get code 0 and scale 0. None means n,
            which must then be a multiple of 16.
        out: a tensor of the same shape, layout and padded_n to write to; every byte of it is written.
        stream: CUDA stream; the current one of x's library where None. A host array ignores it.

    Returns:
        The quantized tensor in x's library, on its device; ``out`` itself where given.

    Raises:
        ShapeError: x is not two-dimensional, n or ``padded_n`` do not fit, or ``out`` has other sizes.
        DtypeError: x is not float16, bfloat16 or float32; nothing is cast.
        ScaleError: a global scale on the host is not finite and positive.
        LayoutError, DeviceError, BackendUnavailable: unknown layout, arrays on two devices, no usable backend.
    """
    source = interop.view(x, "x", stream)
    alike, current = (type(x), source.library) if stream is None else (None, None)  # on one stream: nothing to wait for
    stream = interop.enter_stream(stream, source)  # x decides; the other arrays are ordered before it
    m, n = check_matrix("quantize", source)
    known = get_layout(layout)
    padded_n = check_padded_n("quantize", (m, n), padded_n)
    scale = check_global_scale("quantize", global_scale, source, None if type(global_scale) is alike else stream)
    target = None
    if out is not None:
        order = None if current and getattr(out, "remembered_library", None) == current else stream
        target = check_quantized_out("quantize", out, source, (m, n), known.name, padded_n, order)
        own = isinstance(scale, interop.ArrayView) and scale.pointer == target.global_scale.pointer
        check_apart("quantize", target[:3], (source, None if own else scale))  # out's own scale stays as it is
    backend = _backend(source)
    result = backend.quantize(source, scale, known, padded_n, target, stream)
    _leave(stream, target, source, scale)
    return out if out is not None else cast(QuantizedTensor, result)


def dequantize(q: QuantizedTensor, dtype: Any = "float32", *, out: Any = None, stream: Any = None) -> Any:
    """code * fp32(scale / global_scale), rounded once to ``dtype``.

    Args:
        q: the quantized tensor, (m, n).
        dtype: "float16", "bfloat16" or "float32", as a name or as a dtype object of any library.
        out: a C-contiguous (m, n) array of that dtype to write to.
        stream: CUDA stream; the current one of q's library where None.

    Returns:
        (m, n) array in q's library; ``out`` itself where given.

    Raises:
        DtypeError: q is not a QuantizedTensor, or the dtype is none of the three.
        ShapeError, DeviceError: ``out`` does not fit.
    """
    views = check_quantized("dequantize", "q", q, stream)
    stream = interop.enter_stream(stream, views.data)
    name = check_dtype("dequantize", "dtype", dtype)
    target = None
    if out is not None:
        target = check_array_out("dequantize", out, views.data, q.shape, name, stream)
        check_apart("dequantize", (target,), views[:3])
    result = _backend(views.data).dequantize(views, name, target, stream)
    _leave(stream, target, views)
    return out if out is not None else result


def relayout(
    q: QuantizedTensor, layout: str, *, out: QuantizedTensor | None = None, stream: Any = None
) -> QuantizedTensor:
    """The same codes and scales with the scales lying in another layout; bytes are kept.

    Args:
        q: the quantized tensor.
        layout: the layout wanted; the same as q's is allowed.
        out: a tensor of q's shape and padded_n in that layout to write to.
        stream: CUDA stream; the current one of q's library where None.

    Returns:
        A tensor that shares q's data and global scale (only scales move); with ``out``, ``out`` itself, all copied.

    Raises:
        LayoutError: the layout is unknown. ShapeError, DeviceError: ``out`` does not fit, or shares memory with q.
    """
    views = check_quantized("relayout", "q", q, stream)
    stream = interop.enter_stream(stream, views.data)
    known = get_layout(layout)
    target = None
    if out is not None:
        target = check_quantized_out("relayout", out, views.data, q.shape, known.name, q.padded_n, stream)
        if target.data.pointer != views.data.pointer:  # copied as they are, so onto themselves is fine
            check_apart("relayout", (target.data,), (views.data,))
        check_apart("relayout", (target.data,), (views.scales, views.global_scale))
        check_apart("relayout", (target.scales,), views[:3])
        check_apart("relayout", (target.global_scale,), (views.data, views.scales))
    scales = _backend(views.data).relayout(views, known, target, stream)
    _leave(stream, target, views)
    if out is not None:
        return out
    return QuantizedTensor.trusted(q.data, scales, q.global_scale, q.shape, known.name, q.padded_n)


def global_scale(x: Any, *, stream: Any = None) -> Any:
    """fp32 (1,) on x's device: 2688 / amax over the finite values of x; 1.0 where there is nothing to scale.

    Args:
        x: (m, n) float16, bfloat16 or float32, any strides.
        stream: CUDA stream; the current one of x's library where None.

    Raises:
        ShapeError, DtypeError: x is not such a matrix.
    """
    source = interop.view(x, "x", stream)
    stream = interop.enter_stream(stream, source)
    check_matrix("global_scale", source)
    result = _backend(source).global_scale(source, stream)
    interop.hold_foreign(stream, source)
    return result


def matmul(
    a: Any,
    b: Any,
    *,
    out_dtype: Any = "bfloat16",
    alpha: Any = None,
    bias: Any = None,
    out: Any = None,
    stream: Any = None,
) -> Any:
    """alpha * a @ b.T + bias, accumulated in fp32 and rounded once; padding never influences it.

    The result carries no gradient: ``fp4rt.torch.NVFP4Linear`` and ``fp4rt.jax.matmul`` have one.

    Args:
        a: QuantizedTensor (m, k), or a float16/bfloat16 array (m, k) of any strides.
        b: QuantizedTensor (n, k), or the result of :func:`prepack`.
        out_dtype: "float16", "bfloat16" or "float32", whatever a's dtype is.
        alpha: a number or a one-element fp32 array, in the place of the operands' global scales, which then do not
            count; None means 1 / (their product), and so the product of the values.
        bias: (n,) float16, bfloat16 or float32, added in fp32.
        out: a C-contiguous (m, n) array of ``out_dtype`` to write to.
        stream: CUDA stream; the current one of a's library where None.

    Returns:
        (m, n) in the library of ``a``; ``out`` itself where given.

    Raises:
        ShapeError: the operands' k differ, or bias or ``out`` do not fit.
        DtypeError: an operand has another kind or dtype. DeviceError: operands on different devices.
    """
    left, m, k = check_left(a, stream)
    first = left.data if isinstance(left, QuantizedViews) else left
    alike, current = (type(first.owner), first.library) if stream is None else (None, None)  # as in quantize
    stream = interop.enter_stream(stream, first)
    order = None if current and getattr(b, "remembered_library", None) == current else stream
    right, n = check_right(b, k, first, order)
    name = check_dtype("matmul", "out_dtype", out_dtype)
    factor = None if alpha is None else check_scalar("matmul", "alpha", alpha, first, stream)
    addend = None if bias is None else check_bias(bias, n, first, None if type(bias) is alike else stream)
    target = None
    if out is not None:
        order = None if type(out) is alike else stream
        target = check_array_out("matmul", out, first, (m, n), name, order, "out_dtype")
        read = left if isinstance(left, QuantizedViews) else (left,)
        check_apart("matmul", (target,), (*read, *right, factor, addend))
    result = _backend(first).matmul(left, right, name, factor, addend, target, stream)
    _leave(stream, target, left, right, factor, addend)
    return out if out is not None else result


def explain(a: Any, b: Any, *, measure: bool = False, stream: Any = None) -> Explanation:
    """How ``matmul(a, b)`` would be computed: kernel, tile, workspace, and why.

    Args:
        a: as for :func:`matmul`.
        b: as for :func:`matmul`.
        measure: time the candidate tiles on the device first, which waits for it, and remember the fastest for this
            and later processes, in a file in the cache folder.
        stream: CUDA stream; the current one of a's library where None.

    Raises:
        The errors of :func:`matmul` for these operands.
    """
    left, _, k = check_left(a, stream)
    first = left.data if isinstance(left, QuantizedViews) else left
    stream = interop.enter_stream(stream, first)
    right, _ = check_right(b, k, first, stream)
    return _backend(first).explain(left, right, measure, stream)


def prepack(b: QuantizedTensor, *, stream: Any = None) -> PrepackedWeight:
    """Repack a weight once so that :func:`matmul` on a GPU reads it faster; it then takes the result as ``b``.

    On the CPU products take either form, and the plain one faster.

    Args:
        b: QuantizedTensor (n, k), any layout; k up to 2^28.
        stream: CUDA stream; the current one of b's library where None.

    Raises:
        ShapeError: b has more rows or columns than the tiles can count. DtypeError: it is not a QuantizedTensor.
    """
    views = check_quantized("prepack", "b", b, stream)
    check_packable(*views.shape)
    stream = interop.enter_stream(stream, views.data)
    result = _backend(views.data).prepack(views, stream)
    interop.hold_foreign(stream, views)
    return result


def unpack(weight: PrepackedWeight, *, stream: Any = None) -> QuantizedTensor:
    """The tensor that a prepacked weight was made from: every byte of its blocks; padding comes back as zeros."""
    views, restored, stream = _prepacked_views(weight, stream)
    result = _backend(views.data).unpack(views, restored, stream)
    interop.hold_foreign(stream, views, restored)
    return result


def _prepacked_views(weight: PrepackedWeight, stream: Any) -> tuple[PrepackedViews, ArrayView, int]:
    """What products read of a weight, the records beside it, and the stream's handle."""
    views = weight.views(stream)
    handle = interop.enter_stream(stream, views.data)
    return views, interop.view(weight.restored, "weight.restored", handle), handle


def weight_values(b: QuantizedTensor | PrepackedWeight, out: Any, *, stream: Any = None) -> None:
    """The values (n, k) of either kind of weight to ``out``, rounded to its dtype: what a gradient multiplies with."""
    if not isinstance(b, PrepackedWeight):
        dequantize(b, out.dtype, out=out, stream=stream)
        return
    views, restored, stream = _prepacked_views(b, stream)
    dtype = check_dtype("weight_values", "out.dtype", out.dtype)
    target = check_array_out("weight_values", out, views.data, b.shape, dtype, stream)
    _backend(views.data).prepacked_values(views, restored, target, stream)
    _leave(stream, target, views, restored)


def quantization_error(x: Any, q: QuantizedTensor) -> QuantizationError:
    """How well ``q`` represents ``x``: SQNR in dB, largest error, clipped blocks, zero blocks.

    Args:
        x: (m, n) float16, bfloat16 or float32 on the host.
        q: its quantized form on the host.

    Raises:
        ShapeError: the shapes differ. DeviceError: an array is on a device; copy it to the host first.
    """
    source = interop.view(x, "x")
    shape = check_matrix("quantization_error", source)
    views = check_quantized("quantization_error", "q", q, None)
    for name, view in (("x", source), ("q", views.data)):
        if view.device.kind != "cpu":
            raise DeviceError(f"quantization_error runs on the host, got {name} on {view.device}; copy it to the host")
    if shape != q.shape:
        raise ShapeError(
            f"quantization_error needs x and q of one shape, got x.shape = {shape} and q.shape = {q.shape}"
        )
    from fp4rt.cpu.statistics import quantization_error as measure

    return measure(source, views)


def _leave(stream: int, target: QuantizedViews | ArrayView | None, *read: Any) -> None:
    """What follows the work that a call has given to a stream: memory is held for it, what it writes is counted."""
    interop.hold_foreign(stream, *read, target)
    if target is not None:
        interop.note_written(target[:3] if isinstance(target, QuantizedViews) else (target,))


def backends() -> dict[str, BackendStatus]:
    """What is usable here and, where not, why: {"cpu": status, "cuda": status}; never raises."""
    found = {}
    for kind in ("cpu", "cuda"):
        try:
            found[kind] = _load_backend(kind).status()
        except Exception as error:
            found[kind] = BackendStatus(kind, False, str(error))
    return found


@functools.cache
def _load_backend(kind: str) -> Backend:
    if kind not in ("cpu", "cuda"):
        raise BackendUnavailable(f"no backend for device kind {kind!r}; arrays must be on the host or on a CUDA device")
    return cast(Backend, importlib.import_module(f"fp4rt.{kind}"))


def _backend(view: ArrayView) -> Backend:
    return _load_backend(view.device.kind)
