"""Upstreams of the padded pool on CUDA devices: CuPy's pools, and PyTorch's caching allocator.

Imported with the backend, it makes CuPy's current memory pool the default of device kind "cuda". Both upstreams are
stream-ordered themselves: a block is taken and given back in the order of the stream that asked for it.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from fp4rt.device import Device
from fp4rt.errors import BackendUnavailable
from fp4rt.interop import cuda_driver
from fp4rt.pool import Upstream, register_upstream

__all__ = ["CupyUpstream", "TorchUpstream", "default_upstream"]

RELAXED_CAPTURE = 2  # CU_STREAM_CAPTURE_MODE_RELAXED: this thread may allocate while a graph is captured
DEVICE_TO_HOST = 2  # cudaMemcpyDeviceToHost


class CudaStreams:
    """What does not depend on the allocator: fills, events, captures, reading back."""

    kind = "cuda"
    has_streams = True

    def __init__(self) -> None:
        try:
            import cupy
        except (ImportError, OSError) as error:
            raise BackendUnavailable(
                f"memory on a CUDA device needs CuPy: {error}; pip install 'fp4rt[cuda12]' or 'fp4rt[cuda13]'"
            ) from error
        self._cupy = cupy
        self._runtime = cupy.cuda.runtime
        self._is_capturing = cupy.cuda.runtime.streamIsCapturing
        self._runtime_error = cupy.cuda.runtime.CUDARuntimeError

    def fill(self, pointer: int, nbytes: int, byte: int, device: Device, stream: int) -> None:
        """Queue a memset; recorded like a kernel during a capture."""
        if nbytes:
            with self._cupy.cuda.Device(device.index):  # handle 0 means the current device's default stream
                self._runtime.memsetAsync(pointer, byte, nbytes, stream)

    def read(self, pointer: int, nbytes: int, device: Device) -> np.ndarray:
        """uint8 copy on the host, after all work of the device."""
        host = np.empty(nbytes, np.uint8)
        with self._cupy.cuda.Device(device.index):
            self._runtime.deviceSynchronize()
            if nbytes:
                self._runtime.memcpy(host.ctypes.data, pointer, nbytes, DEVICE_TO_HOST)
        return host

    def capture_id(self, device: Device, stream: int) -> int:
        """0, or the driver's number of the capture that the stream records."""
        try:
            if not self._is_capturing(stream):
                return 0
        except self._runtime_error:  # the default stream while another stream is captured: nothing may use it now
            return 0
        status, number = ctypes.c_int(), ctypes.c_uint64()
        cuda_driver.load().call(
            "cuStreamGetCaptureInfo_v2",
            ctypes.c_void_p(stream),
            ctypes.byref(status),
            ctypes.byref(number),
            None,
            None,
            None,
        )
        return number.value

    def record_event(self, device: Device, stream: int) -> Any:
        """A CuPy event behind the stream's work."""
        with self._cupy.cuda.Device(device.index):
            event = self._cupy.cuda.Event(disable_timing=True)
            self._runtime.eventRecord(event.ptr, stream)
        return event

    def wait_event(self, event: Any, device: Device, stream: int) -> None:
        """The stream waits, the host does not."""
        with self._cupy.cuda.Device(device.index):
            self._runtime.streamWaitEvent(stream, event.ptr)

    def synchronize_event(self, event: Any) -> None:
        """The host waits."""
        event.synchronize()


class CupyUpstream(CudaStreams):
    """A CuPy pool: ``MemoryPool``, ``MemoryAsyncPool``, or anything with their ``malloc``.

    Args:
        pool: None takes the allocator that CuPy itself has at the time of each allocation.
    """

    def __init__(self, pool: Any = None) -> None:
        super().__init__()
        self._malloc = self._cupy.cuda.alloc if pool is None else pool.malloc
        self._graph_memory = isinstance(pool, self._cupy.cuda.MemoryAsyncPool)

    def alloc(self, nbytes: int, device: Device, stream: int) -> tuple[int, Any]:
        """(address, CuPy's memory with the stream that orders its release)."""
        with self._cupy.cuda.Device(device.index):
            order = self._cupy.cuda.ExternalStream(stream, device.index)
            if self.capture_id(device, stream):
                if self._graph_memory:
                    raise MemoryError("MemoryAsyncPool would allocate inside the graph, for the graph's lifetime only")
                with order, relaxed_capture():
                    memory = self._malloc(nbytes)
            else:
                with order:
                    memory = self._malloc(nbytes)
        return memory.ptr, [memory, order]

    def free(self, handle: Any) -> None:
        """Drops CuPy's memory first: its release is ordered by the stream, which must still be there."""
        handle[0] = None


class TorchUpstream(CudaStreams):
    """PyTorch's caching allocator, through its raw allocations: one cache for torch's tensors and for this pool."""

    def __init__(self) -> None:
        super().__init__()
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_available():
            raise BackendUnavailable("TorchUpstream needs an imported torch with a CUDA device; import torch first")
        self._torch: Any = torch

    def alloc(self, nbytes: int, device: Device, stream: int) -> tuple[int, Any]:
        """(address, address)."""
        try:
            pointer: int = self._torch.cuda.caching_allocator_alloc(nbytes, device.index, stream)
        except self._torch.cuda.OutOfMemoryError as error:
            raise MemoryError(str(error)) from error
        return pointer, pointer

    def free(self, handle: Any) -> None:
        """Back to torch's cache."""
        self._torch.cuda.caching_allocator_delete(handle)


@contextmanager
def relaxed_capture() -> Iterator[None]:
    """Allows this thread to allocate while a graph is being captured; the capture does not record it."""
    mode = ctypes.c_int(RELAXED_CAPTURE)
    driver = cuda_driver.load()
    driver.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    try:
        yield
    finally:
        driver.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))


def default_upstream() -> Upstream:
    """CuPy's current allocator."""
    return CupyUpstream()


def adapt(given: Any) -> Upstream | None:
    """An upstream over an allocator in CuPy's form."""
    return CupyUpstream(given) if hasattr(given, "malloc") else None


register_upstream("cuda", default_upstream, adapt)
