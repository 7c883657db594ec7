"""Handing dense memory out through DLPack.

One C deleter serves every exported tensor; what the tensor keeps alive stands in ``_exported`` under its address until
then. At interpreter exit the deleters of what still lives are replaced by a C function that does nothing: a C++ owner
that outlives Python must not call into it. (DLPack allows NULL there, but JAX calls it unseen.)
"""

from __future__ import annotations

import atexit
import ctypes
import struct
from functools import lru_cache
from typing import Any

from fp4rt.device import Device
from fp4rt.interop import dtypes, streams
from fp4rt.interop.arrays import dense_strides
from fp4rt.interop.dlpack import (
    DEVICE_CPU,
    DEVICE_CUDA,
    FLAG_READ_ONLY,
    NAME,
    VERSION,
    VERSIONED_NAME,
    Deleter,
    Managed,
    ManagedVersioned,
    pythonapi,
)

__all__ = ["Export", "hand_over", "make_capsule"]

_new_capsule = pythonapi("PyCapsule_New", ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
_keep_forever = pythonapi("Py_IncRef", None, ctypes.py_object)
# A capsule under destruction has no references left: as a py_object it would be revived and destroyed again.
_dying_is_valid = pythonapi("PyCapsule_IsValid", ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)
_dying_pointer = pythonapi("PyCapsule_GetPointer", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)

_TENSOR_FORMAT = "QiiiBBHQQQ"  # DLTensor, which has no gaps


def _plan(managed: Any, layout: str) -> tuple[int, Any, int]:
    packer = struct.Struct(layout)
    return packer.size, packer.pack_into, managed.deleter.offset


_LEGACY = _plan(Managed, f"={_TENSOR_FORMAT}QQ")
_VERSIONED = _plan(ManagedVersioned, f"=IIQQQ{_TENSOR_FORMAT}")
_address_of = ctypes.addressof


@lru_cache(maxsize=64)
def _memory_type(nbytes: int) -> Any:
    return ctypes.c_char * nbytes


@lru_cache(maxsize=1024)
def _extents(shape: tuple[int, ...]) -> bytes:
    """Shape and dense strides, one behind the other."""
    return struct.pack(f"={2 * len(shape)}q", *shape, *dense_strides(shape))


_exported: dict[int, tuple[Any, Any, int]] = {}  # address -> (the struct's memory, its owner, offset of the deleter)


def _forget(address: int) -> None:
    _exported.pop(address, None)


_release = Deleter(_forget)
_release_address = ctypes.cast(_release, ctypes.c_void_p).value or 0


def _destroy_unused(capsule: int) -> None:
    """Capsule destructor: a capsule that nobody consumed still owns its tensor."""
    for name in (NAME, VERSIONED_NAME):
        if _dying_is_valid(capsule, name):
            _forget(_dying_pointer(capsule, name))


_destructor = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(_destroy_unused)
_destructor_address = ctypes.cast(_destructor, ctypes.c_void_p).value or 0


def make_capsule(
    owner: Any,
    pointer: int,
    device: Device,
    dtype: str,
    shape: tuple[int, ...],
    *,
    versioned: bool = False,
    readonly: bool = False,
) -> Any:
    """A DLPack capsule over dense memory, which ``owner`` keeps alive until the consumer lets it go."""
    address = _make_tensor(owner, pointer, device, dtype, shape, versioned, readonly)
    return _new_capsule(address, VERSIONED_NAME if versioned else NAME, _destructor_address)


def hand_over(consume: Any, owner: Any, pointer: int, device: Device, dtype: str, shape: tuple[int, ...]) -> Any:
    """``consume(capsule)``: like :func:`make_capsule` for a consumer at hand, without the cost of a destructor."""
    address = _make_tensor(owner, pointer, device, dtype, shape, False, False)
    try:
        return consume(_new_capsule(address, NAME, None))
    except BaseException:
        _forget(address)
        raise


def _make_tensor(
    owner: Any,
    pointer: int,
    device: Device,
    dtype: str,
    shape: tuple[int, ...],
    versioned: bool,
    readonly: bool,
) -> int:
    """Address of a managed tensor, which lives in ``_exported`` until its deleter is called."""
    head, pack, deleter_offset = _VERSIONED if versioned else _LEGACY
    ndim = len(shape)
    memory = _memory_type(head + 16 * ndim)()
    address = _address_of(memory)
    tensor = (
        pointer,
        DEVICE_CPU if device.kind == "cpu" else DEVICE_CUDA,
        device.index,
        ndim,
        *dtypes.dlpack_type(dtype),
        address + head,
        address + head + 8 * ndim,
        0,
    )
    if versioned:
        pack(memory, 0, *VERSION, 0, _release_address, FLAG_READ_ONLY if readonly else 0, *tensor)
    else:
        pack(memory, 0, *tensor, 0, _release_address)
    memory[head:] = _extents(shape)
    _exported[address] = (memory, owner, deleter_offset)
    return address


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
        versioned = max_version is not None and max_version[0] >= VERSION[0]
        return make_capsule(self.owner, self.pointer, self.device, self.dtype, self.shape, versioned=versioned)


# Ignores its argument, touches no interpreter, and may be called after the end of it.
_nothing_address = ctypes.cast(ctypes.pythonapi.Py_IsInitialized, ctypes.c_void_p).value or 0


@atexit.register
def _disarm_deleters() -> None:
    for memory, _, deleter_offset in list(_exported.values()):
        struct.pack_into("=Q", memory, deleter_offset, _nothing_address)
        _keep_forever(memory)  # whoever holds the tensor still reads the struct after our teardown
