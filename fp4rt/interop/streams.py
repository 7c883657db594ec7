"""CUDA streams: which one to use, order between two of them, how long memory must live. Nothing waits on the host."""

from __future__ import annotations

import ctypes
import sys
from collections import deque
from typing import Any, NamedTuple

from fp4rt.device import Device
from fp4rt.errors import BackendUnavailable, DtypeError
from fp4rt.interop import cuda_driver
from fp4rt.interop.arrays import ArrayView

__all__ = ["hold", "hold_foreign", "hold_until_idle", "let_go", "order", "stream_handle", "to_dlpack_stream"]

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

    Returns:
        The handle; 0 for a host array, which has no stream.

    Raises:
        DtypeError: not a stream.
    """
    if view.device.kind == "cpu":
        return 0
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
        if cupy is None:
            return LEGACY_DEFAULT
        try:
            return int(cupy.cuda.get_current_stream(index).ptr)
        except cupy.cuda.runtime.CUDARuntimeError as error:
            raise BackendUnavailable(f"cuda:{index} has no usable CUDA driver: {error}") from error
    return LEGACY_DEFAULT


def to_dlpack_stream(handle: int) -> int:
    """A handle as ``__dlpack__(stream=)`` and ``__cuda_array_interface__`` spell it: 0 is not allowed, 1 is it."""
    return DLPACK_LEGACY_DEFAULT if handle == LEGACY_DEFAULT else handle


def order(before: int, after: int, device: Device) -> bool:
    """Make stream ``after`` wait for all that stream ``before`` holds now; False where they are one stream."""
    if (before or DLPACK_LEGACY_DEFAULT) == (after or DLPACK_LEGACY_DEFAULT):
        return False
    with cuda_driver.on_device(device.index) as driver:
        event = driver.record(before)
        driver.call("cuStreamWaitEvent", ctypes.c_void_p(after), event, 0)
        driver.call("cuEventDestroy_v2", event)  # the driver keeps it until the wait is over
    return True


class _Held(NamedTuple):
    owner: Any
    device_index: int
    event: ctypes.c_void_p | None  # None: still to be recorded, behind all that the device holds


_held: deque[_Held] = deque()  # a deque's ends are atomic: no lock, which a destructor could not take anyway


def hold(owner: Any, stream: int, device: Device) -> None:
    """Keep ``owner`` alive until the work that ``stream`` holds now is done.

    For memory whose library frees or reuses it without regard to our stream (``ArrayView.foreign``): the caller may
    drop the array while a kernel still reads it. What is done is let go at a later call. While the stream is being
    captured into a graph nothing is held: a graph's inputs are its owner's to keep.
    """
    with cuda_driver.on_device(device.index) as driver:
        if driver.capturing(stream):
            return
        _held.append(_Held(owner, device.index, driver.record(stream)))
    let_go()


def hold_foreign(stream: int, *operands: Any) -> None:
    """:func:`hold` the owners of the foreign views among a call's operands, which ``stream`` has just been given.

    Args:
        stream: handle that the work was launched on.
        operands: views, tuples of views, or anything else, which is passed over.
    """
    if not ArrayView.any_foreign:
        return
    views = [view for operand in operands for view in (operand if isinstance(operand, tuple) else (operand,))]
    foreign = [view for view in views if isinstance(view, ArrayView) and view.foreign]
    if foreign:
        hold([view.owner for view in foreign], stream, foreign[0].device)


def hold_until_idle(owner: Any, device: Device) -> None:
    """Keep ``owner`` alive until all that the device was given up to the next ``hold`` or ``let_go`` is done.

    For our memory coming back from a library that reads it on streams of its own (JAX). Only notes it down: this is
    called from destructors, on any thread, where the driver may not be called.
    """
    _held.append(_Held(owner, device.index, None))


def let_go() -> None:
    """Drop what is held and done, oldest first; never waits (a driver older than 12.5 has to, for JAX's memory)."""
    while True:
        try:
            owner, index, event = _held.popleft()
        except IndexError:
            return
        with cuda_driver.on_device(index) as driver:
            event = event or driver.record_all(index)
            if not driver.done(event):
                _held.appendleft(_Held(owner, index, event))
                return
            driver.call("cuEventDestroy_v2", event)
