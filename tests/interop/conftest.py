"""A DLPack producer under the test's control, and a CUDA driver that only writes down what it was asked."""

from __future__ import annotations

import ctypes
from collections import defaultdict, deque
from typing import Any

import numpy as np
import pytest

from fp4rt.interop import cuda_driver, streams

DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Tensor(ctypes.Structure):
    """DLTensor, spelled from dlpack.h and not from the code under test."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int),
        ("device_id", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    ]


class Legacy(ctypes.Structure):
    """DLManagedTensor."""

    _fields_ = [("tensor", Tensor), ("context", ctypes.c_void_p), ("deleter", DELETER)]


class Versioned(ctypes.Structure):
    """DLManagedTensorVersioned."""

    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", DELETER),
        ("flags", ctypes.c_uint64),
        ("tensor", Tensor),
    ]


new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)


class Producer:
    """Exports ``array``'s memory and records how it was asked, and how often the consumer deleted the tensor.

    On deletion the memory is overwritten with 0xEE: whoever still reads it sees that.
    """

    def __init__(
        self,
        array: np.ndarray,
        dtype: tuple[int, int, int] = (2, 32, 1),
        *,
        shape: tuple[int, ...] | None = None,
        strides: tuple[int, ...] | None = None,
        byte_offset: int = 0,
        version: tuple[int, int] | None = (1, 0),
        flags: int = 0,
        device: tuple[int, int] = (1, 0),
        null: bool = False,
        old_signature: bool = False,
    ) -> None:
        self.array, self.dtype, self.flags, self.device = array, dtype, flags, device
        self.shape = array.shape if shape is None else shape
        self.strides, self.byte_offset, self.version, self.null = strides, byte_offset, version, null
        self.old_signature = old_signature
        self.calls: list[dict[str, Any]] = []
        self.deleted = 0
        self.alive: list[Any] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, **wanted: Any) -> Any:
        self.calls.append(wanted)
        if self.old_signature and "max_version" in wanted:
            raise TypeError("__dlpack__() got an unexpected keyword argument 'max_version'")
        return self.capsule(versioned=self.version is not None and "max_version" in wanted)

    def capsule(self, versioned: bool = True) -> Any:
        managed = Versioned() if versioned else Legacy()
        tensor = managed.tensor
        tensor.data = None if self.null else self.array.ctypes.data
        tensor.device_type, tensor.device_id = self.device
        tensor.code, tensor.bits, tensor.lanes = self.dtype
        tensor.ndim = len(self.shape)
        shape = (ctypes.c_int64 * len(self.shape))(*self.shape)
        tensor.shape = ctypes.addressof(shape)
        strides = None
        if self.strides is not None:
            strides = (ctypes.c_int64 * len(self.strides))(*self.strides)
            tensor.strides = ctypes.addressof(strides)
        tensor.byte_offset = self.byte_offset
        if versioned:
            managed.major, managed.minor = self.version or (1, 0)
            managed.flags = self.flags
        managed.deleter = DELETER(self._delete)
        self.alive.append((managed, shape, strides))
        return new_capsule(ctypes.addressof(managed), b"dltensor_versioned" if versioned else b"dltensor", None)

    def _delete(self, address: int) -> None:
        self.deleted += 1
        if self.device[0] == 1:
            self.array.view(np.uint8).reshape(-1)[:] = 0xEE


class RecordingDriver:
    """libcuda's functions by name; each call is written down as (name, arguments)."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.finished: set[int] = set()
        self.capturing = False
        self.events = 0
        self.stream_numbers: dict[int, int] = {}

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)
        return lambda *args: self._call(name, args)

    def _call(self, name: str, args: tuple[Any, ...]) -> int:
        if name == "cuEventCreate":
            self.events += 1
            args[0]._obj.value = self.events
        if name == "cuStreamIsCapturing":
            args[1]._obj.value = int(self.capturing)
        if name == "cuStreamGetId":
            args[1]._obj.value = self.stream_numbers.get(args[0].value, args[0].value)
        plain = tuple(getattr(arg, "value", None) if isinstance(arg, ctypes.c_void_p) else arg for arg in args)
        self.calls.append((name, *plain))
        if name == "cuEventSynchronize":
            self.finished.add(args[0].value)
        if name == "cuEventQuery" and plain[0] not in self.finished:
            return 600
        return 0

    def named(self, *names: str) -> list[tuple[Any, ...]]:
        """The calls of these functions, in order."""
        return [call for call in self.calls if call[0] in names]


@pytest.fixture
def producer() -> type[Producer]:
    return Producer


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> RecordingDriver:
    recording = RecordingDriver()
    monkeypatch.setattr(cuda_driver, "_driver", cuda_driver.Driver(recording))
    monkeypatch.setattr(streams, "_held", defaultdict(deque))
    monkeypatch.setattr(streams, "_known", {})
    return recording
