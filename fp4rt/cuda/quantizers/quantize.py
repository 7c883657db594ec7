"""Launches quantize.cu and quantize_any.cu."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Union

from fp4rt.backend import QuantizedViews
from fp4rt.cuda.arguments import ArgumentStruct, argument_struct
from fp4rt.cuda.kernel import Kernel
from fp4rt.cuda.kernel_spec import KernelSpec
from fp4rt.cuda.launch import MAX_GRID, MAX_GRID_Y, Launch, divider_magic, widest_access
from fp4rt.cuda.quantizers.amax import write_global_scale
from fp4rt.cuda.results import copy_bytes, fill_float, memory_view, new_memory
from fp4rt.cuda.strides import check_address, distances
from fp4rt.format import BLOCK, INPUT_DTYPES
from fp4rt.interop.dtypes import itemsize
from fp4rt.layout import LAYOUTS, ScaleLayout, block_columns, ceil_div, round_up
from fp4rt.pool import PaddingTag, data_tag, scale_tag
from fp4rt.tensor import QuantizedTensor

if TYPE_CHECKING:
    from fp4rt.device import Device
    from fp4rt.interop import ArrayView

__all__ = ["choose_quantize", "kernel_specs", "quantize"]

Scale = Union["ArrayView", float, None]  # given on the device, given as a number, or to be computed

WARP = 32
# quantize.cu. Two blocks a lane and six CTAs on a multiprocessor keep enough loads on their way, in 40 registers; where
# there are too few CTAs to go round, one block a lane makes more of them. An fp32 block is as large as two others.
ALIGNED_ROWS = 8
ALIGNED_THREADS = ALIGNED_ROWS * WARP
CTAS_PER_SM = {1: 8, 2: 6}  # by blocks per lane; fp32 takes 6 either way
FEW_CTAS = 1024
# Elements of x from where on L2 cannot hold it, so that it may as well evict itself and not what was written before: 2
# to 6 % faster. Beyond the end memory alone decides, and reads so marked are 1 to 4 % slower.
READ_ONCE = range(1 << 25, 3 << 25)
MAX_ROWS = 1 << 31  # 32-bit indices of quantize.cu

ANY_THREADS = 128

ALIGNED_ARGUMENTS = argument_struct("kernels/quantize_arguments.cuh", "QuantizeArguments")
ANY_ARGUMENTS = argument_struct("kernels/quantize_any_arguments.cuh", "QuantizeAnyArguments")


def _aligned_spec(dtype: str, layout: ScaleLayout, blocks_per_lane: int) -> KernelSpec:
    defines = (
        ("BLOCKS_PER_LANE", blocks_per_lane),
        ("CTAS_PER_SM", 6 if dtype == "float32" else CTAS_PER_SM[blocks_per_lane]),
        ("INPUT", INPUT_DTYPES.index(dtype)),
        ("LAYOUT", layout.index),
    )
    return KernelSpec("kernels/quantize.cu", "quantize", defines)


def _any_spec(dtype: str) -> KernelSpec:
    defines = (("INPUT", INPUT_DTYPES.index(dtype)), ("THREADS", ANY_THREADS))
    return KernelSpec("kernels/quantize_any.cu", "quantize_any", defines)


def kernel_specs() -> Iterator[KernelSpec]:
    """Every compilation of the two."""
    for dtype in INPUT_DTYPES:
        yield _any_spec(dtype)
        for layout in LAYOUTS.values():
            yield _aligned_spec(dtype, layout, 1)
            if dtype != "float32":
                yield _aligned_spec(dtype, layout, 2)


def choose_quantize(
    layout: ScaleLayout,
    padded_n: int,
    m: int,
    n: int,
    row_stride: int,
    column_stride: int,
    x_misalignment: int,
    data_misalignment: int,
    scale_misalignment: int,
    dtype: str,
    backwards: bool,
) -> Launch:
    """The launch for a matrix of m, n >= 1; strides in elements, misalignments = address % 16."""
    check_address(x_misalignment, dtype)
    row_stride, column_stride = distances(m, n, row_stride, column_stride, dtype)
    columns = block_columns(padded_n)
    across = ceil_div(columns, layout.tile_columns)
    access = widest_access(x_misalignment, row_stride) if column_stride == itemsize(dtype) else 0
    data_aligned = data_misalignment % 8 == 0
    aligned = access == 16 and n % BLOCK == 0 and data_aligned and not (layout.tiled and scale_misalignment)
    if aligned and m < MAX_ROWS and columns < MAX_ROWS:
        return _choose_aligned(m, n, row_stride, dtype, layout, columns, across, backwards)
    count = layout.nbytes(m, columns)
    constants = (
        *(row_stride, column_stride, m, n, columns, across, divider_magic(across), count),
        *(layout.index, access, int(data_aligned), int(backwards)),
    )
    blocks = min(ceil_div(count, ANY_THREADS), MAX_GRID)
    return Launch(_any_spec(dtype), (blocks, 1, 1), ANY_THREADS, constants)


def _choose_aligned(
    m: int, n: int, row_stride: int, dtype: str, layout: ScaleLayout, columns: int, across: int, backwards: bool
) -> Launch:
    strips = ceil_div(round_up(m, layout.tile_rows), ALIGNED_ROWS)
    covered = across * layout.tile_columns if layout.tiled else columns
    per_lane = 1
    if dtype != "float32" and ceil_div(covered, 2 * WARP) * strips >= FEW_CTAS:
        per_lane = 2
    grid = ceil_div(covered, per_lane * WARP), min(strips, MAX_GRID_Y), ceil_div(strips, MAX_GRID_Y)
    once = m * n in READ_ONCE
    constants = (row_stride, m, n // BLOCK, columns, across, strips, int(backwards), int(once))
    return Launch(_aligned_spec(dtype, layout, per_lane), grid, ALIGNED_THREADS, constants)


@lru_cache(maxsize=4096)
def _prepared(
    device: int, layout: str, padded_n: int, shape: tuple[int, int], strides: tuple[int, int], *problem: Any
) -> tuple[Kernel, Launch, ArgumentStruct]:
    launch = choose_quantize(LAYOUTS[layout], padded_n, *shape, *strides, *problem)
    arguments = ALIGNED_ARGUMENTS if launch.spec.entry == "quantize" else ANY_ARGUMENTS
    return launch.spec.on(device), launch, arguments


def _write(x: ArrayView, layout: ScaleLayout, padded_n: int, to: QuantizedViews, scale: Scale, stream: int) -> None:
    """Queue everything."""
    data, scales, kept = to.data.pointer, to.scales.pointer, to.global_scale.pointer
    if x.shape[0] == 0:
        _without_rows(scale, kept, x, stream)
        return
    address, value = 0, 0.0
    if scale is None:
        write_global_scale(x, kept, stream)
        address, kept = kept, 0
    elif isinstance(scale, float):
        value = scale
    else:
        address = scale.pointer
    backwards = scale is None  # amax has just read x from its start to its end
    pointer = x.pointer
    misaligned = pointer % 16, data % 16, scales % 16
    kernel, launch, arguments = _prepared(
        x.device.index, layout.name, padded_n, x.shape, x.strides, *misaligned, x.dtype, backwards
    )
    values = (pointer, data, scales, address, kept, *launch.constants, value)
    kernel.launch_struct(launch.grid, launch.threads, arguments, values, stream)


def _without_rows(scale: Scale, kept: int, x: ArrayView, stream: int) -> None:
    """No kernel: only the result's global scale is written."""
    if scale is None or isinstance(scale, float):
        fill_float(kept, 1.0 if scale is None else scale, x.device, stream)
    else:
        copy_bytes(kept, scale.pointer, 4, x.device, stream)


