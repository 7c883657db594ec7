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
from typing import Any, Generic, TypeVar

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


Job = tuple[Future[Any], Callable[[], Any]]

_lock = threading.RLock()  # a signal's handler may come back while threads are started
_jobs: SimpleQueue[Job] | None = None  # guarded by _lock; None while no thread waits for jobs


def _hand_over(future: Future[Result], function: Callable[[], Result]) -> None:
    """``function()`` on one of the threads, soon, unless ``future`` is cancelled before."""
    jobs = _started()
    if jobs is not None:
        jobs.put((future, function))
    else:
        with _default_floating_point():
            _finish((future, function))


def _started() -> SimpleQueue[Job] | None:
    """The jobs that threads wait for; None where none can be started: the interpreter ends, or the system refuses."""
    global _jobs
    if sys.is_finalizing():  # those that there were have stopped
        return None
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
    future, function = job
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function())
    except BaseException as error:
        future.set_exception(error)
        del job, future  # the error holds this frame: they would hold each other


def _forget_threads() -> None:
    """A forked child has the jobs but not the threads; the lock may have been held by another thread."""
    global _jobs, _lock
    _jobs, _lock = None, threading.RLock()


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
    if _has_default_floating_point():
        return function()
    future: Future[Result] = Future()
    _hand_over(future, function)
    return future.result()


class _Ranges(Generic[Result]):
    """Ranges of rows that several threads work off, each one after the other."""

    def __init__(self, function: Callable[[int, int], Result], bounds: list[int]) -> None:
        self.function: Callable[[int, int], Result] | None = function
        self.left = deque(enumerate(itertools.pairwise(bounds)))
        self.results: dict[int, Result] = {}
        self.errors: dict[int, BaseException] = {}

    def work(self) -> None:
        """Take ranges until none is left."""
        function = self.function
        while self.left and function is not None:
            try:
                part, (first, end) = self.left.popleft()
            except IndexError:  # another thread was faster
                return
            try:
                self.results[part] = function(first, end)
            except BaseException as error:
                self.errors[part] = error
                if not isinstance(error, Exception):  # Ctrl-C
                    self.left.clear()

    def outcome(self) -> list[Result]:
        """The results in order.

        Raises:
            BaseException: the first one's of those that were raised, but what ends a program before others.
        """
        errors = self.errors
        if errors:
            raise errors[min(errors, key=lambda part: (isinstance(errors[part], Exception), part))]
        return [result for _, result in sorted(self.results.items(), key=lambda item: item[0])]

    def forget(self) -> None:
        """Hold nothing: an error holds the frames that hold it, and a thread may yet have a cancelled job to see."""
        self.function = None
        self.left.clear()
        self.results.clear()
        self.errors.clear()


def _wait_for(others: list[Future[None]], cancel: bool) -> None:
    for other in others:
        if not (cancel and other.cancel()):
            other.result()


def map_rows(function: Callable[[int, int], Result], rows: int, columns: int) -> list[Result]:
    """``function(first, end)`` over ranges that cover ``rows`` rows of ``columns`` elements; results in order.

    At most :func:`thread_count` threads work on it, of which the caller's is one. An exception in one range is raised
    after all have ended, and Ctrl-C when those that had begun have, so that nothing writes behind the caller's back.
    """
    if rows == 0:
        return []
    parts = max(1, min(rows, thread_count() * PARTS_PER_THREAD, rows * columns // SMALLEST_PART))
    ranges = _Ranges(function, [rows * part // parts for part in range(parts + 1)])
    here = _has_default_floating_point()
    others: list[Future[None]] = [Future() for _ in range(min(parts, thread_count()) - here)]
    try:
        for other in others:
            _hand_over(other, ranges.work)
        if here:
            ranges.work()
        _wait_for(others, cancel=here)  # when the caller has found none left, those not begun are not needed
    except BaseException:
        ranges.left.clear()
        _wait_for(others, cancel=True)
        raise
    else:
        return ranges.outcome()
    finally:
        ranges.forget()
