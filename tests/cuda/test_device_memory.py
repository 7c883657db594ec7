"""What is asked of CuPy when device memory is taken; needs no device."""

from __future__ import annotations

import gc
import sys
import warnings
from types import SimpleNamespace

import pytest

from fp4rt.cuda.memory import borrowed_stream, default_upstream
from fp4rt.device import Device
from fp4rt.errors import BackendUnavailable

DEVICE = Device("cuda", 0)
HANDLE = 0x1234


def test_a_borrowed_stream_warns_of_nothing_and_is_not_destroyed(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = pytest.importorskip("cupy")
    destroyed: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda failure: destroyed.append(failure.exc_value))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stream = borrowed_stream(cupy, HANDLE, DEVICE)
    assert stream.ptr == HANDLE
    del stream
    gc.collect()
    assert not destroyed  # destroying what is no stream would have failed


def test_cupy_before_14_lends_by_handle_and_device() -> None:
    cuda = SimpleNamespace(Stream=object, ExternalStream=lambda handle, device: (handle, device))
    assert borrowed_stream(SimpleNamespace(cuda=cuda), HANDLE, DEVICE) == (HANDLE, 0)


def test_b40_without_a_driver_the_cause_is_told_by_our_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class CUDARuntimeError(RuntimeError):
        pass

    def no_driver() -> int:
        raise CUDARuntimeError("cudaErrorInsufficientDriver")

    runtime = SimpleNamespace(getDeviceCount=no_driver, CUDARuntimeError=CUDARuntimeError, streamIsCapturing=None)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))
    with pytest.raises(BackendUnavailable, match="needs a CUDA driver and device: cudaErrorInsufficientDriver"):
        default_upstream()
