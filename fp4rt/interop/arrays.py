"""What any library's array is to a backend: a pointer, a shape, strides, a dtype and a device.

``view`` reads an array without copying and without importing its library. torch and CuPy are asked for pointer
and shape directly: a DLPack round trip costs several launches of a kernel. JAX on the host is read through
NumPy; everything else through ``__dlpack__`` or ``__cuda_array_interface__``.

Stream order. ``stream`` is the consumer's stream, the one that the caller will launch on. A producer that speaks
DLPack is handed it; for torch and CuPy, whose work is on their own current stream, the consumer's stream is made
to wait for that one where the two differ. Nothing waits on the host.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from fp4rt.device import CPU, Device
from fp4rt.errors import DeviceError, DtypeError, ShapeError
from fp4rt.interop import dtypes

__all__ = ["ArrayView", "dense_strides", "same_device", "view"]


def dense_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides, in elements, of a dense array."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return tuple(strides)


class ArrayView:
    """An array seen without its library. It keeps the memory alive; it does not own it.

    Attributes:
        owner: what keeps the memory alive (the array itself, or a consumed DLPack tensor).
        library: "numpy", "torch", "jax", "cupy" or "dlpack"; the library that results go back to.
        device: where the memory is.
        dtype: name of the element type, e.g. "bfloat16".
        shape: extents.
        strides: in elements, any sign.
        pointer: address of element (0, 0, ...); 0 where the array has no elements.
        readonly: the library forbids writing.
        name: what the caller calls it, for errors.
        foreign: device memory that its library may reuse without regard to the stream that we launch on; see
            :func:`fp4rt.interop.hold`.
    """

    __slots__ = ("device", "dtype", "foreign", "library", "name", "owner", "pointer", "readonly", "shape", "strides")

    def __init__(
        self,
        owner: Any,
        library: str,
        device: Device,
        dtype: str,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        pointer: int,
        readonly: bool = False,
        name: str = "x",
        foreign: bool = False,
    ) -> None:
        self.owner = owner
        self.library = library
        self.device = device
        self.dtype = dtype
        self.shape = shape
        self.strides = strides
        self.pointer = pointer
        self.readonly = readonly
        self.name = name
        self.foreign = foreign

    def __repr__(self) -> str:
        mode = ", read-only" if self.readonly else ""
        return f"<{self.name}: {self.library} {self.dtype}{list(self.shape)} on {self.device}{mode}>"

    @property
    def size(self) -> int:
        """Number of elements."""
        size = 1
        for extent in self.shape:
            size *= extent
        return size

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return dtypes.itemsize(self.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements, without gaps between them."""
        return self.size * dtypes.itemsize(self.dtype)

    @property
    def contiguous(self) -> bool:
        """Whether the elements are dense and row-major; the stride of an extent of 1 does not count."""
        expected = 1
        for extent, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if extent == 0:
                return True
            if extent != 1 and stride != expected:
                return False
            expected *= extent
        return True

    def bits(self) -> np.ndarray:
        """The elements of a host array as unsigned integers of the same size: same memory, strides and mode.

        Raises:
            DeviceError: the array is not on the host.
        """
        if self.device.kind != "cpu":
            raise DeviceError(f"{self.name} is on {self.device}; its bits cannot be read on the host without a copy")
        if isinstance(self.owner, np.ndarray):
            array = self.owner.view(np.ndarray)
            if array.itemsize == self.itemsize and array.shape == self.shape:
                return _reinterpret(array)
        size = self.itemsize
        if self.size == 0:
            return np.empty(self.shape, dtypes.unsigned(size))
        return np.asarray(_Interface(self, size))


class _Interface:
    """NumPy array interface over a host view; the array that NumPy makes keeps it, and so the owner, alive."""

    __slots__ = ("__array_interface__", "view")

    def __init__(self, view: ArrayView, size: int) -> None:
        self.view = view
        self.__array_interface__ = {
            "version": 3,
            "shape": view.shape,
            "typestr": dtypes.unsigned(size).str,
            "data": (view.pointer, view.readonly),
            "strides": tuple(stride * size for stride in view.strides),
        }


