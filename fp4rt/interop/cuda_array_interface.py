"""Reading ``__cuda_array_interface__`` (Numba's protocol, versions 0 to 3)."""

from __future__ import annotations

from typing import Any

import numpy as np

from fp4rt.device import Device
from fp4rt.errors import DtypeError, ShapeError
from fp4rt.interop import streams
from fp4rt.interop.arrays import ArrayView, dense_strides

__all__ = ["read"]


def read(x: Any, name: str, stream: Any) -> ArrayView:
    """See an object with ``__cuda_array_interface__``; its ``stream`` entry is waited for on the device.

    Raises:
        DtypeError: a structured or foreign-endian type, or a mask.
        ShapeError: strides that are not whole elements.
    """
    interface = x.__cuda_array_interface__
    dtype = np.dtype(interface["typestr"])
    if interface.get("mask") is not None:
        raise DtypeError(f"{name} has a mask in __cuda_array_interface__, which would be lost; pass the filled array")
    if not dtype.isnative or dtype.kind not in "biufc":
        raise DtypeError(f"{name} has typestr {interface['typestr']!r}; wanted a plain number in native byte order")
    shape = tuple(int(extent) for extent in interface["shape"])
    byte_strides = interface.get("strides")
    strides = dense_strides(shape)
    if byte_strides is not None:
        if any(stride % dtype.itemsize for stride in byte_strides):
            raise ShapeError(f"{name} has byte strides {byte_strides}, not whole elements of {dtype.itemsize} bytes")
        strides = tuple(int(stride) // dtype.itemsize for stride in byte_strides)
    pointer, readonly = interface["data"]
    device = Device("cuda", _device_index(x))
    view = ArrayView(x, "dlpack", device, dtype.name, shape, strides, int(pointer or 0), bool(readonly), name, True)
    producer = interface.get("stream")
    if producer is not None:
        if producer == 0:
            raise DtypeError(
                f"{name} gives stream 0 in __cuda_array_interface__, which the protocol forbids as ambiguous"
            )
        streams.order(int(producer), streams.stream_handle(stream, view), device)
    return view


def _device_index(x: Any) -> int:
    """The device of the object where it says it; the protocol itself does not."""
    for attribute in ("device", "device_id"):
        device = getattr(x, attribute, None)
        for candidate in (device, getattr(device, "id", None), getattr(device, "index", None)):
            if isinstance(candidate, int) and not isinstance(candidate, bool):
                return candidate
    return 0
