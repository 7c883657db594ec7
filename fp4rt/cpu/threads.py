"""Row ranges over threads of our own.

Why not numba's parallel loops: their threading layers are not safe to enter from several threads at once, and a
converter does enter from several. Kernels release the interpreter lock, so plain threads are enough.

The threads also own their floating-point mode: a library in the process may have switched subnormals off for the
caller's thread (``torch.set_flush_denormal``, anything linked with -ffast-math), and that would change results.
All arithmetic that API bits depend on therefore runs here, never on the caller's thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from fp4rt.errors import Fp4rtError

__all__ = ["THREADS_VARIABLE", "ThreadCountError", "map_rows", "on_thread", "thread_count"]

THREADS_VARIABLE = "FP4RT_NUM_THREADS"
SMALLEST_PART = 1 << 16  # elements; below it a second thread costs more than it brings
PARTS_PER_THREAD = 4  # so that a thread that is late delays less

Result = TypeVar("Result")


class ThreadCountError(Fp4rtError, ValueError):
    """The environment asks for an impossible number of threads."""


@functools.cache
def thread_count() -> int:
    """``FP4RT_NUM_THREADS``, else the number of processors that this process may use."""
    chosen = os.environ.get(THREADS_VARIABLE)
    if chosen:
        if not chosen.isdecimal() or int(chosen) == 0:
            raise ThreadCountError(
                f"{THREADS_VARIABLE} must be a positive integer, got {chosen!r}; unset it or correct it"
            )
        return int(chosen)
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


_lock = threading.Lock()
_executor: ThreadPoolExecutor | None = None  # guarded by _lock


def _threads() -> ThreadPoolExecutor:
    global _executor
    with _lock:
        if _executor is None:
            _executor = ThreadPoolExecutor(thread_count(), "fp4rt", initializer=_default_floating_point)
        return _executor


def _forget_threads() -> None:
    """A forked child has the executor but not its threads; its lock may have been held by another thread."""
    global _executor, _lock
    _executor, _lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads)


def _default_floating_point() -> None:
    """Round to nearest even, subnormals kept: a new thread inherits its parent's mode."""
    with contextlib.suppress(AttributeError, OSError):  # another C library: the mode stays as the process has it
        ctypes.CDLL(None).fesetenv(ctypes.c_void_p(-1))  # FE_DFL_ENV of glibc and musl


def on_thread(function: Callable[[], Result]) -> Result:
    """``function()`` on one of the threads."""
    return _threads().submit(function).result()


def map_rows(function: Callable[[int, int], Result], rows: int, columns: int) -> list[Result]:
    """``function(first, end)`` over ranges that cover ``rows`` rows of ``columns`` elements; results in order.

    An exception in one range is raised after all have ended, so that nothing writes behind the caller's back.
    """
    if rows == 0:
        return []
    parts = max(1, min(rows, thread_count() * PARTS_PER_THREAD, rows * columns // SMALLEST_PART))
    bounds = [rows * part // parts for part in range(parts + 1)]
    futures = [_threads().submit(function, first, end) for first, end in itertools.pairwise(bounds)]
    errors = [future.exception() for future in futures]
    for error in errors:
        if error is not None:
            raise error
    return [future.result() for future in futures]
