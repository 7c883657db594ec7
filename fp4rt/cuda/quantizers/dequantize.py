"""Launches dequantize.cu."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from fp4rt.cuda.arguments import argument_struct
from fp4rt.cuda.kernel import Kernel
from fp4rt.cuda.kernel_spec import KernelSpec
from fp4rt.cuda.launch import Launch, divider_magic, widest_access
from fp4rt.cuda.results import new_memory, result
from fp4rt.format import BLOCK, CODES_PER_BYTE, INPUT_DTYPES
from fp4rt.interop.dtypes import itemsize
from fp4rt.layout import LAYOUTS, ScaleLayout, block_columns, ceil_div, data_shape, round_up

if TYPE_CHECKING:
    from fp4rt.backend import QuantizedViews
    from fp4rt.interop import ArrayView

__all__ = ["choose_dequantize", "dequantize", "kernel_specs"]

ARGUMENTS = argument_struct("kernels/dequantize_arguments.cuh", "DequantizeArguments")
THREADS, PIECES_PER_THREAD = 128, 2
PIECE_BYTES = 16  # of results
MAX_WHOLE_COLUMNS = 1 << 28  # 32-bit offsets along a row: a column of 16 elements has up to 128 bytes of scales


def _spec(dtype: str) -> KernelSpec:
    defines = (
        ("OUTPUT", INPUT_DTYPES.index(dtype)),
        ("PIECES_PER_THREAD", PIECES_PER_THREAD),
        ("THREADS", THREADS),
    )
    return KernelSpec("kernels/dequantize.cu", "dequantize", defines)


def kernel_specs() -> Iterator[KernelSpec]:
    """Every compilation of dequantize.cu."""
    return map(_spec, INPUT_DTYPES)


def choose_dequantize(
    layout: ScaleLayout, m: int, n: int, padded_n: int, dtype: str, data_misalignment: int, y_misalignment: int
) -> Launch:
    """The launch for m, n >= 1; misalignments = address % 16."""
    elements = PIECE_BYTES // itemsize(dtype)
    pieces = ceil_div(n, elements)
    threads_log2 = min(ceil_div(pieces, PIECES_PER_THREAD) - 1, THREADS - 1).bit_length()  # along a row
    chunks = ceil_div(pieces, PIECES_PER_THREAD << threads_log2)
    rows = round_up(m, layout.tile_rows)  # in the order of their scales, rows beyond m lie between the others
    access = widest_access(y_misalignment, n * itemsize(dtype))
    codes_aligned = data_misalignment % (elements // CODES_PER_BYTE) == 0
    whole_tiles = elements << threads_log2 >= layout.tile_columns * BLOCK and n < MAX_WHOLE_COLUMNS
    whole = access == PIECE_BYTES and n % elements == 0 and codes_aligned and whole_tiles
    constants = (
        *(m, n, data_shape(m, padded_n)[1], ceil_div(block_columns(padded_n), layout.tile_columns)),
        *(divider_magic(chunks), pieces, chunks, threads_log2, layout.index, access, int(whole)),
    )
    blocks = ceil_div(rows, THREADS >> threads_log2) * chunks
    return Launch(_spec(dtype), (blocks, 1, 1), THREADS, constants)


@lru_cache(maxsize=4096)
def _prepared(device: int, layout: str, *problem: Any) -> tuple[Kernel, Launch]:
    launch = choose_dequantize(LAYOUTS[layout], *problem)
    return launch.spec.on(device), launch


def dequantize(q: QuantizedViews, dtype: str, out: ArrayView | None, stream: int) -> Any:
    """See :class:`fp4rt.backend.Backend`."""
    data = q.data
    buffer = new_memory(q.shape, dtype, data.device, stream) if out is None else None
    y = buffer.pointer if buffer is not None else out.pointer  # type: ignore[union-attr]
    if q.shape[0] > 0:
        problem = *q.shape, q.padded_n, dtype, data.pointer % 16, y % 16
        kernel, launch = _prepared(data.device.index, q.layout.name, *problem)
        values = data.pointer, q.scales.pointer, q.global_scale.pointer, y, *launch.constants
        kernel.launch_struct(launch.grid, launch.threads, ARGUMENTS, values, stream)
    return None if buffer is None else result(buffer, q.shape, dtype, data.library)
