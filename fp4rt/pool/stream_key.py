"""What tells streams of one device apart: their handles, but for the one handle that means another in every thread."""

from __future__ import annotations

import threading
from typing import Any

__all__ = ["PER_THREAD_STREAM", "stream_key"]

PER_THREAD_STREAM = 2  # the handle cudaStreamPerThread

_thread = threading.local()


def stream_key(stream: int) -> Any:
    """The handle, or for the per-thread stream a token of the calling thread.

    While the token is kept it equals no other thread's, those that have ended included. A thread's number comes back
    when the thread ends, and its stream may still have work queued.
    """
    if stream != PER_THREAD_STREAM:
        return stream
    token = getattr(_thread, "token", None)
    if token is None:
        token = _thread.token = object()
    return token
