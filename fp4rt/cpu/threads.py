"""Row ranges over threads of our own.

Why not numba's parallel loops: their threading layers are not safe to enter from several threads at once, and a
converter does enter from several. Kernels release the interpreter lock, so plain threads are enough.

The threads also own their floating-point mode: a library in the process may have switched subnormals off for the
caller's thread (``torch.set_flush_denormal``, anything linked with -ffast-math), and that would change results.
All arithmetic that API bits depend on therefore runs here, and in the caller's thread only where its mode is seen to be
the default one: a small matrix takes a tenth of what handing it to a thread and waiting takes.

Why not an executor of ``concurrent.futures``: it refuses work as soon as the main thread has ended, when other threads
and functions of ``atexit`` still run. Where no thread can be started any more, the caller's does the work.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import os
import platform
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

from fp4rt.errors import Fp4rtError

__all__ = ["THREADS_VARIABLE", "ThreadCountError", "map_rows", "on_thread", "thread_count"]

THREADS_VARIABLE = "FP4RT_NUM_THREADS"
SMALLEST_PART = 1 << 18  # elements; below it a second thread costs more than it brings
PARTS_PER_THREAD = 4  # so that a thread that is late delays less
LARGEST_FENV = 256  # bytes; fenv_t has 32 on x86-64 and 8 on aarch64
# By machine, of glibc's and musl's fenv_t: bytes, the bits of them that decide about results and traps, their default
_CONTROLS = {
    "x86_64": ((slice(0, 2), 0x0F3F, 0x033F), (slice(28, 32), 0xFFC0, 0x1F80)),  # x87's control word, MXCSR
    "aarch64": ((slice(0, 4), 0xFFFFFFFF, 0),),  # FPCR
}

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


Job = tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]

_lock = threading.Lock()
_jobs: SimpleQueue[Job] | None = None  # guarded by _lock; None while no thread waits for jobs


def _submit(function: Callable[..., Result], *arguments: Any) -> Future[Result]:
    """``function(*arguments)`` on one of the threads, soon."""
    future: Future[Result] = Future()
    jobs = _started()
    if jobs is not None:
        jobs.put((future, function, arguments))
    else:
        with _default_floating_point():
            _finish((future, function, arguments))
    return future


def _started() -> SimpleQueue[Job] | None:
    """The jobs that threads wait for; None where none can be started: the interpreter ends, or the system refuses."""
    global _jobs
    with _lock:
        if _jobs is None:
            jobs: SimpleQueue[Job] = SimpleQueue()
            with contextlib.suppress(RuntimeError):
                for number in range(thread_count()):
                    threading.Thread(target=_work, args=(jobs,), name=f"fp4rt-{number}", daemon=True).start()
                    _jobs = jobs
        return _jobs


def _work(jobs: SimpleQueue[Job]) -> None:
    with _default_floating_point():
        while True:
            _finish(jobs.get())


def _finish(job: Job) -> None:
    future, function, arguments = job
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function(*arguments))
    except BaseException as error:
        future.set_exception(error)
        del job, future  # the error holds this frame: they would hold each other


def _forget_threads() -> None:
    """A forked child has the jobs but not the threads; the lock may have been held by another thread."""
    global _jobs, _lock
    _jobs, _lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads)


@functools.cache
def _reader_of_controls() -> tuple[Any, tuple[tuple[slice, int, int], ...]] | None:
    """``fegetenv`` and where it puts what; None where that is not known."""
    controls = _CONTROLS.get(platform.machine()) if sys.platform == "linux" else None
    try:
        return None if controls is None else (ctypes.PyDLL(None).fegetenv, controls)
    except (AttributeError, OSError):
        return None


def _has_default_floating_point() -> bool:
    """Whether this thread computes as the others do; False where that cannot be told."""
    reader = _reader_of_controls()
    if reader is None:
        return False
    fegetenv, controls = reader
    kept = ctypes.create_string_buffer(LARGEST_FENV)
    fegetenv(kept)
    environment = kept.raw
    return all(int.from_bytes(environment[place], "little") & mask == default for place, mask, default in controls)


@contextlib.contextmanager
def _default_floating_point() -> Iterator[None]:
    """Round to nearest even, subnormals kept, on this thread; a new thread inherits its parent's mode."""
    kept = ctypes.create_string_buffer(LARGEST_FENV)
    with contextlib.suppress(AttributeError, OSError):  # another C library: the mode stays as the process has it
        ctypes.CDLL(None).fegetenv(kept)
        ctypes.CDLL(None).fesetenv(ctypes.c_void_p(-1))  # FE_DFL_ENV of glibc and musl
    try:
        yield
    finally:
        with contextlib.suppress(AttributeError, OSError):
            ctypes.CDLL(None).fesetenv(kept)


def on_thread(function: Callable[[], Result]) -> Result:
    """``function()`` on one of the threads, or here where it comes to the same."""
    return function() if _has_default_floating_point() else _submit(function).result()


def map_rows(function: Callable[[int, int], Result], rows: int, columns: int) -> list[Result]:
    """``function(first, end)`` over ranges that cover ``rows`` rows of ``columns`` elements; results in order.

    At most :func:`thread_count` threads work on it, each at one range after the other; the caller's is one of them.
    An exception in one range is raised after all have ended, so that nothing writes behind the caller's back.
    """
    if rows == 0:
        return []
    parts = max(1, min(rows, thread_count() * PARTS_PER_THREAD, rows * columns // SMALLEST_PART))
    bounds = [rows * part // parts for part in range(parts + 1)]
    left = deque(enumerate(itertools.pairwise(bounds)))
    results: dict[int, Result] = {}
    errors: dict[int, BaseException] = {}

    def work() -> None:
        while left:
            try:
                part, (first, end) = left.popleft()
            except IndexError:  # another thread was faster
                return
            try:
                results[part] = function(first, end)
            except BaseException as error:
                errors[part] = error
                if not isinstance(error, Exception):  # Ctrl-C
                    left.clear()

    here = _has_default_floating_point()
    others = [_submit(work) for _ in range(min(parts, thread_count()) - here)]
    try:
        if here:
            work()
    finally:
        for other in others:
            if not (here and other.cancel()):  # with work left, or under way
                other.result()
    try:
        if errors:
            raise errors[min(errors)]
    finally:
        errors.clear()  # each holds the frames that hold them
    return [results[part] for part in range(parts)]