def quantize(
    x: ArrayView,
    global_scale: Scale,
    layout: ScaleLayout,
    padded_n: int,
    out: QuantizedViews | None,
    stream: int,
) -> QuantizedTensor | None:
    """See :class:`fp4rt.backend.Backend`."""
    if out is not None:
        _write(x, layout, padded_n, out, global_scale, stream)
        return None
    (m, n), library = x.shape, "cupy" if x.library == "dlpack" else x.library
    views = QuantizedViews(
        _fresh(data_tag(m, n, padded_n), x.device, library, stream, "data"),
        _fresh(scale_tag(layout.name, m, n, padded_n), x.device, library, stream, "scales"),
        memory_view(new_memory((1,), "float32", x.device, stream), (1,), "float32", library, "global_scale"),
        (m, n),
        layout,
        padded_n,
    )
    _write(x, layout, padded_n, views, global_scale, stream)
    q = QuantizedTensor.in_memory(views)
    if library == "jax":
        q.data  # noqa: B018  JAX's streams are made to wait for what is queued now
    return q


def _fresh(tag: PaddingTag, device: Device, library: str, stream: int, name: str) -> ArrayView:
    buffer = new_memory(tag.physical, "uint8", device, stream, tag)
    return memory_view(buffer, tag.physical, "uint8", library, name)
