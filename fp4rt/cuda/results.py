"""Device memory for results, from the current pool, as arrays of the caller's library; and what is queued on it."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np

from fp4rt import interop
from fp4rt.device import Device
from fp4rt.errors import BackendUnavailable, OutOfMemoryError
from fp4rt.interop import ArrayView, cuda_driver, streams
from fp4rt.interop.arrays import dense_strides
from fp4rt.interop.dtypes import itemsize
from fp4rt.pool import Buffer, PaddingTag, current_pool

__all__ = [
    "clear_bytes",
    "copy_bytes",
    "fill_float",
    "memory_view",
    "new_memory",
    "read_bytes",
    "result",
    "write_bytes",
]


def new_memory(
    shape: tuple[int, ...], dtype: str, device: Device, stream: int, tag: PaddingTag | None = None
) -> Buffer:
    """Memory for a dense array, to be used in the order of ``stream``; not initialized.

    Where the pool has none, what JAX has given back is waited for first.
    """
    nbytes = math.prod(shape) * itemsize(dtype)
    try:
        return current_pool().allocate(nbytes, device, stream, tag)
    except OutOfMemoryError:
        if not _may_wait(stream) or not streams.let_go(wait=True):
            raise
        return current_pool().allocate(nbytes, device, stream, tag)


def _may_wait(stream: int) -> bool:
    try:
        return not cuda_driver.load().capturing(stream)
    except BackendUnavailable:  # the default stream while another one is captured
        return False


def memory_view(buffer: Buffer, shape: tuple[int, ...], dtype: str, library: str, name: str) -> ArrayView:
    """The memory as a dense array that nobody has made: see ``QuantizedTensor.in_memory``."""
    return ArrayView(buffer, library, buffer.device, dtype, shape, dense_strides(shape), buffer.pointer, False, name)


def result(buffer: Buffer, shape: tuple[int, ...], dtype: str, library: str) -> Any:
    """The memory as an array of ``library``."""
    return interop.from_device(buffer, shape, dtype, library)


def copy_bytes(to: int, source: int, nbytes: int, device: Device, stream: int) -> None:
    """Queue a copy within the device; recorded like a kernel during a capture."""
    if nbytes and to != source:
        with cuda_driver.on_device(device.index) as driver:
            driver.call(
                "cuMemcpyDtoDAsync_v2",
                ctypes.c_uint64(to),
                ctypes.c_uint64(source),
                ctypes.c_size_t(nbytes),
                ctypes.c_void_p(stream),
            )


def clear_bytes(to: int, nbytes: int, device: Device, stream: int) -> None:
    """Queue the writing of zeros; recorded like a kernel during a capture."""
    if nbytes:
        with cuda_driver.on_device(device.index) as driver:
            driver.call(
                "cuMemsetD8Async",
                ctypes.c_uint64(to),
                ctypes.c_ubyte(0),
                ctypes.c_size_t(nbytes),
                ctypes.c_void_p(stream),
            )


def read_bytes(to: np.ndarray, source: int, device: Device, stream: int) -> None:
    """Fill a dense host array from the device, after the stream's work; waits."""
    if to.nbytes:
        with cuda_driver.on_device(device.index) as driver:
            driver.call(
                "cuMemcpyDtoHAsync_v2",
                ctypes.c_void_p(to.ctypes.data),
                ctypes.c_uint64(source),
                ctypes.c_size_t(to.nbytes),
                ctypes.c_void_p(stream),
            )
            driver.call("cuStreamSynchronize", ctypes.c_void_p(stream))


def write_bytes(to: int, source: np.ndarray, device: Device, stream: int) -> None:
    """Copy a dense host array to the device, after the stream's work; waits until it was read."""
    if source.nbytes:
        with cuda_driver.on_device(device.index) as driver:
            driver.call(
                "cuMemcpyHtoDAsync_v2",
                ctypes.c_uint64(to),
                ctypes.c_void_p(source.ctypes.data),
                ctypes.c_size_t(source.nbytes),
                ctypes.c_void_p(stream),
            )
            driver.call("cuStreamSynchronize", ctypes.c_void_p(stream))


def fill_float(to: int, value: float, device: Device, stream: int) -> None:
    """Queue the writing of one fp32 number; recorded like a kernel during a capture."""
    with cuda_driver.on_device(device.index) as driver:
        bits = ctypes.c_uint32.from_buffer_copy(ctypes.c_float(value))
        driver.call("cuMemsetD32Async", ctypes.c_uint64(to), bits, ctypes.c_size_t(1), ctypes.c_void_p(stream))
