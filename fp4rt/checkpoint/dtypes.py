"""The dtypes of safetensors files: their tags, sizes and NumPy counterparts. Nothing here converts a value.

A tag that NumPy has no dtype for (F8_E4M3, BF16, ...) is read as the ml_dtypes dtype of the same bits.

Source: safetensors README and ``Dtype`` of its Rust crate (v0.7).
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from fp4rt.errors import DtypeError

__all__ = ["BITS", "FLOAT_TAGS", "MAX_DIMENSIONS", "numpy_dtype", "tag_of"]

# Bits of one element. F4 is packed two elements a byte, F6 four elements in three bytes.
BITS = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}
# The floats that fp4rt quantizes, and dequantizes to.
FLOAT_TAGS = {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}

MAX_DIMENSIONS: int = getattr(np, "MAXDIMS", 64)  # of a NumPy array; NumPy 1 names its own, 32

_NUMPY = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "F8_E4M3FNUZ": np.dtype(ml_dtypes.float8_e4m3fnuz),
    "F8_E5M2FNUZ": np.dtype(ml_dtypes.float8_e5m2fnuz),
    "I16": np.dtype("<i2"),
    "U16": np.dtype("<u2"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I32": np.dtype("<i4"),
    "U32": np.dtype("<u4"),
    "F32": np.dtype("<f4"),
    "C64": np.dtype("<c8"),
    "F64": np.dtype("<f8"),
    "I64": np.dtype("<i8"),
    "U64": np.dtype("<u8"),
}
_TAGS = {dtype.name: tag for tag, dtype in _NUMPY.items()}


def numpy_dtype(tag: str) -> np.dtype | None:
    """NumPy dtype with the bits of ``tag``; None for the packed sub-byte tags, which are read as bytes."""
    return _NUMPY.get(tag)


def tag_of(dtype: str) -> str:
    """The safetensors tag of a dtype by its NumPy or ml_dtypes name.

    Raises:
        DtypeError: safetensors has no such dtype.
    """
    tag = _TAGS.get(dtype)
    if tag is None:
        raise DtypeError(f"safetensors has no dtype for {dtype}; it has {', '.join(sorted(_TAGS.values()))}")
    return tag
