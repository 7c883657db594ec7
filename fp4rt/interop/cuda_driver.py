"""The few functions of the CUDA driver that stream order needs, through ctypes.

No CUDA package in Python is needed for it, and the driver is only loaded when two streams really differ.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fp4rt.errors import BackendUnavailable

__all__ = ["Driver", "load", "on_device", "relaxed_capture"]

NOT_READY = 600  # CUDA_ERROR_NOT_READY
EVENT_DISABLE_TIMING = 2  # CU_EVENT_DISABLE_TIMING: such events never block and cost least
RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
POINTER_DEVICE_ORDINAL = 9  # CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL


class Driver:
    """libcuda, errors raised. The calls need a current context: see :class:`on_device`."""

    def __init__(self, library: Any) -> None:
        self.library = library
        self.contexts: dict[int, ctypes.c_void_p] = {}

    def call(self, function: str, *args: Any, accept: int = 0) -> int:
        """Call a driver function; an error number other than ``accept`` is raised."""
        status = getattr(self.library, function)(*args)
        if status not in (0, accept):
            text = ctypes.c_char_p()
            self.library.cuGetErrorString(status, ctypes.byref(text))
            reason = (text.value or b"unknown error").decode()
            raise BackendUnavailable(f"CUDA driver: {function} failed with error {status} ({reason})")
        return int(status)

    def context(self, index: int) -> ctypes.c_void_p:
        """The device's primary context, which torch, JAX and CuPy all use."""
        if index not in self.contexts:
            device, context = ctypes.c_int(), ctypes.c_void_p()
            self.call("cuInit", 0)
            self.call("cuDeviceGet", ctypes.byref(device), index)
            self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
            self.contexts[index] = context
        return self.contexts[index]

    def record(self, stream: int) -> ctypes.c_void_p:
        """A new event behind all that the stream holds."""
        return self._recorded(lambda event: self.call("cuEventRecord", event, ctypes.c_void_p(stream)))

    def record_all(self, index: int) -> ctypes.c_void_p:
        """A new event behind all that every stream of the device's context holds.

        Fails while any of them is being captured, and ends that capture.
        """
        if hasattr(self.library, "cuCtxRecordEvent"):
            return self._recorded(lambda event: self.call("cuCtxRecordEvent", self.context(index), event))
        # before driver 12.5 there is only this; the event itself then counts as reached
        return self._recorded(lambda event: self.call("cuCtxSynchronize"))

    def _recorded(self, record: Callable[[ctypes.c_void_p], object]) -> ctypes.c_void_p:
        event = ctypes.c_void_p()
        self.call("cuEventCreate", ctypes.byref(event), EVENT_DISABLE_TIMING)
        try:
            record(event)
        except BaseException:
            self.call("cuEventDestroy_v2", event)
            raise
        return event

    def device_of(self, pointer: int) -> int:
        """Index of the device that the memory at ``pointer`` belongs to; needs no current context."""
        index = ctypes.c_int()
        self.call("cuPointerGetAttribute", ctypes.byref(index), POINTER_DEVICE_ORDINAL, ctypes.c_uint64(pointer))
        return index.value

    def stream_number(self, stream: int) -> int:
        """The number of a stream, which no other one of the process ever has; 0 where the driver does not tell it.

        It does from 12.0 on, but not of a stream that is being captured: asking would end the capture.
        """
        if not hasattr(self.library, "cuStreamGetId") or self.capturing(stream):
            return 0
        number = ctypes.c_uint64()
        self.call("cuStreamGetId", ctypes.c_void_p(stream), ctypes.byref(number))
        return number.value

    def copy(self, to: int, source: int, nbytes: int, stream: int) -> None:
        """Queue a copy from device memory to device memory."""
        self.call(
            "cuMemcpyDtoDAsync_v2",
            ctypes.c_uint64(to),
            ctypes.c_uint64(source),
            ctypes.c_size_t(nbytes),
            ctypes.c_void_p(stream),
        )

    def done(self, event: ctypes.c_void_p) -> bool:
        """Whether the event has been reached."""
        return self.call("cuEventQuery", event, accept=NOT_READY) == 0

    def capturing(self, stream: int) -> bool:
        """Whether the stream is being captured into a graph."""
        status = ctypes.c_int()
        self.call("cuStreamIsCapturing", ctypes.c_void_p(stream), ctypes.byref(status))
        return status.value != 0


_driver: Driver | None = None


def load() -> Driver:
    """The driver, loaded once.

    Raises:
        BackendUnavailable: there is none.
    """
    global _driver
    if _driver is None:
        try:
            _driver = Driver(ctypes.CDLL("libcuda.so.1"))
        except OSError as error:
            raise BackendUnavailable(f"the CUDA driver cannot be loaded ({error}); install the NVIDIA driver") from None
    return _driver


class on_device:
    """The driver with the primary context of a device current on this thread, and the previous one put back."""

    def __init__(self, index: int) -> None:
        self.driver = load()
        self.index = index

    def __enter__(self) -> Driver:
        self.driver.call("cuCtxPushCurrent_v2", self.driver.context(self.index))
        return self.driver

    def __exit__(self, *exc: object) -> None:
        self.driver.call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))


@contextmanager
def relaxed_capture() -> Iterator[None]:
    """Allows this thread what a capture, of whichever thread, forbids: to allocate, to load kernels, to query events.

    The capture does not record it.
    """
    mode = ctypes.c_int(RELAXED)
    driver = load()
    driver.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    try:
        yield
    finally:
        driver.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
