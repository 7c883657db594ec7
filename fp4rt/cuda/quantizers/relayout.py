"""Launches relayout.cu."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from fp4rt.cuda.arguments import argument_struct
from fp4rt.cuda.kernel_spec import KernelSpec
from fp4rt.cuda.launch import MAX_GRID, Launch, divider_magic
from fp4rt.cuda.results import copy_bytes, new_memory, result
from fp4rt.format import BLOCK
from fp4rt.layout import ScaleLayout, block_columns, ceil_div
from fp4rt.pool import scale_tag

if TYPE_CHECKING:
    from fp4rt.backend import QuantizedViews

__all__ = ["choose_relayout", "kernel_specs", "relayout"]

ARGUMENTS = argument_struct("kernels/relayout_arguments.cuh", "RelayoutArguments")
THREADS, BYTES_PER_THREAD = 256, 4


def _spec() -> KernelSpec:
    return KernelSpec("kernels/relayout.cu", "relayout", (("THREADS", THREADS),))


def kernel_specs() -> Iterator[KernelSpec]:
    """The one compilation of relayout.cu."""
    yield _spec()


def choose_relayout(
    m: int, n: int, padded_n: int, source: ScaleLayout, target: ScaleLayout, to_misalignment: int
) -> Launch:
    """The launch for m, n >= 1; ``to_misalignment`` = address % 4."""
    columns = block_columns(padded_n)
    across = tuple(ceil_div(columns, layout.tile_columns) for layout in (source, target))
    nbytes = target.nbytes(m, columns)
    constants = (
        *(m, ceil_div(n, BLOCK), *across, divider_magic(across[1]), nbytes),
        *(source.index, target.index, int(to_misalignment == 0)),
    )
    blocks = min(ceil_div(nbytes, THREADS * BYTES_PER_THREAD), MAX_GRID)
    return Launch(_spec(), (blocks, 1, 1), THREADS, constants)


def relayout(q: QuantizedViews, layout: ScaleLayout, out: QuantizedViews | None, stream: int) -> Any:
    """See :class:`fp4rt.backend.Backend`."""
    m, n = q.shape
    device, library = q.data.device, q.data.library
    shape = layout.shape(m, q.columns)
    buffer = None
    if out is None:
        buffer = new_memory(shape, "uint8", device, stream, scale_tag(layout.name, m, n, q.padded_n))
        scales = buffer.pointer
    else:
        scales = out.scales.pointer
        copy_bytes(out.data.pointer, q.data.pointer, q.data.nbytes, device, stream)
        copy_bytes(out.global_scale.pointer, q.global_scale.pointer, q.global_scale.nbytes, device, stream)
    if m > 0:
        launch = choose_relayout(m, n, q.padded_n, q.layout, layout, scales % 4)
        args = ARGUMENTS.pack(q.scales.pointer, scales, *launch.constants)
        kernel = launch.spec.on(device.index)
        kernel.launch(launch.grid, (launch.threads, 1, 1), args, stream)
    if buffer is None:
        return None
    return result(buffer, shape, "uint8", library)
