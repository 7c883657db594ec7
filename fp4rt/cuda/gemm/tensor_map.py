"""Tensor maps: how the copy engine finds tiles of a matrix in global memory (``cuTensorMapEncodeTiled``, sm_90)."""

from __future__ import annotations

import ctypes
from functools import cache, lru_cache
from typing import Any

from fp4rt.errors import BackendUnavailable

__all__ = ["NO_TENSOR_MAP", "TENSOR_MAP_ALIGNMENT", "encode_activations"]

TENSOR_MAP_BYTES = 128
TENSOR_MAP_ALIGNMENT = 64
NO_TENSOR_MAP = bytes(TENSOR_MAP_BYTES)  # in the arguments of a kernel that fetches activations itself
POINTER_ALIGNMENT = 16  # of the matrix and of its row pitch

# Values of the driver API's enumerations
_DATA_TYPES = {"float16": 6, "bfloat16": 9}
_INTERLEAVE_NONE, _SWIZZLE_128_BYTES, _L2_PROMOTION_128_BYTES, _FILL_ZEROS = 0, 3, 2, 0
_RANK = 2


@cache
def _encode() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled
    except (OSError, AttributeError) as error:
        raise BackendUnavailable(
            f"the Hopper kernels need cuTensorMapEncodeTiled of the CUDA driver: {error}; update to driver 525 or newer"
        ) from error


@lru_cache(maxsize=4096)
def encode_activations(pointer: int, dtype: str, m: int, k: int, pitch_bytes: int, box: tuple[int, int]) -> bytes:
    """The map of a row-major matrix (m, k) of two-byte elements, in boxes of (rows, columns) swizzled by 128 bytes.

    Args:
        pointer: device address, a multiple of 16.
        dtype: "float16" or "bfloat16".
        m: rows.
        k: columns; what a box holds beyond the edges is filled with zeros.
        pitch_bytes: from one row to the next, a multiple of 16.
        box: rows (at most 256) and columns (64) of a tile.

    Raises:
        BackendUnavailable: the driver refuses.
    """
    buffer = (ctypes.c_uint8 * (TENSOR_MAP_BYTES + TENSOR_MAP_ALIGNMENT))()
    address = ctypes.addressof(buffer) + -ctypes.addressof(buffer) % TENSOR_MAP_ALIGNMENT
    extents = (ctypes.c_uint64 * _RANK)(k, m)
    pitches = (ctypes.c_uint64 * (_RANK - 1))(pitch_bytes)
    box_extents = (ctypes.c_uint32 * _RANK)(box[1], box[0])
    steps = (ctypes.c_uint32 * _RANK)(1, 1)
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
            f"bytes, box {box}; the address and the pitch must be multiples of {POINTER_ALIGNMENT} bytes"
        )
    return ctypes.string_at(address, TENSOR_MAP_BYTES)
