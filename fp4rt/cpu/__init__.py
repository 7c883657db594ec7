"""The CPU backend: the functions of ``fp4rt.backend.Backend`` over host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fp4rt import interop
from fp4rt.backend import BackendStatus, QuantizedViews
from fp4rt.cpu import reference
from fp4rt.layout import ScaleLayout
from fp4rt.tensor import QuantizedTensor

if TYPE_CHECKING:
    from fp4rt.interop import ArrayView

__all__ = ["dequantize", "global_scale", "matmul", "prepack", "quantize", "relayout", "status"]


def status() -> BackendStatus:
    return BackendStatus("cpu", True, "NumPy and numba", ("cpu",))


def _scalar(value):
    return np.float32(value) if isinstance(value, float) else value.bits().view(np.float32).reshape(-1)[0]


def _values(view: ArrayView) -> np.ndarray:
    return reference.widen(view.bits(), view.dtype)


def quantize(x, global_scale, layout: ScaleLayout, padded_n, out, stream):
    del stream
    values = _values(x)
    gs = reference.global_scale(values) if global_scale is None else _scalar(global_scale)
    data, scales = reference.quantize(values, gs, layout, padded_n)
    if out is not None:
        out.data.bits()[...] = data
        out.scales.bits()[...] = scales
        out.global_scale.bits().view(np.float32)[...] = gs
        return None
    lib = x.library
    return QuantizedTensor.trusted(
        interop.from_host(data, lib), interop.from_host(scales, lib), interop.from_host(np.array([gs], np.float32), lib),
        tuple(x.shape), layout.name, padded_n)


def _dequantize(q: QuantizedViews, gs=None):
    gs = _scalar(q.global_scale) if gs is None else gs
    return reference.dequantize(q.data.bits(), q.scales.bits(), gs, q.shape, q.layout)


def _result(bits, dtype, out, library):
    if out is not None:
        out.bits()[...] = bits
        return None
    return interop.from_host(np.ascontiguousarray(bits), library, dtype)


def dequantize(q: QuantizedViews, dtype: str, out, stream) -> Any:
    return _result(reference.round_to_bits(_dequantize(q), dtype), dtype, out, q.data.library)


def relayout(q: QuantizedViews, layout: ScaleLayout, out, stream):
    scales = reference.relayout(q.scales.bits(), q.shape, q.columns, q.layout, layout)
    if out is not None:
        out.data.bits()[...] = q.data.bits()
        out.scales.bits()[...] = scales
        out.global_scale.bits()[...] = q.global_scale.bits()
        return None
    lib = q.data.library
    return QuantizedTensor.trusted(q.data.owner, interop.from_host(scales, lib), q.global_scale.owner, q.shape, layout.name, q.padded_n)


def global_scale(x, stream):
    return interop.from_host(np.array([reference.global_scale(_values(x))], np.float32), x.library)


def matmul(a, b, out_dtype, alpha, bias, out, stream):
    one = np.float32(1)
    gs_a = np.float64(_scalar(a.global_scale)) if isinstance(a, QuantizedViews) else 1.0
    left = _dequantize(a, one) if isinstance(a, QuantizedViews) else _values(a)
    right = _dequantize(b, one)
    factor = np.float32(1 / (gs_a * np.float64(_scalar(b.global_scale)))) if alpha is None else _scalar(alpha)
    bits = reference.matmul(left, right, factor, None if bias is None else _values(bias), out_dtype)
    return _result(bits, out_dtype, out, a.data.library if isinstance(a, QuantizedViews) else a.library)


def prepack(b, stream):
    raise NotImplementedError
