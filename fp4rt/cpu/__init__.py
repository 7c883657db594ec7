"""The CPU backend: the functions of ``fp4rt.backend.Backend`` over host memory.

Each function finds the flat memory behind its views, takes memory for the result, and runs a kernel over row ranges
on the threads. Streams mean nothing here: a call returns when its work is done.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fp4rt import interop, prepacked
from fp4rt.backend import BackendStatus, PrepackedViews, QuantizedViews
from fp4rt.cpu.decode import Products, decode_rows
from fp4rt.cpu.kernels.amax import amax_rows, encode_scale
from fp4rt.cpu.kernels.quantize import quantize_rows
from fp4rt.cpu.kernels.relayout import relayout_rows
from fp4rt.cpu.memory import Matrix, Target, flat_bytes, matrix, new_array, offsets, scalar
from fp4rt.cpu.product import explain, matmul
from fp4rt.cpu.threads import map_rows, on_thread, thread_count
from fp4rt.errors import counted
from fp4rt.format import BLOCK, CODES_PER_BYTE
from fp4rt.layout import ScaleLayout, block_columns, ceil_div, data_shape
from fp4rt.pool import data_tag, scale_tag
from fp4rt.prepacked import PrepackedWeight
from fp4rt.tensor import QuantizedTensor

if TYPE_CHECKING:
    from fp4rt.interop import ArrayView

__all__ = [
    "dequantize",
    "explain",
    "global_scale",
    "matmul",
    "prepack",
    "prepacked_values",
    "quantize",
    "relayout",
    "status",
    "unpack",
]


def status() -> BackendStatus:
    """The CPU backend runs wherever its dependencies are installed."""
    return BackendStatus("cpu", True, counted(thread_count(), "thread"), ("cpu",))


def quantize(
    x: ArrayView,
    global_scale: ArrayView | float | None,
    layout: ScaleLayout,
    padded_n: int,
    out: QuantizedViews | None,
    stream: int = 0,
) -> QuantizedTensor | None:
    """See :class:`fp4rt.backend.Backend`."""
    m, n = x.shape
    source = matrix(x)
    scale = _automatic_scale(source, m, n) if global_scale is None else scalar(global_scale)
    if out is not None:
        data, scales = flat_bytes(out.data), flat_bytes(out.scales)
        out.global_scale.bits().view(np.float32)[...] = scale
    else:
        data = new_array((m * padded_n // CODES_PER_BYTE,), tag=data_tag(m, n, padded_n))
        scales = new_array((layout.nbytes(m, block_columns(padded_n)),), tag=scale_tag(layout.name, m, n, padded_n))
    physical_rows, _ = layout.shape(m, block_columns(padded_n))

    def run(first: int, end: int) -> None:
        rows, columns = offsets(layout, block_columns(padded_n), first, end)
        quantize_rows(*source, m, n, padded_n, scale, data, scales, rows, columns, first)

    map_rows(run, physical_rows, padded_n)
    if out is not None:
        return None
    return _tensor(data, scales, scale, (m, n), layout, padded_n, x.library)


def global_scale(x: ArrayView, stream: int = 0) -> Any:
    """See :class:`fp4rt.backend.Backend`."""
    return _one_float(_automatic_scale(matrix(x), *x.shape), x.library)


def dequantize(q: QuantizedViews, dtype: str, out: ArrayView | None, stream: int = 0) -> Any:
    """See :class:`fp4rt.backend.Backend`."""
    m, n = q.shape
    target = Target((m, n), dtype, out, q.data.library)
    products = Products(scalar(q.global_scale), dtype)
    map_rows(lambda first, end: decode_rows(q, products, first, end, target.bits[first:end]), m, n)
    return target.finish()


def relayout(q: QuantizedViews, layout: ScaleLayout, out: QuantizedViews | None, stream: int = 0) -> Any:
    """See :class:`fp4rt.backend.Backend`."""
    m, n = q.shape
    if out is None:
        scales = new_array((layout.nbytes(m, q.columns),), tag=scale_tag(layout.name, m, n, q.padded_n))
    else:
        out.data.bits()[...] = q.data.bits()
        out.global_scale.bits()[...] = q.global_scale.bits()
        scales = flat_bytes(out.scales)
    source = flat_bytes(q.scales)

    def run(first: int, end: int) -> None:
        from_rows, from_columns = offsets(q.layout, q.columns, first, min(end, m))
        to_rows, to_columns = offsets(layout, q.columns, first, end)
        relayout_rows(scales, source, from_rows, from_columns, to_rows, to_columns, ceil_div(n, BLOCK))

    physical_rows, physical_columns = layout.shape(m, q.columns)
    map_rows(run, physical_rows, physical_columns)
    if out is not None:
        return None
    return interop.from_host(scales.reshape(physical_rows, physical_columns), q.data.library)


def prepack(b: QuantizedViews, stream: int = 0) -> PrepackedWeight:
    """See :class:`fp4rt.backend.Backend`."""
    n, k = b.shape
    library = b.data.library
    tiles, restored = prepacked.pack(b.data.bits(), b.layout.unpack(b.scales.bits(), n, b.columns), k)
    return PrepackedWeight.trusted(
        interop.from_host(tiles, library),
        interop.from_host(restored, library),
        _one_float(scalar(b.global_scale), library),
        b.shape,
        b.layout.name,
        b.padded_n,
    )


def unpack(weight: PrepackedViews, restored: ArrayView, stream: int = 0) -> QuantizedTensor:
    """See :class:`fp4rt.backend.Backend`."""
    n, k = weight.shape
    data, row_major = prepacked.unpack(weight.data.bits(), restored.bits(), n, k, weight.padded_n)
    scale, layout = weight.global_scale, weight.layout
    return _tensor(data, layout.pack(row_major), scalar(scale), (n, k), layout, weight.padded_n, scale.library)


def prepacked_values(weight: PrepackedViews, restored: ArrayView, out: ArrayView, stream: int = 0) -> None:
    """See :class:`fp4rt.backend.Backend`."""
    dequantize(unpack(weight, restored).views(), out.dtype, out)


def _automatic_scale(source: Matrix, m: int, n: int) -> np.float32:
    """2688 / amax over the finite values (``fp4rt.format``)."""
    largest = map_rows(lambda first, end: int(amax_rows(*source, n, first, end)), m, n)
    amax_bits = np.array([max(largest, default=0)], np.uint32)
    return np.float32(on_thread(lambda: encode_scale(amax_bits)))


def _one_float(value: np.float32, library: str) -> Any:
    array = new_array((1,), np.float32)
    array[0] = value
    return interop.from_host(array, library)


def _tensor(
    data: np.ndarray,
    scales: np.ndarray,
    scale: np.float32,
    shape: tuple[int, int],
    layout: ScaleLayout,
    padded_n: int,
    library: str,
) -> QuantizedTensor:
    m = shape[0]
    return QuantizedTensor.trusted(
        interop.from_host(data.reshape(data_shape(m, padded_n)), library),
        interop.from_host(scales.reshape(layout.shape(m, block_columns(padded_n))), library),
        _one_float(scale, library),
        shape,
        layout.name,
        padded_n,
    )
