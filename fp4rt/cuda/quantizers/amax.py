"""Launches amax.cu: the global scale of a matrix, on the device."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from fp4rt.cuda.arguments import argument_struct
from fp4rt.cuda.kernel import Kernel, device_attribute
from fp4rt.cuda.kernel_spec import KernelSpec
from fp4rt.cuda.launch import Launch, divider_magic
from fp4rt.cuda.results import fill_float, new_memory, result
from fp4rt.cuda.slots import Slot, SlotTable, slots_of, waits_for
from fp4rt.cuda.strides import check_address, distances
from fp4rt.errors import BackendUnavailable
from fp4rt.format import INPUT_DTYPES
from fp4rt.interop.dtypes import itemsize
from fp4rt.layout import ceil_div

if TYPE_CHECKING:
    from fp4rt.interop import ArrayView

__all__ = ["choose_amax", "global_scale", "kernel_specs", "write_global_scale"]

ARGUMENTS = argument_struct("kernels/amax_arguments.cuh", "AmaxArguments")
THREADS, PIECES_PER_THREAD = 512, 4
CTAS_PER_SM = 16  # four waves: the later ones fill the gaps of the first
PIECE_BYTES = 16
SLOTS = 16384
_MULTIPROCESSORS = 16  # cudaDevAttrMultiProcessorCount


def _spec(dtype: str) -> KernelSpec:
    defines = (
        ("INPUT", INPUT_DTYPES.index(dtype)),
        ("PIECES_PER_THREAD", PIECES_PER_THREAD),
        ("SLOTS", SLOTS),
        ("THREADS", THREADS),
    )
    return KernelSpec("kernels/amax.cu", "amax", defines)


def kernel_specs() -> Iterator[KernelSpec]:
    """Every compilation of amax.cu."""
    return map(_spec, INPUT_DTYPES)


def choose_amax(
    multiprocessors: int, m: int, n: int, row_stride: int, column_stride: int, misalignment: int, dtype: str
) -> Launch:
    """The launch for a matrix of m, n >= 1; strides in elements, ``misalignment`` = address % 16."""
    size = itemsize(dtype)
    check_address(misalignment, dtype)
    row_stride, column_stride = distances(m, n, row_stride, column_stride, dtype)
    neighbours = column_stride == size
    rows = m
    if neighbours and (m == 1 or row_stride == n * size):  # dense: one long row
        rows, n, row_stride = 1, m * n, 0
    head = pieces = 0
    if neighbours and row_stride % PIECE_BYTES == 0:
        head = min(n, -misalignment % PIECE_BYTES // size)
        pieces = (n - head) * size // PIECE_BYTES
    rest = n - pieces * PIECE_BYTES // size
    work = max(ceil_div(rows * pieces, PIECES_PER_THREAD), rows * rest)
    blocks = min(ceil_div(work, THREADS), multiprocessors * CTAS_PER_SM)
    magics = divider_magic(max(pieces, 1)), divider_magic(max(rest, 1))
    constants = (row_stride, column_stride, rows, n, head, pieces, magics[0], rest, magics[1])
    return Launch(_spec(dtype), (blocks, 1, 1), THREADS, constants)


@lru_cache(maxsize=4096)
def _prepared(device: int, *problem: Any) -> tuple[Kernel, Launch]:
    launch = choose_amax(device_attribute(_MULTIPROCESSORS, device), *problem)
    return launch.spec.on(device), launch


_tables: dict[int, SlotTable] = {}  # device -> its slots


def _slot(device: int, stream: int) -> Slot:
    table = slots_of(_tables, device, lambda: SlotTable(SLOTS, waits_for(device)))
    slot = table.for_launch(stream)
    if slot is None:
        raise BackendUnavailable(
            f"{SLOTS // 2} automatic global scales have been captured into graphs, and there is no room for more; "
            "compute the scale once with fp4rt.global_scale and pass it as global_scale="
        )
    return slot


def write_global_scale(x: ArrayView, to: int, stream: int) -> None:
    """Queue 2688 / amax of ``x`` to the address ``to``; 1.0 for a matrix without rows."""
    m, n = x.shape
    if m == 0:
        fill_float(to, 1.0, x.device, stream)
        return
    device = x.device.index
    kernel, launch = _prepared(device, m, n, *x.strides, x.pointer % PIECE_BYTES, x.dtype)
    slot = _slot(device, stream)  # held until the launch is queued
    values = (x.pointer, to, *launch.constants, slot.number)
    kernel.launch_struct(launch.grid, launch.threads, ARGUMENTS, values, stream)


def global_scale(x: ArrayView, stream: int) -> Any:
    """See :class:`fp4rt.backend.Backend`."""
    buffer = new_memory((1,), "float32", x.device, stream)
    write_global_scale(x, buffer.pointer, stream)
    return result(buffer, (1,), "float32", x.library)
