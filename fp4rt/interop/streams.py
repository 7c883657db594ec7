"""CUDA streams: which one to use, and order between two of them without waiting on the host.

The order is made with events of the CUDA driver, called through ctypes: it needs no CUDA library in Python, and
the driver is only loaded when two streams really differ.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections import deque
from typing import Any

from fp4rt.device import Device
from fp4rt.errors import BackendUnavailable, DeviceError, DtypeError
from fp4rt.interop.arrays import ArrayView

__all__ = ["hold", "order", "stream_handle", "to_dlpack_stream"]

# Handles that the driver gives a meaning: 0 and 1 are both the legacy default stream, 2 is the per-thread one.
LEGACY_DEFAULT = 0
DLPACK_LEGACY_DEFAULT = 1


def stream_handle(stream: Any, view: ArrayView) -> int:
    """The integer handle of a ``stream=`` argument.

    Args:
        stream: an integer handle, an object with ``__cuda_stream__`` (or ``cuda_stream``, ``ptr``, ``handle``), or
            None: the current stream of the view's own library on its device. JAX keeps its streams to itself: for
            it the legacy default stream.
        view: the array that decides about the library and the device.

    Raises:
        DeviceError: a stream is given for a host array.
        DtypeError: not a stream.
    """
    if view.device.kind == "cpu":
        if stream is None:
            return 0
        raise DeviceError(f"stream={stream!r} was given, but {view.name} is on the host, where there is no stream")
    if stream is None:
        return _current_stream(view.library, view.device.index)
    if isinstance(stream, int) and not isinstance(stream, bool):
        return stream
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        answer = protocol() if callable(protocol) else protocol
        return int(answer[1])  # (version, handle)
    for attribute in ("cuda_stream", "ptr", "handle"):
        handle = getattr(stream, attribute, None)
        if handle is not None:
            return int(getattr(handle, "value", handle) or 0)
    raise DtypeError(f"stream is a {type(stream).__name__}; wanted an integer handle or an object with __cuda_stream__")


def _current_stream(library: str, index: int) -> int:
    if library == "torch":
        torch = sys.modules["torch"]
        raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # a tenth of the cost of the public object
        return int(raw(index) if raw is not None else torch.cuda.current_stream(index).cuda_stream)
    if library in ("cupy", "dlpack"):  # results of "dlpack" are CuPy's
        cupy = sys.modules.get("cupy")
        return LEGACY_DEFAULT if cupy is None else int(cupy.cuda.get_current_stream(index).ptr)
    return LEGACY_DEFAULT


def to_dlpack_stream(handle: int) -> int:
    """A handle as ``__dlpack__(stream=)`` and ``__cuda_array_interface__`` spell it: 0 is not allowed, 1 is it."""
    return DLPACK_LEGACY_DEFAULT if handle == LEGACY_DEFAULT else handle


def order(before: int, after: int, device: Device) -> bool:
    """Make stream ``after`` wait for all that stream ``before`` holds now; False where they are one stream."""
    if (before or DLPACK_LEGACY_DEFAULT) == (after or DLPACK_LEGACY_DEFAULT):
        return False
    with _Context(device.index) as driver:
        event = driver.record(before)
        driver.call("cuStreamWaitEvent", ctypes.c_void_p(after), event, 0)
        driver.call("cuEventDestroy_v2", event)  # the driver keeps it until the wait is over
    return True


_held: deque[tuple[ctypes.c_void_p, int, Any]] = deque()
_held_lock = threading.Lock()


def hold(owner: Any, stream: int, device: Device) -> None:
    """Keep ``owner`` alive until the work that ``stream`` holds now is done.

    For memory whose library frees or reuses it without regard to our stream (``ArrayView.foreign``): the caller may
    drop the array while a kernel still reads it. Nothing waits: what is done is let go at a later call. While the
    stream is being captured into a graph nothing is held: a graph's inputs are its owner's to keep.
    """
    with _Context(device.index) as driver:
        if driver.capturing(stream):
            return
        event = driver.record(stream)
        with _held_lock:
            _held.append((event, device.index, owner))
        _let_go()


def _let_go() -> None:
    """Drop what is held and done, oldest first."""
    while True:
        with _held_lock:
            if not _held:
                return
            event, index, _ = _held[0]
            with _Context(index) as driver:
                if not driver.done(event):
                    return
                driver.call("cuEventDestroy_v2", event)
            finished = _held.popleft()
        del finished  # outside the lock: its death may run anybody's code


class _Driver:
    """The few functions of libcuda that order and hold need."""

    NOT_READY = 600  # CUDA_ERROR_NOT_READY
    EVENT_DISABLE_TIMING = 2

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
        event = ctypes.c_void_p()
        self.call("cuEventCreate", ctypes.byref(event), self.EVENT_DISABLE_TIMING)
        self.call("cuEventRecord", event, ctypes.c_void_p(stream))
        return event

    def done(self, event: ctypes.c_void_p) -> bool:
        """Whether the event has been reached."""
        return self.call("cuEventQuery", event, accept=self.NOT_READY) == 0

    def capturing(self, stream: int) -> bool:
        """Whether the stream is being captured into a graph."""
        status = ctypes.c_int()
        self.call("cuStreamIsCapturing", ctypes.c_void_p(stream), ctypes.byref(status))
        return status.value != 0


_driver: _Driver | None = None


def _load_driver() -> _Driver:
    global _driver
    if _driver is None:
        try:
            _driver = _Driver(ctypes.CDLL("libcuda.so.1"))
        except OSError as error:
            raise BackendUnavailable(f"the CUDA driver cannot be loaded ({error}); install the NVIDIA driver") from None
    return _driver


class _Context:
    """The driver with the primary context of a device current on this thread, and the previous one put back."""

    def __init__(self, index: int) -> None:
        self.driver = _load_driver()
        self.index = index

    def __enter__(self) -> _Driver:
        self.driver.call("cuCtxPushCurrent_v2", self.driver.context(self.index))
        return self.driver

    def __exit__(self, *exc: object) -> None:
        self.driver.call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))
