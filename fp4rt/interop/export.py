"""Handing dense memory out through DLPack.

A DLPack tensor dies wherever its last user drops it: on a thread without Python's lock, in the middle of an exception,
after the interpreter's end. Its deleter must be C, and NumPy has the one that is needed: it takes the lock, checks that
Python is there, and drops one reference. So a capsule is made by NumPy, for an array of bytes at the address, which
keeps the owner alive and is never read, and then told the true device and type.
"""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import numpy as np

from fp4rt.device import Device
from fp4rt.interop import dtypes, streams
from fp4rt.interop.dlpack import (
    DEVICE_CPU,
    DEVICE_CUDA,
    NAME,
    VERSION,
    VERSIONED_NAME,
    Managed,
    ManagedVersioned,
    capsule_pointer,
)

__all__ = ["Export", "make_capsule"]

_HEAD = struct.Struct("=QiiiBBH")  # DLTensor up to its type: data, device type, device index, rank, code, bits, lanes
_LEGACY_TENSOR, _VERSIONED_TENSOR = Managed.tensor.offset, ManagedVersioned.tensor.offset
_BYTE = np.dtype(np.uint8)


class _Memory(ctypes.c_char * (1 << 62)):  # type: ignore[misc]
    """Memory from some address on, as much as anybody asks for, and what keeps it alive."""

    __slots__ = ("owner",)

    owner: Any


def make_capsule(
    owner: Any, pointer: int, device: Device, dtype: str, shape: tuple[int, ...], versioned: bool = False
) -> Any:
    """A DLPack capsule over dense memory, which ``owner`` keeps alive until the consumer lets it go.

    Args:
        owner: any object.
        pointer: address of the first element.
        device: where it is.
        dtype: name of the element type.
        shape: extents; the elements are dense and row-major.
        versioned: DLPack 1.x, which needs NumPy 2.1; else the older struct.
    """
    memory = _Memory.from_address(pointer)
    memory.owner = owner
    array = np.ndarray(shape, _BYTE, memory)
    if versioned:
        capsule = array.__dlpack__(max_version=VERSION)
        tensor = capsule_pointer(capsule, VERSIONED_NAME) + _VERSIONED_TENSOR
    else:
        capsule = array.__dlpack__()
        tensor = capsule_pointer(capsule, NAME) + _LEGACY_TENSOR
    kind = DEVICE_CPU if device.kind == "cpu" else DEVICE_CUDA
    head = _Memory.from_address(tensor)
    _HEAD.pack_into(head, 0, pointer, kind, device.index, len(shape), *dtypes.dlpack_type(dtype))
    return capsule


class Export:
    """Dense memory of ours as an object that speaks DLPack.

    Args:
        owner: kept alive until the consumer lets the memory go.
        pointer: address of the first element.
        device: where it is.
        dtype: name of the element type.
        shape: extents.
        stream: the stream that writes the memory; a consumer's stream is made to wait for it.
    """

    def __init__(
        self, owner: Any, pointer: int, device: Device, dtype: str, shape: tuple[int, ...], stream: int = 0
    ) -> None:
        self.owner, self.pointer, self.device = owner, pointer, device
        self.dtype, self.shape, self.stream = dtype, shape, stream

    def __dlpack_device__(self) -> tuple[int, int]:
        return (DEVICE_CPU if self.device.kind == "cpu" else DEVICE_CUDA), self.device.index

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """A capsule; ``stream`` -1 asks for no order, None for the legacy default stream."""
        if copy or (dl_device is not None and tuple(map(int, dl_device)) != self.__dlpack_device__()):
            raise BufferError("exported as it lies only: no copy, no other device")
        if self.device.kind == "cuda" and stream != -1:
            streams.order(self.stream, stream or streams.DLPACK_LEGACY_DEFAULT, self.device)
        versioned = _NUMPY_HAS_VERSIONS and max_version is not None and max_version[0] >= VERSION[0]
        return make_capsule(self.owner, self.pointer, self.device, self.dtype, self.shape, versioned)


_NUMPY_HAS_VERSIONS = np.lib.NumpyVersion(np.__version__) >= "2.1.0"
