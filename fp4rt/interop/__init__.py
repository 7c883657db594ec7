"""Arrays of any library in, arrays of the same library out; no copy, no import of the library.

::

    user's array --view--> ArrayView (pointer, shape, strides, dtype, device) --> a backend
    a backend's memory --from_host, from_device--> array in the user's library
"""

from __future__ import annotations

from fp4rt.device import CPU, Device
from fp4rt.interop.arrays import ArrayView, dense_strides, same_device
from fp4rt.interop.readers import is_array, lasting, library_name, note_written, unchanged, view, wants_gradient
from fp4rt.interop.results import as_uint8, from_device, from_host
from fp4rt.interop.streams import enter_stream, hold, hold_foreign, order, stream_handle

__all__ = [
    "CPU",
    "ArrayView",
    "Device",
    "as_uint8",
    "dense_strides",
    "enter_stream",
    "from_device",
    "from_host",
    "hold",
    "hold_foreign",
    "is_array",
    "lasting",
    "library_name",
    "note_written",
    "order",
    "same_device",
    "stream_handle",
    "unchanged",
    "view",
    "wants_gradient",
]
