"""What a thread may do while a graph is captured."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

from fp4rt.interop import cuda_driver

__all__ = ["relaxed_capture"]

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


@contextmanager
def relaxed_capture() -> Iterator[None]:
    """Allows this thread to allocate and to load kernels while a graph is captured; the capture does not record it."""
    mode = ctypes.c_int(_RELAXED)
    driver = cuda_driver.load()
    driver.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    try:
        yield
    finally:
        driver.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
