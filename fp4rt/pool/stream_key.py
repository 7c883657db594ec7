"""What tells streams of one device apart: their handles, but for the one handle that means another in every thread."""

from __future__ import annotations

import threading
import weakref
from typing import Any

__all__ = ["PER_THREAD_STREAM", "is_of_ended_thread", "stream_key"]

PER_THREAD_STREAM = 2  # the handle cudaStreamPerThread


class _Token:
    """Lives as long as its thread."""

    __slots__ = ("__weakref__",)


class _Thread(threading.local):
    def __init__(self) -> None:
        self.token = _Token()
        self.key = weakref.ref(self.token)


_thread = _Thread()


def stream_key(stream: int) -> Any:
    """The handle, or for the per-thread stream a key of the calling thread.

    While it is kept it equals no other thread's, those that have ended included. A thread's number comes back when the
    thread ends, and its stream may still have work queued.
    """
    return stream if stream != PER_THREAD_STREAM else _thread.key


def is_of_ended_thread(key: Any) -> bool:
    """Whether a key is that of the stream of a thread that has ended."""
    return isinstance(key, weakref.ref) and key() is None
