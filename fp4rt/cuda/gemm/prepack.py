"""Packing a weight into the prepacked layout on the device, and out of it: gemm_prepack.cu, prepacked_values.cu.

The tiles are those of ``fp4rt.prepacked.pack``, byte for byte, and so are the records of blocks that a tile cannot give
back exactly. How many there are is known only after packing, so :func:`prepack` waits for the device once; a weight
that this library quantized has none.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from fp4rt.cuda.arguments import argument_struct
from fp4rt.cuda.kernel_spec import KernelSpec
from fp4rt.cuda.launch import Launch, widest_access
from fp4rt.cuda.results import clear_bytes, copy_bytes, new_memory, read_bytes, result, write_bytes
from fp4rt.format import BLOCK, CODES_PER_BYTE, INPUT_DTYPES
from fp4rt.interop.dtypes import itemsize
from fp4rt.layout import ceil_div, data_shape
from fp4rt.pool import data_tag, scale_tag
from fp4rt.prepacked import RECORD_BYTES, TILE_COLUMNS, TILE_ROWS, PrepackedWeight, tiles_shape
from fp4rt.tensor import QuantizedTensor

if TYPE_CHECKING:
    from fp4rt.backend import PrepackedViews, QuantizedViews
    from fp4rt.cuda.kernel import Kernel
    from fp4rt.interop import ArrayView
    from fp4rt.layout import ScaleLayout

__all__ = ["choose_values", "kernel_specs", "pack_tiles", "prepack", "prepacked_values", "unpack"]

ARGUMENTS = argument_struct("kernels/gemm_prepack.cuh", "PrepackArguments")
SOURCE = "kernels/gemm_prepack.cu"
PACK, UNPACK, WRITE_RECORDS, RESTORE_RECORDS = (
    KernelSpec(SOURCE, entry) for entry in ("gemm_pack", "gemm_unpack", "gemm_write_records", "gemm_restore_records")
)
THREADS = 128
ROWS_A_BLOCK = THREADS // 32  # of gemm_write_records: one warp a row

VALUES_ARGUMENTS = argument_struct("kernels/prepacked_values_arguments.cuh", "PrepackedValuesArguments")
VALUES_SOURCE = "kernels/prepacked_values.cu"
RECORD_THREADS = 128  # of restored_values; prepacked_values has two pieces of 16 bytes a thread


def kernel_specs() -> Iterator[KernelSpec]:
    """One compilation a source and dtype: the entries share it."""
    yield PACK
    for dtype in INPUT_DTYPES:
        yield _values_spec("prepacked_values", dtype)


def _values_spec(entry: str, dtype: str) -> KernelSpec:
    return KernelSpec(VALUES_SOURCE, entry, (("OUTPUT", INPUT_DTYPES.index(dtype)),))


def prepack(b: QuantizedViews, stream: int) -> PrepackedWeight:
    """See :class:`fp4rt.backend.Backend`. Waits for the device."""
    n, k = b.shape
    device, library = b.data.device, b.data.library
    tiles = new_memory(tiles_shape(n, k), "uint8", device, stream)
    counts = new_memory((n,), "float32", device, stream)  # u32, of the same size
    clear_bytes(counts.pointer, counts.nbytes, device, stream)
    pack_tiles(b, tiles.pointer, stream, counts.pointer)
    changed = np.empty(n, np.uint32)
    read_bytes(changed, counts.pointer, device, stream)
    count = int(changed.sum(dtype=np.int64))
    records = new_memory((count, RECORD_BYTES), "uint8", device, stream)
    if count:
        begins = np.concatenate([[0], np.cumsum(changed[:-1])]).astype(np.uint32)
        write_bytes(counts.pointer, begins, device, stream)
        args = _arguments(b, 0, counts.pointer, records.pointer, count)
        WRITE_RECORDS.on(device.index).launch((ceil_div(n, ROWS_A_BLOCK), 1, 1), (THREADS, 1, 1), args, stream)
        read_bytes(changed, counts.pointer, device, stream)  # waits: the caller may let go of b
    scale = new_memory((1,), "float32", device, stream)
    copy_bytes(scale.pointer, b.global_scale.pointer, 4, device, stream)
    return PrepackedWeight.trusted(
        result(tiles, tiles_shape(n, k), "uint8", library),
        result(records, (count, RECORD_BYTES), "uint8", library),
        result(scale, (1,), "float32", library),
        b.shape,
        b.layout.name,
        b.padded_n,
    )


def pack_tiles(b: QuantizedViews, to: int, stream: int, counts: int = 0) -> None:
    """The tiles of ``b`` at address ``to``, and at ``counts``, where given, how many records each row needs."""
    groups, row_tiles, _ = tiles_shape(*b.shape)
    if row_tiles == 0:
        return
    args = _arguments(b, to, counts, 0, 0)
    PACK.on(b.data.device.index).launch((groups * row_tiles, 1, 1), (THREADS, 1, 1), args, stream)


def unpack(weight: PrepackedViews, restored: ArrayView, stream: int) -> QuantizedTensor:
    """See :class:`fp4rt.backend.Backend`."""
    (n, k), layout, padded_n = weight.shape, weight.layout, weight.padded_n
    device, library = weight.data.device, weight.data.library
    data = new_memory(data_shape(n, padded_n), "uint8", device, stream, data_tag(n, k, padded_n))
    scale_shape = layout.shape(n, weight.columns)
    scales = new_memory(scale_shape, "uint8", device, stream, scale_tag(layout.name, n, k, padded_n))
    for buffer in (data, scales):
        clear_bytes(buffer.pointer, buffer.nbytes, device, stream)
    count, groups, row_tiles = int(restored.shape[0]), *tiles_shape(n, k)[:2]
    pointers = data.pointer, scales.pointer, weight.data.pointer, 0, restored.pointer
    args = _pack(pointers, weight.shape, weight.columns, layout, count)
    if row_tiles:
        UNPACK.on(device.index).launch((groups * row_tiles, 1, 1), (THREADS, 1, 1), args, stream)
    if count:
        RESTORE_RECORDS.on(device.index).launch((ceil_div(count, THREADS), 1, 1), (THREADS, 1, 1), args, stream)
    scale = new_memory((1,), "float32", device, stream)
    copy_bytes(scale.pointer, weight.global_scale.pointer, 4, device, stream)
    return QuantizedTensor.trusted(
        result(data, data_shape(n, padded_n), "uint8", library),
        result(scales, scale_shape, "uint8", library),
        result(scale, (1,), "float32", library),
        weight.shape,
        layout.name,
        padded_n,
    )


def prepacked_values(weight: PrepackedViews, restored: ArrayView, out: ArrayView, stream: int) -> None:
    """See :class:`fp4rt.backend.Backend`."""
    pointers = weight.data.pointer, restored.pointer, weight.global_scale.pointer, out.pointer
    problem = *weight.shape, int(restored.shape[0]), out.dtype, out.pointer % 16
    for kernel, launch in _prepared(weight.data.device.index, *problem):
        values = *pointers, *launch.constants
        kernel.launch_struct(launch.grid, launch.threads, VALUES_ARGUMENTS, values, stream)


@lru_cache(maxsize=4096)
def _prepared(device: int, *problem: Any) -> list[tuple[Kernel, Launch]]:
    return [(launch.spec.on(device), launch) for launch in choose_values(*problem)]


def choose_values(n: int, k: int, count: int, dtype: str, misalignment: int) -> Iterator[Launch]:
    """The launches for a weight (n, k) with ``count`` records; misalignment = address of the values % 16."""
    groups, row_tiles, _ = tiles_shape(n, k)
    constants = n, k, count, widest_access(misalignment, k * itemsize(dtype))
    if row_tiles:
        threads = TILE_ROWS * TILE_COLUMNS * itemsize(dtype) // 32
        yield Launch(_values_spec("prepacked_values", dtype), (groups * row_tiles, 1, 1), threads, constants)
        blocks = ceil_div(count, RECORD_THREADS)
        if blocks:
            yield Launch(_values_spec("restored_values", dtype), (blocks, 1, 1), RECORD_THREADS, constants)


def _arguments(b: QuantizedViews, tiles: int, counts: int, records: int, count: int) -> bytes:
    return _pack((b.data.pointer, b.scales.pointer, tiles, counts, records), b.shape, b.columns, b.layout, count)


def _pack(pointers: tuple[int, ...], shape: tuple[int, int], columns: int, layout: ScaleLayout, count: int) -> bytes:
    row_bytes = columns * BLOCK // CODES_PER_BYTE
    return ARGUMENTS.pack(*pointers, row_bytes, *shape, columns, layout.index, count)
