"""Python functions to machine code by numba, kept on disk.

A kernel is compiled for one signature when it is first called, or read from the cache folder. The folder's name is a
digest of everything that the kernels are made from: numba's own check sees only the file of the outermost function.
An entry that cannot be read, or whose bytes are not those that were written, is made anew; a folder that cannot be used
costs one warning and a compilation in memory.

Floating point is IEEE 754 to the bit: numba neither contracts a * b + c nor reassociates unless told to (fastmath).
"""

from __future__ import annotations

import hashlib
import threading
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numba.core.caching import IndexDataCacheFile

from fp4rt.cache_folder import CACHE_VARIABLE, cache_folder

__all__ = [
    "BYTES",
    "COUNT",
    "FLAG",
    "FLOAT",
    "FLOATS",
    "OFFSETS",
    "Kernel",
    "const",
    "device_function",
    "element_function",
]

BELOW = ("format.py", "prepacked.py")  # files of the package whose constants become part of the kernels
# Types of kernel arguments.
COUNT = numba.int64
FLAG = numba.boolean
FLOAT = numba.float32
BYTES = numba.uint8[::1]
FLOATS = numba.float32[::1]
OFFSETS = numba.int64[::1]


def const(element: Any) -> Any:
    """The type of a 1-D dense array that is only read; writable arrays may be passed too."""
    return numba.types.Array(element, 1, "C", readonly=True)


# Division by zero gives infinity, as in NumPy, instead of an exception.
OPTIONS = {"error_model": "numpy", "nogil": True}

device_function = numba.njit(**OPTIONS)  # decorates a function that kernels call; it becomes part of them
# The same for one element of a loop: inlined before types are inferred, so that the loop around it vectorizes.
element_function = numba.njit(inline="always", **OPTIONS)

_lock = threading.RLock()
_warned = False  # guarded by _lock


class Kernel:
    """A function of machine code that runs without the interpreter lock.

    Args:
        function: the Python function.
        signatures: argument types by the dtype of the first argument.
    """

    def __init__(self, function: Callable[..., Any], signatures: Mapping[Any, tuple[Any, ...]]) -> None:
        self.function = function
        self.signatures = {np.dtype(dtype): signature for dtype, signature in signatures.items()}
        self._compiled: dict[np.dtype[Any], Callable[..., Any]] = {}

    def __call__(self, first: np.ndarray, *rest: Any) -> Any:
        """Run it; the first call for a dtype compiles."""
        compiled = self._compiled.get(first.dtype)
        if compiled is None:
            with _lock:
                compiled = self._compiled.get(first.dtype) or _compile(self.function, self.signatures[first.dtype])
                self._compiled[first.dtype] = compiled
        return compiled(first, *rest)


class _CheckedFile(IndexDataCacheFile):
    """What numba keeps of a function, each entry with its digest behind it: damaged machine code ends the process."""

    def _dump(self, entry: Any) -> bytes:
        data: bytes = super()._dump(entry)
        return data + hashlib.sha256(data).digest()  # what unpickles it stops ahead of that

    def _load_data(self, name: str) -> Any:
        data = Path(self._data_path(name)).read_bytes()
        size = len(data) - hashlib.sha256().digest_size
        if size < 0 or hashlib.sha256(data[:size]).digest() != data[size:]:
            raise OSError(f"{name} is damaged")  # to numba it is not there
        return super()._load_data(name)


def _kept(function: Callable[..., Any], signature: tuple[Any, ...]) -> Callable[..., Any]:
    """Compiled in numba's cache folder of the moment, or read from it."""
    compiled: Any = numba.njit(**OPTIONS)(function)
    compiled.enable_caching()
    compiled._cache._cache_file.__class__ = _CheckedFile
    compiled.compile(signature)
    compiled.disable_compile()
    kept: Callable[..., Any] = compiled
    return kept


def _compile(function: Callable[..., Any], signature: tuple[Any, ...]) -> Callable[..., Any]:
    folder = cache_folder() / f"cpu-{_digest()}"
    previous = numba.config.CACHE_DIR
    try:
        folder.mkdir(parents=True, exist_ok=True)
        numba.config.CACHE_DIR = str(folder)
        try:
            compiled = _kept(function, signature)
        except Exception:  # whatever a truncated or foreign entry makes numba or pickle raise
            if not _discard(folder, function):
                raise
            compiled = _kept(function, signature)
    except Exception as error:
        _warn_once(folder, error)
        compiled = numba.njit(signature, **OPTIONS)(function)
    finally:
        numba.config.CACHE_DIR = previous
    return compiled


def _discard(folder: Path, function: Callable[..., Any]) -> bool:
    """Remove a function's entries; whether there were any."""
    entries = list(folder.rglob(f"{Path(function.__code__.co_filename).stem}.{function.__qualname__}-*"))
    for entry in entries:
        entry.unlink(missing_ok=True)
    return bool(entries)


def _digest() -> str:
    """Names the sources that the kernels consist of, and the numba that compiles them."""
    digest = hashlib.sha256(numba.__version__.encode())
    for path in (*sorted(Path(__file__).parent.glob("*.py")), *(Path(__file__).parents[2] / name for name in BELOW)):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _warn_once(folder: Path, error: Exception) -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            f"fp4rt cannot keep compiled CPU kernels in {folder} ({type(error).__name__}: {error}); they are compiled "
            f"again in every process. Set {CACHE_VARIABLE} to a writable folder",
            RuntimeWarning,
            stacklevel=4,
        )
