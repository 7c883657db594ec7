"""CUDA streams: which one to use, order between two of them, how long memory must live. Nothing waits on the host."""

from __future__ import annotations

import ctypes
import sys
import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any, NamedTuple

from fp4rt.device import Device
from fp4rt.errors import BackendUnavailable, DtypeError
from fp4rt.interop import cuda_driver
from fp4rt.interop.arrays import ArrayView

__all__ = [
    "enter_stream",
    "hold",
    "hold_foreign",
    "hold_until_idle",
    "let_go",
    "order",
    "stream_handle",
    "to_dlpack_stream",
]

# Handles that the driver gives a meaning: 0 and 1 are both the legacy default stream, 2 is the per-thread one.
LEGACY_DEFAULT = 0
DLPACK_LEGACY_DEFAULT = 1
PER_THREAD_DEFAULT = 2
_CUPYS = ("cupy", "dlpack")  # libraries that work on CuPy's streams: results of "dlpack" are CuPy's


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


class _Known(NamedTuple):
    """The stream that a call was last given by a handle."""

    number: int  # the driver's
    owner: Callable[[], Any]  # what destroys it, weakly referenced; None where that is not known


_known: dict[int, _Known] = {}


def enter_stream(stream: Any, view: ArrayView) -> int:
    """:func:`stream_handle` for a call that will put work on the stream.

    What is kept for a stream, memory and counters, is kept by its handle, and the driver gives that of a destroyed
    stream to the next one, though the first one's work may still be queued. So a stream that has the handle of another
    one waits here, the first time, for all that its device holds. To ask the driver takes as long as a fifth of a call;
    where the stream's owner is the one of the last time, it needs no question.

    Raises:
        DtypeError: not a stream. BackendUnavailable: what a destroyed stream left cannot be waited for.
    """
    if stream is None and view.library in _CUPYS and view.device.kind == "cuda":
        stream = _current_cupy_stream(view.device.index)
        handle = LEGACY_DEFAULT if stream is None else int(stream.ptr)
    else:
        handle = stream_handle(stream, view)
    if handle > PER_THREAD_DEFAULT:
        owner = _TORCH if stream is None else _owner(stream)
        known = _known.get(handle)
        if known is None or owner is None or known.owner() is not owner:
            _wait_for_namesake(handle, owner, view.device)
    return handle


class _Torch:
    """PyTorch, which makes its streams once and destroys none of them."""


_TORCH = _Torch()


def _owner(stream: Any) -> Any:
    """What destroys the stream: the object itself, or None where that may only borrow it."""
    kind = type(stream)
    if kind.__name__ == "Stream":
        if kind.__module__ == "cupy.cuda.stream" and getattr(stream, "_foreign_stream_ref", None) is None:
            return stream
        if kind.__module__ == "torch.cuda.streams":
            return _TORCH
    return None


def _nobody() -> None:
    return None


def _wait_for_namesake(handle: int, owner: Any, device: Device) -> None:
    number, known = cuda_driver.load().stream_number(handle), _known.get(handle)
    if number == 0:
        return
    if known is not None and known.number == number:
        if owner is None:
            return
    elif known is not None:
        try:
            with cuda_driver.on_device(device.index) as driver:
                _wait(handle, driver.record_all(device.index), driver)
        except BackendUnavailable as error:
            raise BackendUnavailable(
                f"stream {handle:#x} has the handle of a destroyed one, and what that one left cannot be waited for "
                f"({error}); while a stream of the device is captured, make no new ones"
            ) from error
    _known[handle] = _Known(number, _nobody if owner is None else weakref.ref(owner))


def _current_stream(library: str, index: int) -> int:
    if library == "torch":
        torch = sys.modules["torch"]
        raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # a tenth of the cost of the public object
        return int(raw(index) if raw is not None else torch.cuda.current_stream(index).cuda_stream)
    current = _current_cupy_stream(index) if library in _CUPYS else None
    return LEGACY_DEFAULT if current is None else int(current.ptr)


def _current_cupy_stream(index: int) -> Any:
    cupy = sys.modules.get("cupy")
    if cupy is None:
        return None
    try:
        return cupy.cuda.get_current_stream(index)
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise BackendUnavailable(f"cuda:{index} has no usable CUDA driver: {error}") from error


def to_dlpack_stream(handle: int) -> int:
    """A handle as ``__dlpack__(stream=)`` and ``__cuda_array_interface__`` spell it: 0 is not allowed, 1 is it."""
    return DLPACK_LEGACY_DEFAULT if handle == LEGACY_DEFAULT else handle


def order(before: int, after: int, device: Device) -> bool:
    """Make stream ``after`` wait for all that stream ``before`` holds now; False where they are one stream."""
    if (before or DLPACK_LEGACY_DEFAULT) == (after or DLPACK_LEGACY_DEFAULT):
        return False
    with cuda_driver.on_device(device.index) as driver:
        _wait(after, driver.record(before), driver)
    return True


def _wait(stream: int, event: ctypes.c_void_p, driver: cuda_driver.Driver) -> None:
    driver.call("cuStreamWaitEvent", ctypes.c_void_p(stream), event, 0)
    driver.call("cuEventDestroy_v2", event)  # the driver keeps it until the wait is over


class _Held(NamedTuple):
    owner: Any
    event: ctypes.c_void_p | None  # None: still to be recorded, behind all that the device holds


# By device index, oldest first. A deque's ends are atomic: no lock, which a destructor could not take anyway.
_held: defaultdict[int, deque[_Held]] = defaultdict(deque)


def hold(owner: Any, stream: int, device: Device) -> None:
    """Keep ``owner`` alive until the work that ``stream`` holds now is done.

    For memory whose library frees or reuses it without regard to our stream (``ArrayView.foreign``): the caller may
    drop the array while a kernel still reads it. What is done is let go at a later call. While the stream is being
    captured into a graph nothing is held: a graph's inputs are its owner's to keep.
    """
    with cuda_driver.on_device(device.index) as driver:
        if driver.capturing(stream):
            return
        _held[device.index].append(_Held(owner, driver.record(stream)))
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
    _held[device.index].append(_Held(owner, None))


def let_go(wait: bool = False) -> bool:
    """Drop what is held and done, oldest first.

    Args:
        wait: for all of it. Otherwise this never waits (a driver older than 12.5 has to, for JAX's memory).

    Returns:
        Whether anything was dropped.
    """
    dropped = False
    for index in list(_held):
        while _held[index] and _let_go_of_one(index, _held[index], wait):
            dropped = True
    return dropped


def _let_go_of_one(index: int, held: deque[_Held], wait: bool) -> bool:
    """Whether the oldest one was done; it stays where that cannot be told, as while a graph is captured."""
    try:
        owner, event = held.popleft()
    except IndexError:  # another thread was faster
        return False
    done = False
    try:
        with cuda_driver.relaxed_capture(), cuda_driver.on_device(index) as driver:
            event = event or driver.record_all(index)
            if wait:
                driver.call("cuEventSynchronize", event)
            done = driver.done(event)
            if done:
                driver.call("cuEventDestroy_v2", event)
    except BackendUnavailable:
        pass
    finally:
        if not done:
            held.appendleft(_Held(owner, event))
    return done
