"""Upstreams of the padded pool on CUDA devices: CuPy's pools, and PyTorch's caching allocator.

Imported with the backend, it makes CuPy's current memory pool the default of device kind "cuda".
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np

from fp4rt.device import Device
from fp4rt.errors import BackendUnavailable
from fp4rt.interop import cuda_driver
from fp4rt.interop.cuda_driver import relaxed_capture
from fp4rt.pool import Upstream, register_upstream
from fp4rt.pool.arena import DEFAULT_STREAMS

__all__ = ["CupyUpstream", "TorchUpstream", "default_upstream"]

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
        self.runtime = cupy.cuda.runtime
        self.is_capturing: Callable[[int], bool] = cupy.cuda.runtime.streamIsCapturing

    def fill(self, pointer: int, nbytes: int, byte: int, device: Device, stream: int) -> None:
        """Queue a memset; recorded like a kernel during a capture."""
        if not nbytes:
            return
        if self.runtime.getDevice() == device.index:  # handle 0 means the current device's default stream
            self.runtime.memsetAsync(pointer, byte, nbytes, stream)
        else:
            with self._cupy.cuda.Device(device.index):
                self.runtime.memsetAsync(pointer, byte, nbytes, stream)

    def read(self, pointer: int, nbytes: int, device: Device) -> np.ndarray:
        """uint8 copy on the host, after all work of the device."""
        host = np.empty(nbytes, np.uint8)
        with self._cupy.cuda.Device(device.index):
            self.runtime.deviceSynchronize()
            if nbytes:
                self.runtime.memcpy(host.ctypes.data, pointer, nbytes, DEVICE_TO_HOST)
        return host

    def capture_id(self, device: Device, stream: int) -> int:
        """0, or the driver's number of the capture that the stream records."""
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

    def watch_capture(self, device: Device, stream: int) -> Callable[[], bool]:
        """Asks a stream of our own, which joins the capture and adds nothing: it leaves when the capture ends.

        The driver crashes when it is asked about a destroyed stream.
        """
        with self._cupy.cuda.Device(device.index), relaxed_capture():
            watcher = self._cupy.cuda.Stream(non_blocking=True)
            self.wait_event(self.record_event(device, stream), device, watcher.ptr)
            self.wait_event(self.record_event(device, watcher.ptr), device, stream)  # no fork is left open

        def goes_on() -> bool:
            with cuda_driver.on_device(device.index) as driver:
                return driver.capturing(watcher.ptr)  # an invalidated capture counts, until it is ended

        return goes_on

    def record_event(self, device: Device, stream: int) -> Any:
        """A CuPy event behind the stream's work."""
        with self._cupy.cuda.Device(device.index):
            event = self._cupy.cuda.Event(disable_timing=True)
            self.runtime.eventRecord(event.ptr, stream)
        return event

    def record_all(self, device: Device) -> Any:
        """A CuPy event behind the work of every stream of the device's context."""
        with self._cupy.cuda.Device(device.index), cuda_driver.on_device(device.index) as driver:
            event = self._cupy.cuda.Event(disable_timing=True)
            if hasattr(driver.library, "cuCtxRecordEvent"):
                driver.call("cuCtxRecordEvent", driver.context(device.index), ctypes.c_void_p(event.ptr))
            else:  # before driver 12.5: the host waits, and an event that was never recorded counts as done
                driver.call("cuCtxSynchronize")
        return event

    def wait_event(self, event: Any, device: Device, stream: int) -> None:
        """The stream waits, the host does not."""
        with self._cupy.cuda.Device(device.index):
            self.runtime.streamWaitEvent(stream, event.ptr)

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
        self._pool = pool
        self._home: dict[int, Any] = {}  # device -> the stream that asynchronous memory is taken from and given back on

    def alloc(self, nbytes: int, device: Device, stream: int) -> tuple[int, Any]:
        """(address, CuPy's memory)."""
        malloc = self._cupy.cuda.get_allocator() if self._pool is None else self._pool.malloc
        asynchronous = isinstance(getattr(malloc, "__self__", None), self._cupy.cuda.MemoryAsyncPool)
        capturing = stream not in DEFAULT_STREAMS and self.is_capturing(stream)
        with self._cupy.cuda.Device(device.index):
            if asynchronous:
                if capturing:
                    raise MemoryError("MemoryAsyncPool would allocate inside the graph, for the graph's lifetime only")
                memory = self._alloc_at_home(malloc, nbytes, device, stream)
            else:
                with borrowed_stream(self._cupy, stream, device), relaxed_capture() if capturing else nullcontext():
                    memory = malloc(nbytes)
        return memory.ptr, [memory]

    def _alloc_at_home(self, malloc: Callable[[int], Any], nbytes: int, device: Device, stream: int) -> Any:
        """From a stream of our own: CuPy frees such memory on its stream, and the caller's may be destroyed by then."""
        home = self._home.get(device.index)
        if home is None:
            home = self._home[device.index] = self._cupy.cuda.Stream(non_blocking=True)
        with home:
            memory = malloc(nbytes)
        self.wait_event(self.record_event(device, home.ptr), device, stream)
        return memory

    def free(self, handle: Any) -> None:
        """Drops CuPy's memory."""
        handle.clear()

    def must_be_idle(self, handle: Any) -> bool:
        """Asynchronous memory is freed on our stream, which does not know the caller's work."""
        return isinstance(handle[0].mem, self._cupy.cuda.memory.MemoryAsync)


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

    def must_be_idle(self, handle: Any) -> bool:
        """The cache keeps the memory for its stream."""
        return False


class StreamHandle:
    """A stream of someone else's, in the form of the CUDA stream protocol."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle


def borrowed_stream(cupy: Any, handle: int, device: Device) -> Any:
    """CuPy's stream object over a handle that CuPy does not own."""
    if hasattr(cupy.cuda.Stream, "from_external"):  # CuPy 14 on
        return cupy.cuda.Stream.from_external(StreamHandle(handle))
    return cupy.cuda.ExternalStream(handle, device.index)


def default_upstream() -> Upstream:
    """CuPy's current allocator.

    Raises:
        BackendUnavailable: no CuPy, no driver or no device.
    """
    upstream = CupyUpstream()
    runtime = upstream.runtime
    try:
        runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:  # cudaErrorInsufficientDriver, cudaErrorNoDevice, ...
        raise BackendUnavailable(f"memory on a CUDA device needs a CUDA driver and device: {error}") from error
    return upstream


def adapt(given: Any) -> Upstream | None:
    """An upstream over an allocator in CuPy's form."""
    return CupyUpstream(given) if hasattr(given, "malloc") else None


register_upstream("cuda", default_upstream, adapt)