def _reinterpret(array: np.ndarray) -> np.ndarray:
    """Unsigned view of an ndarray of any strides (``ndarray.view`` keeps them where the item size is kept)."""
    return array.view(dtypes.unsigned(array.itemsize))


def same_device(*views: ArrayView) -> Device:
    """The device that all views share.

    Raises:
        DeviceError: two of them are on different devices.
    """
    first = views[0]
    for other in views[1:]:
        if other.device != first.device:
            raise DeviceError(
                f"{first.name} is on {first.device} but {other.name} is on {other.device}; "
                "nothing is moved between devices unasked: move one of them first"
            )
    return first.device


def _numpy_reader(x: np.ndarray, name: str, stream: Any) -> ArrayView:
    del stream
    if isinstance(x, np.ma.MaskedArray):
        raise DtypeError(f"{name} is a masked array and its mask would be lost; pass {name}.filled(value)")
    dtype, size = x.dtype, x.itemsize
    if not dtype.isnative or dtype.hasobject or dtype.names is not None:
        raise DtypeError(f"{name} has dtype {dtype}; wanted a plain dtype in native byte order")
    pointer, readonly = x.__array_interface__["data"]  # a third of the cost of x.ctypes
    strides = _element_strides(x.strides, size, name)
    return ArrayView(x, "numpy", CPU, _numpy_dtype_name(dtype), x.shape, strides, pointer, readonly, name)


@lru_cache(maxsize=64)
def _numpy_dtype_name(dtype: np.dtype[Any]) -> str:
    return dtype.name


