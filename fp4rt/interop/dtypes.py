"""Names of element types, and how NumPy, PyTorch and DLPack spell them. No library is imported for it."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from fp4rt.errors import DtypeError

__all__ = ["DLPACK_CODES", "dlpack_type", "dtype_name", "itemsize", "numpy_dtype", "unsigned"]

# DLDataTypeCode of dlpack.h (v1.1), by the number there: (code, bits, lanes) of every name that can be met.
DLPACK_CODES: dict[str, tuple[int, int, int]] = {
    "bool": (6, 8, 1),
    "int8": (0, 8, 1),
    "int16": (0, 16, 1),
    "int32": (0, 32, 1),
    "int64": (0, 64, 1),
    "uint8": (1, 8, 1),
    "uint16": (1, 16, 1),
    "uint32": (1, 32, 1),
    "uint64": (1, 64, 1),
    "float16": (2, 16, 1),
    "float32": (2, 32, 1),
    "float64": (2, 64, 1),
    "bfloat16": (4, 16, 1),
    "complex64": (5, 64, 1),
    "complex128": (5, 128, 1),
    "float8_e3m4": (7, 8, 1),
    "float8_e4m3": (8, 8, 1),
    "float8_e4m3b11fnuz": (9, 8, 1),
    "float8_e4m3fn": (10, 8, 1),
    "float8_e4m3fnuz": (11, 8, 1),
    "float8_e5m2": (12, 8, 1),
    "float8_e5m2fnuz": (13, 8, 1),
    "float8_e8m0fnu": (14, 8, 1),
    "float4_e2m1fn_x2": (17, 4, 2),
}
_NAMES = {code: name for name, code in DLPACK_CODES.items()}
_UNSIGNED: dict[int, np.dtype[Any]] = {
    1: np.dtype(np.uint8),
    2: np.dtype(np.uint16),
    4: np.dtype(np.uint32),
    8: np.dtype(np.uint64),
}


def dtype_name(code: int, bits: int, lanes: int) -> str:
    """Name of a DLPack type; a type outside the table is spelt by its numbers, for the error that follows."""
    return _NAMES.get((code, bits, lanes)) or f"dlpack(code={code}, bits={bits}, lanes={lanes})"


def dlpack_type(dtype: str) -> tuple[int, int, int]:
    """(code, bits, lanes) of a name.

    Raises:
        DtypeError: DLPack has no such type.
    """
    found = DLPACK_CODES.get(dtype)
    if found is None:
        raise DtypeError(f"dtype {dtype!r} cannot travel through DLPack; it knows {', '.join(DLPACK_CODES)}")
    return found


@cache
def itemsize(dtype: str) -> int:
    """Bytes of one element; ``float4_e2m1fn_x2`` is one byte of two codes."""
    if dtype in DLPACK_CODES:
        _, bits, lanes = DLPACK_CODES[dtype]
        return bits * lanes // 8
    return int(np.dtype(numpy_dtype(dtype)).itemsize)


@cache
def numpy_dtype(dtype: str) -> np.dtype[Any]:
    """NumPy dtype of a name; bfloat16 and the float8 types come from ml_dtypes, packed float4 is its bytes.

    Raises:
        ImportError: the name needs ml_dtypes, which is not installed.
        DtypeError: NumPy has no such dtype.
    """
    if dtype == "float4_e2m1fn_x2":
        return np.dtype(np.uint8)
    try:
        if dtype == "bfloat16" or dtype.startswith(("float8_", "float4_", "float6_", "int4", "uint4")):
            import ml_dtypes

            return np.dtype(getattr(ml_dtypes, dtype))
        return np.dtype(dtype)
    except (AttributeError, TypeError):
        raise DtypeError(f"NumPy has no dtype {dtype!r}") from None


def unsigned(size: int) -> np.dtype[Any]:
    """The unsigned integer dtype of ``size`` bytes."""
    found = _UNSIGNED.get(size)
    if found is None:
        raise DtypeError(f"no unsigned integer of {size} bytes to view the elements as")
    return found
