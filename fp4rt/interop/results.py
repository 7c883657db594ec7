"""Handing results back in the caller's library, without a copy."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import numpy as np

from fp4rt.device import CPU, Device
from fp4rt.errors import DtypeError
from fp4rt.interop import dtypes, streams
from fp4rt.interop.export import Export, make_capsule
from fp4rt.interop.readers import view

__all__ = ["as_uint8", "from_device", "from_host"]


def from_host(array: np.ndarray, library: str, dtype: str | None = None) -> Any:
    """A dense host ndarray as an array of ``library``, on the same memory.

    Args:
        array: C-contiguous; nobody else writes it afterwards.
        library: "numpy", "torch", "jax"; "dlpack" gets NumPy, as does "cupy", which has no host arrays.
        dtype: name to reinterpret the elements as (same size), e.g. "bfloat16" over uint16; None: as they are.

    Returns:
        numpy.ndarray, torch.Tensor or jax.Array. JAX copies what is not aligned to 64 bytes: it cannot do otherwise.
    """
    name = dtype or array.dtype.name
    if library == "torch":
        return _torch_from_host(array, name)
    if library == "jax":
        jax = sys.modules["jax"]
        if array.size == 0:
            host = jax.local_devices(backend="cpu")[0]
            with jax.ensure_compile_time_eval(), jax.default_device(host):  # also while a function is traced
                return jax.numpy.zeros(array.shape, dtypes.numpy_dtype(name))
        return jax.dlpack.from_dlpack(Export(array, array.ctypes.data, CPU, name, array.shape))
    return array if dtype is None or array.dtype.name == dtype else array.view(dtypes.numpy_dtype(dtype))


def _torch_from_host(array: np.ndarray, name: str) -> Any:
    torch = sys.modules["torch"]
    if not array.flags.writeable:  # torch has no read-only tensors
        array = array.copy()
    kind = getattr(torch, name, None)
    if kind is None:
        raise DtypeError(f"this torch has no dtype {name!r}")
    bits = array.view(np.dtype(f"i{array.itemsize}"))  # signed integers are what every torch takes from NumPy
    return torch.from_numpy(bits).view(kind)


def from_device(buffer: Any, shape: tuple[int, ...], dtype: str, library: str, offset: int = 0) -> Any:
    """Device memory of a pool as an array of ``library``; the buffer lives until the last view of it dies.

    Args:
        buffer: a pool ``Buffer``: ``pointer``, ``nbytes``, ``device``, ``stream``.
        shape: extents; the elements are dense.
        dtype: name of the element type.
        library: "torch", "jax", or "cupy"; "dlpack" gets CuPy.
        offset: byte where the first element lies.

    Returns:
        torch.Tensor, jax.Array or cupy.ndarray on the buffer's device.
    """
    device: Device = buffer.device
    pointer = buffer.pointer + offset
    if library == "torch":
        torch = sys.modules["torch"]
        return torch.utils.dlpack.from_dlpack(make_capsule(buffer, pointer, device, dtype, shape))
    if library == "jax":
        jax = sys.modules["jax"]
        return jax.dlpack.from_dlpack(Export(_UntilIdle(buffer), pointer, device, dtype, shape, buffer.stream))
    ndarray, unowned_memory, memory_pointer = _cupy_types()
    memory = unowned_memory(pointer, buffer.nbytes - offset, buffer, device.index)
    return ndarray(shape, dtypes.numpy_dtype(dtype), memory_pointer(memory, 0))


@cache  # looking the names up costs as much as a third of the array
def _cupy_types() -> tuple[Any, Any, Any]:
    cupy = sys.modules["cupy"]
    return cupy.ndarray, cupy.cuda.UnownedMemory, cupy.cuda.MemoryPointer


class _UntilIdle:
    """A buffer that JAX reads on streams of its own: after the last view of it died, queued work may still read it."""

    def __init__(self, buffer: Any) -> None:
        self.buffer = buffer

    def __del__(self) -> None:
        if self.buffer.device.kind == "cuda":
            streams.hold_until_idle(self.buffer, self.buffer.device)


def as_uint8(x: Any) -> Any:
    """The bytes of a one-byte array as uint8 of the same shape: the same memory, reinterpreted, never converted.

    Args:
        x: dense array of any library, one byte an element (int8, float8, packed float4).

    Returns:
        ``x`` itself where it is uint8 already; else an array of x's library. An object known only by DLPack or
        ``__cuda_array_interface__`` becomes a NumPy or CuPy array.
    """
    seen = view(x)
    if seen.itemsize != 1:
        raise DtypeError(f"an array of {seen.dtype} cannot be reinterpreted as bytes of the same shape")
    if seen.dtype == "uint8" and seen.library != "dlpack":
        return x
    if seen.library == "torch":
        return x.view(sys.modules["torch"].uint8)
    if seen.library == "jax":  # its own bitcast copies
        return sys.modules["jax"].dlpack.from_dlpack(Export(x, seen.pointer, seen.device, "uint8", seen.shape))
    if seen.device.kind == "cpu":
        return seen.bits()
    cupy = sys.modules["cupy"]
    memory = cupy.cuda.UnownedMemory(seen.pointer, seen.nbytes, seen.owner, seen.device.index)
    return cupy.ndarray(seen.shape, np.uint8, cupy.cuda.MemoryPointer(memory, 0))
