"""``view``: any library's array, read without a copy and without importing its library.

torch and CuPy are asked for pointer and shape directly: a DLPack round trip costs several launches of a kernel. JAX
on the host is read through NumPy; everything else through ``__dlpack__`` or ``__cuda_array_interface__``.

Stream order. ``stream`` is the consumer's stream, the one that the caller will launch on. A producer that speaks
DLPack is handed it; for torch and CuPy, whose work is on their own current stream, the consumer's stream is made to
wait for that one where the two differ. Nothing waits on the host.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from fp4rt.device import CPU, Device
from fp4rt.errors import DeviceError, DtypeError, ShapeError
from fp4rt.interop import cuda_array_interface, dlpack, streams
from fp4rt.interop.arrays import ArrayView

__all__ = ["is_array", "lasting", "library_name", "note_written", "unchanged", "view", "wants_gradient"]


def _numpy_reader(x: np.ndarray, name: str, stream: Any) -> ArrayView:
    if isinstance(x, np.ma.MaskedArray):
        raise DtypeError(f"{name} is a masked array and its mask would be lost; pass {name}.filled(value)")
    dtype = x.dtype
    if not dtype.isnative or dtype.hasobject or dtype.names is not None:
        remedy = "" if dtype.isnative else f"; pass {name}.astype({name}.dtype.newbyteorder('='))"
        raise DtypeError(f"{name} has dtype {dtype}; wanted a plain dtype in native byte order{remedy}")
    pointer, readonly = x.__array_interface__["data"]  # a third of the cost of x.ctypes
    dtype_name, strides = _dtype_and_strides(dtype, x.shape, x.strides, name)
    return ArrayView(x, "numpy", CPU, dtype_name, x.shape, strides, pointer, readonly, name)


@lru_cache(maxsize=4096)  # programs have few shapes, and a call sees several arrays
def _dtype_and_strides(
    dtype: np.dtype[Any], shape: tuple[int, ...], byte_strides: tuple[int, ...], name: str
) -> tuple[str, tuple[int, ...]]:
    """The dtype's name, and the strides in elements; one that leads nowhere may be anything."""
    size = dtype.itemsize
    for extent, stride in zip(shape, byte_strides, strict=True):
        if stride % size and extent > 1 and 0 not in shape:
            raise ShapeError(f"{name} has byte strides {byte_strides}, not whole elements of {size} bytes; pass a copy")
    return dtype.name, tuple([stride // size for stride in byte_strides])


def _torch_reader(x: Any, name: str, stream: Any) -> ArrayView:
    device = _torch_devices.get(x.device) or _torch_device(x.device, name)
    if x.is_neg():  # a pending conjugation has only a complex tensor, whose dtype is refused
        raise DtypeError(f"{name} has a pending negation, which its memory does not show; pass {name}.resolve_neg()")
    dtype = _torch_dtypes.get(x.dtype) or _torch_dtype(x.dtype)
    try:
        view = ArrayView(x, "torch", device, dtype, x.shape, x.stride(), x.data_ptr(), False, name)
    except RuntimeError as error:
        raise DtypeError(
            f"{name} is a torch tensor without memory of its own, sparse or traced; to trace, take fp4rt.torch: {error}"
        ) from None
    if stream is not None and device.kind == "cuda":
        _wait_for_library(view, stream)
    return view


def _wrapper_reader(x: Any, name: str, stream: Any) -> ArrayView:
    raise DtypeError(
        f"{name} is a {type(x).__qualname__}, a torch tensor without memory of its own; under torch.compile use the "
        "functions of fp4rt.torch"
    )


_torch_devices: dict[Any, Device] = {}
_torch_dtypes: dict[Any, str] = {}


def _torch_device(device: Any, name: str) -> Device:
    if device.type not in ("cpu", "cuda"):
        raise DeviceError(f"{name} is on {device}; wanted cpu or cuda")
    found = _torch_devices[device] = Device(device.type, device.index or 0)
    return found


def _torch_dtype(dtype: Any) -> str:
    found = _torch_dtypes[dtype] = str(dtype).removeprefix("torch.")
    return found


def _tracer_reader(x: Any, name: str, stream: Any) -> ArrayView:
    raise DtypeError(f"{name} is being traced by JAX and has no memory yet; inside jit use the functions of fp4rt.jax")


def _jax_reader(x: Any, name: str, stream: Any) -> ArrayView:
    devices = x.devices()
    if len(devices) != 1:
        raise DeviceError(f"{name} is sharded over {len(devices)} devices; wanted one: pass one shard at a time")
    (device,) = devices
    if device.platform == "cpu":
        host = np.asarray(x)  # waits for the value; the same memory
        view = _numpy_reader(host, name, None)
        view.library, view.readonly = "jax", True
        return view
    view = dlpack.read(x, name, stream)
    view.library, view.readonly = "jax", True
    return view


@lru_cache(maxsize=64)
def _cuda_device(index: int) -> Device:
    return Device("cuda", index)


def _cupy_reader(x: Any, name: str, stream: Any) -> ArrayView:
    dtype, strides = _dtype_and_strides(x.dtype, x.shape, x.strides, name)
    memory = x.data
    view = ArrayView(x, "cupy", _cuda_device(memory.device_id), dtype, x.shape, strides, memory.ptr, False, name)
    if stream is not None:
        _wait_for_library(view, stream)
    return view


def _capsule_reader(x: Any, name: str, stream: Any) -> ArrayView:
    return dlpack.consume(x, name)


def _wait_for_library(view: ArrayView, stream: Any) -> None:
    """Make ``stream`` wait for what the array's own library has enqueued on its current stream."""
    producer = streams.stream_handle(None, view)
    if producer == stream:
        return
    if streams.order(producer, streams.stream_handle(stream, view), view.device):
        view.foreign = ArrayView.any_foreign = True


def lasting(views: tuple[ArrayView, ...]) -> bool:
    """Whether views taken without a stream may serve later calls, each of them after :func:`unchanged`.

    So it is for memory of torch or of CuPy. A library that speaks DLPack must be asked each time; a NumPy array may
    become read-only.
    """
    library = views[0].library
    if library not in ("torch", "cupy"):
        return False
    for view in views:  # noqa: SIM110  all() over a generator costs as much as a view
        if view.library != library or view.foreign:
            return False
    return True


def wants_gradient(x: Any) -> bool:
    """Whether a PyTorch tensor records what is done to it, which writing to its memory would escape."""
    if not getattr(x, "requires_grad", False):
        return False
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor) and torch.is_grad_enabled()


def note_written(views: tuple[ArrayView, ...]) -> None:
    """Count a write in PyTorch's tensors among ``views``: a backward pass that has saved one of them then refuses.

    Memory of a pool that nobody has asked an array of is nobody's to save.
    """
    torch = sys.modules.get("torch")
    if torch is not None:
        for view in views:
            if isinstance(view.owner, torch.Tensor):
                torch.autograd.graph.increment_version(view.owner)


def unchanged(views: tuple[ArrayView, ...], stream: Any) -> bool:
    """Whether :func:`lasting` views serve a call on ``stream`` as they are.

    Their memory has not moved, and ``stream`` is their library's current one (or None): there is nothing to wait for.
    """
    first = views[0]
    if first.library == "torch":
        for view in views:
            if view.owner.data_ptr() != view.pointer:
                return False
    return stream is None or stream == streams.stream_handle(None, first)


def _view_reader(x: ArrayView, name: str, stream: Any) -> ArrayView:
    """A view is taken as it is: whoever made it has seen to its stream."""
    return x


Reader = Callable[[Any, str, Any], ArrayView]
_readers: dict[type, Reader] = {np.ndarray: _numpy_reader, ArrayView: _view_reader}


def _find_reader(kind: Any) -> Reader | None:
    """The reader of a type, by the library that its class comes from. Types, unlike arrays, are few: cached."""
    if issubclass(kind, (np.ndarray, np.generic)):
        return _numpy_reader if issubclass(kind, np.ndarray) else _scalar_reader
    torch, jax, cupy = (sys.modules.get(library) for library in ("torch", "jax", "cupy"))
    if torch is not None and issubclass(kind, torch.Tensor):
        takes_part = kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__  # fake, functional, quantized, ...
        return _wrapper_reader if takes_part else _torch_reader
    if jax is not None and issubclass(kind, jax.core.Tracer):
        return _tracer_reader
    if jax is not None and issubclass(kind, jax.Array):
        return _jax_reader
    if cupy is not None and issubclass(kind, cupy.ndarray):
        return _cupy_reader
    if kind.__name__ == "PyCapsule":
        return _capsule_reader
    if hasattr(kind, "__dlpack__") and hasattr(kind, "__dlpack_device__"):
        return dlpack.read
    if hasattr(kind, "__cuda_array_interface__"):
        return cuda_array_interface.read
    return None


def _scalar_reader(x: np.generic, name: str, stream: Any) -> ArrayView:
    return _numpy_reader(np.asarray(x), name, stream)


def library_name(x: Any) -> str:
    """The library that an array, or a tracer of one, is of, by the name that it is imported by."""
    name = type(x).__module__.partition(".")[0]
    return "jax" if name == "jaxlib" else name


def is_array(x: Any) -> bool:
    """Whether :func:`view` has a reader for ``x``, which may refuse it."""
    return type(x) in _readers or _find_reader(type(x)) is not None or hasattr(x, "__cuda_array_interface__")


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
            return cuda_array_interface.read(x, name, stream)
        if reader is None:
            raise DtypeError(
                f"{name} is a {kind.__module__}.{kind.__qualname__}, not an array; wanted NumPy, PyTorch, JAX, CuPy, "
                "or an object with __dlpack__ or __cuda_array_interface__"
            )
        _readers[kind] = reader
    return reader(x, name, stream)