def _element_strides(byte_strides: tuple[int, ...], size: int, name: str) -> tuple[int, ...]:
    for stride in byte_strides:
        if stride % size:
            raise ShapeError(f"{name} has byte strides {byte_strides}, not whole elements of {size} bytes; pass a copy")
    return tuple([stride // size for stride in byte_strides])


def _torch_reader(x: Any, name: str, stream: Any) -> ArrayView:
    device = _torch_device(x.device, name)
    if x.is_neg() or x.is_conj():
        raise DtypeError(f"{name} has a pending negation or conjugation; pass {name}.resolve_neg().resolve_conj()")
    try:
        view = ArrayView(x, "torch", device, _torch_dtype(x.dtype), x.shape, x.stride(), x.data_ptr(), False, name)
    except RuntimeError as error:
        raise DtypeError(
            f"{name} is a torch tensor without memory of its own (sparse, fake or meta): {error}"
        ) from None
    if stream is not None and device.kind == "cuda":
        _wait_for_library(view, stream)
    return view


_torch_devices: dict[Any, Device] = {}
_torch_dtypes: dict[Any, str] = {}


def _torch_device(device: Any, name: str) -> Device:
    found = _torch_devices.get(device)
    if found is None:
        if device.type not in ("cpu", "cuda"):
            raise DeviceError(f"{name} is on {device}; wanted cpu or cuda")
        found = _torch_devices[device] = Device(device.type, device.index or 0)
    return found


def _torch_dtype(dtype: Any) -> str:
    found = _torch_dtypes.get(dtype)
    if found is None:
        found = _torch_dtypes[dtype] = str(dtype).removeprefix("torch.")
    return found


def _jax_reader(x: Any, name: str, stream: Any) -> ArrayView:
    jax = sys.modules["jax"]
    if isinstance(x, jax.core.Tracer):
        raise DtypeError(f"{name} is being traced by JAX and has no memory yet; inside jit use fp4rt.jax")
    devices = x.devices()
    if len(devices) != 1:
        raise DeviceError(f"{name} is sharded over {len(devices)} devices; wanted one: pass one shard at a time")
    (device,) = devices
    if device.platform == "cpu":
        host = np.asarray(x)  # waits for the value; the same memory
        view = _numpy_reader(host, name, None)
        view.library, view.readonly = "jax", True
        return view
    view = _dlpack_reader(x, name, stream)
    view.library, view.readonly = "jax", True
    return view


def _cupy_reader(x: Any, name: str, stream: Any) -> ArrayView:
    strides = _element_strides(x.strides, x.itemsize, name)
    memory = x.data
    device = Device("cuda", memory.device_id)
    view = ArrayView(x, "cupy", device, _numpy_dtype_name(x.dtype), x.shape, strides, memory.ptr, False, name)
    if stream is not None:
        _wait_for_library(view, stream)
    return view


def _dlpack_reader(x: Any, name: str, stream: Any) -> ArrayView:
    from fp4rt.interop import dlpack

    return dlpack.read(x, name, stream)


def _capsule_reader(x: Any, name: str, stream: Any) -> ArrayView:
    from fp4rt.interop import dlpack

    del stream
    return dlpack.consume(x, name)


def _interface_reader(x: Any, name: str, stream: Any) -> ArrayView:
    from fp4rt.interop import cuda_array_interface

    return cuda_array_interface.read(x, name, stream)


def _wait_for_library(view: ArrayView, stream: Any) -> None:
    """Make ``stream`` wait for what the array's own library has enqueued on its current stream."""
    from fp4rt.interop import streams

    consumer = streams.stream_handle(stream, view)
    producer = streams.stream_handle(None, view)
    if streams.order(producer, consumer, view.device):
        view.foreign = True


Reader = Callable[[Any, str, Any], ArrayView]
_readers: dict[type, Reader] = {np.ndarray: _numpy_reader}


def _find_reader(kind: type) -> Reader | None:
    """The reader of a type, by the library that its class comes from. Types, unlike arrays, are few: cached."""
    if issubclass(kind, (np.ndarray, np.generic)):
        return _numpy_reader if issubclass(kind, np.ndarray) else _scalar_reader
    torch, jax, cupy = (sys.modules.get(library) for library in ("torch", "jax", "cupy"))
    if torch is not None and issubclass(kind, torch.Tensor):
        return _torch_reader
    if jax is not None and (issubclass(kind, jax.Array) or issubclass(kind, jax.core.Tracer)):
        return _jax_reader
    if cupy is not None and issubclass(kind, cupy.ndarray):
        return _cupy_reader
    if kind.__name__ == "PyCapsule":
        return _capsule_reader
    if hasattr(kind, "__dlpack__") and hasattr(kind, "__dlpack_device__"):
        return _dlpack_reader
    if hasattr(kind, "__cuda_array_interface__"):
        return _interface_reader
    return None


def _scalar_reader(x: np.generic, name: str, stream: Any) -> ArrayView:
    return _numpy_reader(np.asarray(x), name, stream)


def view(x: Any, name: str = "x", stream: Any = None) -> ArrayView:
    """See any array as an :class:`ArrayView`, without a copy.

    Args:
        x: an array of NumPy, PyTorch, JAX or CuPy, an object with ``__dlpack__`` or
            ``__cuda_array_interface__``, or a DLPack capsule.
        name: what to call it in errors.
        stream: the stream that the memory will be used on; None: the current stream of the array's library.

    Raises:
        DtypeError: not an array, or not one whose elements can be read as they are.
        DeviceError: the array lives on a device that is neither a CPU nor a CUDA device, or on several.
        ShapeError: strides that are not whole elements.
    """
    kind = type(x)
    reader = _readers.get(kind)
    if reader is None:
        reader = _find_reader(kind)
        if reader is None and hasattr(x, "__cuda_array_interface__"):  # set on the instance, as some wrappers do
            return _interface_reader(x, name, stream)
        if reader is None:
            raise DtypeError(
                f"{name} is a {kind.__module__}.{kind.__qualname__}, not an array; wanted NumPy, PyTorch, JAX, CuPy, "
                "or an object with __dlpack__ or __cuda_array_interface__"
            )
        _readers[kind] = reader
    return reader(x, name, stream)
