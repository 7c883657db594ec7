"""Tensor maps: how the copy engine finds tiles of a matrix in global memory (``cuTensorMapEncodeTiled``, sm_90)."""

from __future__ import annotations

import ctypes
from functools import cache, lru_cache
from typing import Any

from fp4rt.errors import BackendUnavailable
from fp4rt.prepacked import CHUNK_COLUMNS

__all__ = ["NO_TENSOR_MAP", "POINTER_ALIGNMENT", "TENSOR_MAP_ALIGNMENT", "encode_matrix"]

TENSOR_MAP_BYTES = 128
TENSOR_MAP_ALIGNMENT = 64
NO_TENSOR_MAP = bytes(TENSOR_MAP_BYTES)  # in the arguments of a kernel that does without one
POINTER_ALIGNMENT = 16  # of the matrix and of its row pitch

# Values of the driver API's enumerations
_DATA_TYPES = {"float16": 6, "bfloat16": 9}
_INTERLEAVE_NONE, _SWIZZLE_128_BYTES, _L2_PROMOTION_128_BYTES, _FILL_ZEROS = 0, 3, 2, 0
_RANK = 3
_CHUNK_BYTES = 2 * CHUNK_COLUMNS


@cache
def _encode() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled
    except (OSError, AttributeError) as error:
        raise BackendUnavailable(
            f"the Hopper kernels need cuTensorMapEncodeTiled of the CUDA driver: {error}; update to driver 525 or newer"
        ) from error


@lru_cache(maxsize=4096)
def encode_matrix(pointer: int, dtype: str, m: int, k: int, pitch_bytes: int, rows: int, chunks: int) -> bytes:
    """A map of a row-major matrix (m, k) of two-byte elements, its boxes swizzled by 128 bytes.

    Args:
        pointer: device address, a multiple of 16.
        dtype: "float16" or "bfloat16".
        m: rows.
        k: columns; what a box holds beyond the edges is read as zeros, and not written.
        pitch_bytes: from one row to the next, a multiple of 16.
        rows: of a box, at most 256.
        chunks: of 64 columns in a box, where the map is that of whole chunks and k a multiple of 64; 0 for boxes of one
            at any column. ``kernels_src/block/prepacked_arguments.cuh`` says what the two maps are.

    Raises:
        BackendUnavailable: the driver refuses.
    """
    buffer = (ctypes.c_uint8 * (TENSOR_MAP_BYTES + TENSOR_MAP_ALIGNMENT))()
    address = ctypes.addressof(buffer) + -ctypes.addressof(buffer) % TENSOR_MAP_ALIGNMENT
    columns, depth = (CHUNK_COLUMNS, k // CHUNK_COLUMNS) if chunks else (k, 1)
    extents = (ctypes.c_uint64 * _RANK)(columns, m, depth)
    pitches = (ctypes.c_uint64 * (_RANK - 1))(pitch_bytes, _CHUNK_BYTES)
    box_extents = (ctypes.c_uint32 * _RANK)(CHUNK_COLUMNS, rows, max(chunks, 1))
    steps = (ctypes.c_uint32 * _RANK)(1, 1, 1)
    status = _encode()(
        ctypes.c_void_p(address),
        _DATA_TYPES[dtype],
        _RANK,
        ctypes.c_void_p(pointer),
        extents,
        pitches,
        box_extents,
        steps,
        _INTERLEAVE_NONE,
        _SWIZZLE_128_BYTES,
        _L2_PROMOTION_128_BYTES,
        _FILL_ZEROS,
    )
    if status:
        raise BackendUnavailable(
            f"cuTensorMapEncodeTiled returned {status} for {dtype} ({m}, {k}) at {pointer:#x}, pitch {pitch_bytes} "
            f"bytes, {rows} rows and {chunks} chunks a box; the address and the pitch must be multiples of "
            f"{POINTER_ALIGNMENT} bytes"
        )
    return ctypes.string_at(address, TENSOR_MAP_BYTES)
