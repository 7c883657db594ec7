"""Reading DLPack capsules through ctypes: dlpack.h v1 (``dltensor_versioned``) and v0 (``dltensor``).

``__dlpack__`` is called with the consumer's stream and the newest version understood; the capsule is
renamed ``used_...`` at once, so that nobody consumes it again, and the tensor's deleter is called exactly once,
when the last view of it dies.
"""

from __future__ import annotations

import ctypes
from typing import Any

from fp4rt.device import CPU, Device
from fp4rt.errors import DeviceError, DtypeError, ShapeError
from fp4rt.interop import dtypes, streams
from fp4rt.interop.arrays import ArrayView, dense_strides

__all__ = ["Managed", "ManagedVersioned", "Tensor", "capsule_pointer", "consume", "read"]

VERSION = (1, 1)
NAME, VERSIONED_NAME = b"dltensor", b"dltensor_versioned"
USED_NAME, USED_VERSIONED_NAME = b"used_dltensor", b"used_dltensor_versioned"
FLAG_READ_ONLY = 1
FLAG_SUBBYTE_PADDED = 4
DEVICE_CPU, DEVICE_CUDA, DEVICE_CUDA_HOST, DEVICE_CUDA_MANAGED = 1, 2, 3, 13
CODE_FLOAT4 = 17
_HOST_READABLE = (DEVICE_CPU, DEVICE_CUDA_HOST)


class Tensor(ctypes.Structure):
    """DLTensor."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class Managed(ctypes.Structure):
    """DLManagedTensor."""

    _fields_ = [("tensor", Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class ManagedVersioned(ctypes.Structure):
    """DLManagedTensorVersioned."""

    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", Tensor),
    ]


Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def _pythonapi(name: str, result: Any, *arguments: Any) -> Any:
    """A function of Python's C API, called with the interpreter lock held."""
    prototype = ctypes.PYFUNCTYPE(result, *arguments)
    return prototype((name, ctypes.pythonapi))


_is_valid = _pythonapi("PyCapsule_IsValid", ctypes.c_int, ctypes.py_object, ctypes.c_char_p)
capsule_pointer = _pythonapi("PyCapsule_GetPointer", ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)
_set_name = _pythonapi("PyCapsule_SetName", ctypes.c_int, ctypes.py_object, ctypes.c_char_p)


class ConsumedTensor:
    """A managed tensor that we own now; its deleter runs once, when this dies."""

    __slots__ = ("address", "deleter")

    def __init__(self, address: int, deleter: int) -> None:
        self.address = address
        self.deleter = deleter

    def __del__(self, call: Any = Deleter) -> None:  # bound here: module globals may be gone at exit
        deleter, self.deleter = self.deleter, 0
        if deleter:
            call(deleter)(self.address)


def read(x: Any, name: str, stream: Any) -> ArrayView:
    """See an object with ``__dlpack__`` and ``__dlpack_device__``; ``stream`` is the consumer's.

    Raises:
        DtypeError: the producer refuses to export, or the type is not one that can be read.
        DeviceError: neither host memory nor a CUDA device.
    """
    device_type, index = x.__dlpack_device__()
    device = _device(int(device_type), int(index), name)
    wanted: dict[str, Any] = {}
    if device.kind == "cuda":
        target = ArrayView(x, "dlpack", device, "uint8", (0,), (1,), 0, name=name)
        if type(x).__module__.split(".")[0] in ("jax", "jaxlib"):
            target.library = "jax"
        wanted["stream"] = streams.to_dlpack_stream(streams.stream_handle(stream, target))
    try:
        try:
            capsule = x.__dlpack__(max_version=VERSION, **wanted)
        except TypeError:  # a producer older than the keyword
            capsule = x.__dlpack__(**wanted)
    except BufferError as error:
        raise DtypeError(f"{name} cannot be exported through DLPack: {error}") from error
    return consume(capsule, name)


def consume(capsule: Any, name: str) -> ArrayView:
    """Take the tensor out of a capsule; the capsule is spent.

    Raises:
        DtypeError: no DLPack capsule, a spent one, or a type or version that cannot be read.
        DeviceError: neither host memory nor a CUDA device.
    """
    flags = 0
    if _is_capsule(capsule, VERSIONED_NAME):
        address = capsule_pointer(capsule, VERSIONED_NAME)
        _set_name(capsule, USED_VERSIONED_NAME)
        versioned = ManagedVersioned.from_address(address)
        owner = ConsumedTensor(address, versioned.deleter or 0)
        if versioned.major != VERSION[0]:
            raise DtypeError(
                f"{name} comes as DLPack {versioned.major}.{versioned.minor}; understood is {VERSION[0]}.x"
            )
        flags, tensor = versioned.flags, versioned.tensor
    elif _is_capsule(capsule, NAME):
        address = capsule_pointer(capsule, NAME)
        _set_name(capsule, USED_NAME)
        managed = Managed.from_address(address)
        owner = ConsumedTensor(address, managed.deleter or 0)
        tensor = managed.tensor
    elif _is_capsule(capsule, USED_NAME) or _is_capsule(capsule, USED_VERSIONED_NAME):
        raise DtypeError(f"{name} is a DLPack capsule that was consumed before; a capsule serves once: export again")
    else:
        raise DtypeError(f"{name} gave {capsule!r}, which is no DLPack capsule")
    return _view(owner, tensor, flags, name)


def _is_capsule(capsule: Any, wanted: bytes) -> bool:
    return type(capsule).__name__ == "PyCapsule" and bool(_is_valid(capsule, wanted))


def _device(device_type: int, index: int, name: str) -> Device:
    if device_type in _HOST_READABLE:
        return CPU
    if device_type in (DEVICE_CUDA, DEVICE_CUDA_MANAGED):
        return Device("cuda", index)
    raise DeviceError(f"{name} is on DLPack device type {device_type}; wanted the host or a CUDA device")


def _view(owner: ConsumedTensor, tensor: Tensor, flags: int, name: str) -> ArrayView:
    device = _device(tensor.device_type, tensor.device_id, name)
    shape = tuple(tensor.shape[axis] for axis in range(tensor.ndim))
    strides = tuple(tensor.strides[axis] for axis in range(tensor.ndim)) if tensor.strides else dense_strides(shape)
    code, bits, lanes = tensor.code, tensor.bits, tensor.lanes
    if (code, bits, lanes) == (CODE_FLOAT4, 4, 1) and not flags & FLAG_SUBBYTE_PADDED:
        shape, strides, lanes = _pair_codes(shape, strides, name)
    pointer = (tensor.data or 0) + tensor.byte_offset
    if not tensor.data and 0 not in shape:
        raise ShapeError(f"{name} has shape {shape} but no memory behind it (a null pointer)")
    return ArrayView(
        owner,
        "dlpack",
        device,
        dtypes.dtype_name(code, bits, lanes),
        shape,
        strides,
        pointer,
        readonly=bool(flags & FLAG_READ_ONLY),
        name=name,
        foreign=device.kind == "cuda",
    )


def _pair_codes(
    shape: tuple[int, ...], strides: tuple[int, ...], name: str
) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Packed 4-bit elements, counted singly, as bytes of two codes: the last extent is halved."""
    if not shape or shape[-1] % 2 or strides[-1] != 1 or any(stride % 2 for stride in strides[:-1]):
        raise ShapeError(
            f"{name} holds packed 4-bit codes of shape {shape}, strides {strides}; rows must fill whole bytes"
        )
    return (*shape[:-1], shape[-1] // 2), (*(stride // 2 for stride in strides[:-1]), 1), 2
