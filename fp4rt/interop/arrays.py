"""What any library's array is to a backend: a pointer, a shape, strides, a dtype and a device."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, ClassVar

import numpy as np

from fp4rt.device import Device
from fp4rt.errors import DeviceError
from fp4rt.interop import dtypes

__all__ = ["ArrayView", "dense_strides", "same_device"]


@lru_cache(maxsize=4096)  # programs have few shapes
def dense_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides, in elements, of a dense array."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return tuple(strides)


@lru_cache(maxsize=4096)
def _reach(shape: tuple[int, ...], strides: tuple[int, ...], dtype: str) -> tuple[int, int]:
    """Bytes from the first element's address to the first byte and behind the last one; (0, 0) without elements."""
    low = high = 0
    for extent, stride in zip(shape, strides, strict=True):
        if extent == 0:
            return 0, 0
        if stride >= 0:
            high += (extent - 1) * stride
        else:
            low += (extent - 1) * stride
    itemsize = dtypes.itemsize(dtype)
    return low * itemsize, (high + 1) * itemsize


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

    any_foreign: ClassVar[bool] = False  # whether this process has ever seen a foreign one: most never do

    __slots__ = (
        "_span",
        "device",
        "dtype",
        "foreign",
        "library",
        "name",
        "owner",
        "pointer",
        "readonly",
        "shape",
        "strides",
    )

    _span: tuple[int, int] | None

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
        self._span = None
        if foreign:
            ArrayView.any_foreign = True

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
    def span(self) -> tuple[int, int]:
        """Addresses of its first byte and of the one behind its last, gaps included; (0, 0) without elements."""
        span = self._span
        if span is None:
            low, high = _reach(self.shape, self.strides, self.dtype)
            span = self._span = (self.pointer + low, self.pointer + high) if high > low else (0, 0)
        return span

    @property
    def contiguous(self) -> bool:
        """Whether the elements are dense and row-major; the stride of an extent of 1 does not count."""
        if self.strides == dense_strides(self.shape):
            return True
        expected = 1
        for extent, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if extent != 1 and stride != expected:
                return 0 in self.shape
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
