"""``QuantizedTensor``: codes, block scales and global scale of one matrix, and how they lie."""

from __future__ import annotations

import threading
from typing import Any

from fp4rt import interop
from fp4rt.backend import QuantizedViews
from fp4rt.errors import DtypeError, ShapeError
from fp4rt.layout import block_columns, data_shape, get_layout
from fp4rt.tensor_checks import check_bytes, check_matrix_shape, check_one_float, check_padded_n, check_parts

__all__ = ["DATA_DTYPES", "SCALE_DTYPES", "QuantizedTensor"]

# Bytes are reinterpreted, never converted: a float8 array is taken for its bytes.
DATA_DTYPES = ("uint8", "int8", "float4_e2m1fn_x2")
SCALE_DTYPES = ("uint8", "int8", "float8_e4m3fn")


class QuantizedTensor:
    """An NVFP4 matrix (m, n), frozen.

    Attributes:
        data: uint8 (m, padded_n / 2), two e2m1 codes a byte, the even column in the low nibble.
        scales: uint8, one e4m3 byte a block of 16 columns, in the shape that ``layout`` gives.
        global_scale: fp32 (1,), the encode scale: value = code * scale / global_scale.
        shape: (m, n).
        layout: "linear", "128x4" or "8x4".
        padded_n: columns in memory, a multiple of 16.
    """

    __slots__ = (
        "__weakref__",
        "_checked_out",
        "_memory",
        "_unchecked",
        "_views",
        "data",
        "global_scale",
        "layout",
        "padded_n",
        "scales",
        "shape",
    )

    data: Any
    scales: Any
    global_scale: Any
    shape: tuple[int, int]
    layout: str
    padded_n: int
    _unchecked: bool  # JAX has put it together: nobody has looked whether its arrays agree
    _memory: QuantizedViews | None  # of a pool, where no array has been asked for yet
    _views: QuantizedViews | None  # what views() gave last
    _checked_out: QuantizedViews | None  # the views that a call has found fit to be written to

    def __init__(
        self,
        data: Any,
        scales: Any,
        global_scale: Any,
        shape: tuple[int, int],
        layout: str,
        padded_n: int | None = None,
    ) -> None:
        """Wrap arrays that exist already; nothing is copied or converted.

        Args:
            data: uint8, int8 or float4_e2m1fn_x2 (m, padded_n / 2), C-contiguous.
            scales: uint8, int8 or float8_e4m3fn in the layout's shape, C-contiguous.
            global_scale: fp32, one element.
            shape: (m, n).
            layout: a scale layout's name.
            padded_n: columns in memory; n where it is None.

        Raises:
            ShapeError: sizes do not agree, or an array is not C-contiguous.
            DtypeError: an array has another dtype.
            LayoutError: the layout is unknown.
            DeviceError: the arrays live on different devices.
        """
        m, n = check_matrix_shape(shape, "QuantizedTensor needs shape")
        padded_n = check_padded_n("QuantizedTensor", (m, n), padded_n, "shape")
        known = get_layout(layout)
        views = (interop.view(data, "data"), interop.view(scales, "scales"), interop.view(global_scale, "global_scale"))
        interop.same_device(*views)
        check_bytes("QuantizedTensor", "data", views[0], DATA_DTYPES, data_shape(m, padded_n))
        check_bytes("QuantizedTensor", "scales", views[1], SCALE_DTYPES, known.shape(m, block_columns(padded_n)))
        check_one_float("QuantizedTensor", "global_scale", views[2])
        _set(self, "data", interop.as_uint8(data))
        _set(self, "scales", interop.as_uint8(scales))
        if views[2].shape != (1,):
            if not hasattr(global_scale, "reshape"):
                raise ShapeError(
                    f"QuantizedTensor needs a global_scale known only by DLPack with shape (1,), got {views[2].shape}"
                )
            global_scale = global_scale.reshape(1)
        _set(self, "global_scale", global_scale)
        _set(self, "shape", (m, n))
        _set(self, "layout", known.name)
        _set(self, "padded_n", padded_n)
        _set(self, "_memory", None)
        _set(self, "_views", None)
        _set(self, "_checked_out", None)
        _set(self, "_unchecked", False)

    @classmethod
    def trusted(
        cls, data: Any, scales: Any, global_scale: Any, shape: tuple[int, int], layout: str, padded_n: int
    ) -> QuantizedTensor:
        """The same without any check: for a backend that made the arrays itself."""
        self = object.__new__(cls)
        _set(self, "data", data)
        _set(self, "scales", scales)
        _set(self, "global_scale", global_scale)
        _set(self, "shape", shape)
        _set(self, "layout", layout)
        _set(self, "padded_n", padded_n)
        _set(self, "_memory", None)
        _set(self, "_views", None)
        _set(self, "_checked_out", None)
        _set(self, "_unchecked", False)
        return self

    @classmethod
    def unchecked(cls, *parts: Any) -> QuantizedTensor:
        """:meth:`trusted`, but looked at where it is used: for JAX, which puts anything into a pytree."""
        self = cls.trusted(*parts)
        _set(self, "_unchecked", True)
        return self

    @classmethod
    def in_memory(cls, views: QuantizedViews) -> QuantizedTensor:
        """The same over memory of a pool: its arrays, which cost more than a launch, are made when asked for.

        Args:
            views: their owners are pool buffers, their library the one that the arrays will be of.
        """
        self = object.__new__(cls)
        _set(self, "shape", views.shape)
        _set(self, "layout", views.layout.name)
        _set(self, "padded_n", views.padded_n)
        _set(self, "_memory", views)
        _set(self, "_views", None)
        _set(self, "_checked_out", None)
        _set(self, "_unchecked", False)
        return self

    def __getattr__(self, name: str) -> Any:
        """An array that is not there yet: all three are made."""
        if name not in _ARRAYS:
            raise AttributeError(f"QuantizedTensor has no attribute {name!r}")
        with _making:
            if self._memory is not None:
                for array, view in zip(_ARRAYS, self._memory[:3], strict=True):
                    _set(self, array, interop.from_device(view.owner, view.shape, view.dtype, view.library))
                _set(self, "_memory", None)
        return object.__getattribute__(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"QuantizedTensor is frozen; make a new one instead of setting {name!r}")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"QuantizedTensor is frozen; {name!r} cannot be deleted")

    def __reduce__(self) -> tuple[Any, ...]:
        arguments = (self.data, self.scales, self.global_scale, self.shape, self.layout, self.padded_n)
        return QuantizedTensor.unchecked if self._unchecked else QuantizedTensor, arguments

    def __repr__(self) -> str:
        padding = f", padded_n={self.padded_n}" if self.padded_n != self.shape[1] else ""
        library = interop.library_name(self.data)
        return f"QuantizedTensor(shape={self.shape}, layout={self.layout!r}{padding}, {library})"

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise DtypeError(
            "a QuantizedTensor is no array: NumPy has no dtype for its codes; call .dequantize() for floats"
        )

    @property
    def nbytes(self) -> int:
        """Bytes of data, scales (padding included) and global scale.

        Raises:
            ShapeError, DtypeError: the arrays are not those of such a tensor, but of several, say.
        """
        if self._unchecked:
            self.check_parts()
        m, _ = self.shape
        rows, row_bytes = data_shape(m, self.padded_n)
        return rows * row_bytes + get_layout(self.layout).nbytes(m, block_columns(self.padded_n)) + 4

    def views(self, stream: Any = None) -> QuantizedViews:
        """The arrays as backends take them; the same object again as long as nothing about them has changed.

        Raises:
            ShapeError, DtypeError: the arrays are not those of such a tensor, but of several, say.
        """
        known = self._memory
        if known is not None and (stream is None or stream == interop.stream_handle(None, known.data)):
            return known
        known = self._views
        if known is not None and interop.unchanged(known[:3], stream):
            return known
        views = QuantizedViews(
            interop.view(self.data, "data", stream),
            interop.view(self.scales, "scales", stream),
            interop.view(self.global_scale, "global_scale", stream),
            self.shape,
            get_layout(self.layout),
            self.padded_n,
        )
        if self._unchecked:
            self.check_parts(views[:3])
        _set(self, "_views", views if interop.lasting(views[:3]) else None)
        return views

    def check_parts(self, parts: tuple[Any, Any, Any] | None = None) -> None:
        """Refuse arrays that are not those of one tensor of this shape.

        Args:
            parts: the tensor's own arrays where None, of which tracers may take the place; or views of them.

        Raises:
            ShapeError, DtypeError: as said.
        """
        parts = parts or (self.data, self.scales, self.global_scale)
        m, padded_n = self.shape[0], self.padded_n
        scales = get_layout(self.layout).shape(m, block_columns(padded_n))
        wanted = (data_shape(m, padded_n), "uint8"), (scales, "uint8"), ((1,), "float32")
        check_parts(self, zip(_ARRAYS, parts, wanted, strict=True))

    @property
    def remembered_library(self) -> str | None:
        """The library of all its arrays, where :meth:`views` has them still; else None."""
        views = self._memory or self._views
        return None if views is None else views.data.library

    def is_checked_out(self, views: QuantizedViews) -> bool:
        """Whether :meth:`remember_checked_out` has been told of these very views."""
        return views is self._checked_out

    def remember_checked_out(self, views: QuantizedViews) -> None:
        """These views have been found fit to be written to."""
        _set(self, "_checked_out", views)

    def dequantize(self, dtype: Any = "float32", *, out: Any = None, stream: Any = None) -> Any:
        """(m, n) array in ``dtype``: see :func:`fp4rt.dequantize`."""
        from fp4rt import api  # the one upward import: methods are spellings of the public functions

        return api.dequantize(self, dtype, out=out, stream=stream)

    def relayout(self, layout: str, *, out: QuantizedTensor | None = None, stream: Any = None) -> QuantizedTensor:
        """The same tensor with its scales in ``layout``: see :func:`fp4rt.relayout`."""
        from fp4rt import api

        return api.relayout(self, layout, out=out, stream=stream)


_set = object.__setattr__
_ARRAYS = ("data", "scales", "global_scale")
_making = threading.RLock()  # reentrant: a collector may run Python that asks for another tensor's arrays
