"""Memory of outputs under test: poisoned as a whole, read back as a whole, with guard bands where it is ours.

::

    guard band | first element ... gaps of a strided array ... last element | guard band
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from fp4rt import interop
from fp4rt.errors import DeviceError, DtypeError, ShapeError
from fp4rt.interop import ArrayView
from fp4rt.pool import PaddedPool, Upstream

__all__ = ["GUARD_BYTES", "GuardedTwin", "InPlace", "OutputMemory"]

GUARD_BYTES = 4096  # on either side; a multiple of every alignment that a kernel may ask for


def require_writable(view: ArrayView) -> None:
    """An output must be one that its library lets be written.

    Raises:
        DtypeError: it is a JAX array.
        ShapeError: it is read-only.
    """
    if view.library == "jax":
        raise DtypeError(
            f"{view.name}: JAX arrays cannot be written; check the call's allocations instead (outputs=None)"
        )
    if view.readonly:
        raise ShapeError(f"{view.name} is read-only, so nothing can write it; pass a writable array")


class OutputMemory:
    """What the checker needs of an output: the array to hand over, poisoning, and the bytes afterwards."""

    array: Any
    guarded: bool

    def __init__(self, view: ArrayView) -> None:
        require_writable(view)
        self.nbytes = view.nbytes
        self.row_bytes = max(view.shape[-1] if view.shape else 1, 1) * view.itemsize

    def poison(self, byte: int) -> None:
        """Sets every byte, guard bands included, and waits for it."""
        raise NotImplementedError

    def read(self) -> tuple[np.ndarray, np.ndarray]:
        """(bytes of the elements in row-major order, bytes outside of the array), after all work of the device."""
        raise NotImplementedError

    def place_outside(self, index: int) -> int:
        """Offset of a byte outside, from the array's first byte; negative before it."""
        raise NotImplementedError


class GuardedTwin(OutputMemory):
    """An array like ``view`` (library, device, dtype, shape, strides) in memory of its own, between guard bands."""

    guarded = True

    def __init__(self, view: ArrayView, guard: int) -> None:
        super().__init__(view)
        itemsize = view.itemsize
        reach = [(n - 1) * s for n, s in zip(view.shape, view.strides, strict=True)] if view.size else []
        self._origin = -sum(r for r in reach if r < 0)  # element of the span where (0, 0, ...) is
        span = (sum(abs(r) for r in reach) + 1) * itemsize if view.size else 0
        self._guard, self._total = guard, span + 2 * guard
        pool = PaddedPool("empty")
        self._upstream = pool.upstream(view.device.kind)
        self._buffer = pool.allocate(self._total, view.device)
        self.array = self._make_array(view, span // itemsize)
        self._own = self._byte_index(view) + guard
        inside = np.zeros(self._total, bool)
        inside[self._own] = True
        self._outside = np.flatnonzero(~inside)

    def _make_array(self, view: ArrayView, elements: int) -> Any:
        if view.device.kind == "cpu":
            host = self._buffer.numpy((self._total,))[self._guard : self._total - self._guard]
            library = "numpy" if view.library == "dlpack" else view.library
            flat = interop.from_host(host.view(np.dtype(f"u{view.itemsize}")), library, view.dtype)
        else:
            flat = interop.from_device(self._buffer, (elements,), view.dtype, view.library, self._guard)
        if view.contiguous:
            return flat.reshape(view.shape)
        if view.library == "torch":
            return sys.modules["torch"].as_strided(flat, view.shape, view.strides, self._origin)
        if view.device.kind == "cpu":
            as_strided: Any = np.lib.stride_tricks.as_strided
        else:
            as_strided = sys.modules["cupy"].lib.stride_tricks.as_strided
        return as_strided(flat[self._origin :], view.shape, tuple(s * view.itemsize for s in view.strides))

    def _byte_index(self, view: ArrayView) -> np.ndarray:
        """Offsets, from the span's first byte, of the array's bytes in row-major order."""
        if view.contiguous:
            return np.arange(view.nbytes, dtype=np.int64)
        elements = np.full(view.shape, self._origin, np.int64)
        for axis, (extent, stride) in enumerate(zip(view.shape, view.strides, strict=True)):
            steps = np.arange(extent, dtype=np.int64) * stride
            elements += steps.reshape([-1 if a == axis else 1 for a in range(len(view.shape))])
        flat = elements.reshape(-1, 1) * view.itemsize + np.arange(view.itemsize, dtype=np.int64)
        return flat.reshape(-1)

    def poison(self, byte: int) -> None:
        """See :class:`OutputMemory`."""
        device = self._buffer.device
        self._upstream.fill(self._buffer.pointer, self._total, byte, device, 0)
        self._upstream.read(self._buffer.pointer, 0, device)

    def read(self) -> tuple[np.ndarray, np.ndarray]:
        """See :class:`OutputMemory`."""
        memory = self._upstream.read(self._buffer.pointer, self._total, self._buffer.device)
        return memory[self._own], memory[self._outside]

    def place_outside(self, index: int) -> int:
        """See :class:`OutputMemory`."""
        return int(self._outside[index]) - self._guard


class InPlace(OutputMemory):
    """The caller's own array: no guard bands, so a write outside of it is not seen."""

    guarded = False

    def __init__(self, view: ArrayView) -> None:
        super().__init__(view)
        if view.device.kind != "cpu" and not view.contiguous:
            raise DeviceError(f"{view.name} has gaps and is on {view.device}; pass it without in_place, for a twin")
        self.array = view.owner
        self._view = view
        self._upstream: Upstream = PaddedPool("empty").upstream(view.device.kind)

    def poison(self, byte: int) -> None:
        """See :class:`OutputMemory`."""
        view = self._view
        if view.device.kind == "cpu":
            bits = view.bits()
            bits[...] = int.from_bytes(bytes([byte]) * view.itemsize, "little")
        else:
            self._upstream.fill(view.pointer, view.nbytes, byte, view.device, 0)
            self._upstream.read(view.pointer, 0, view.device)

    def read(self) -> tuple[np.ndarray, np.ndarray]:
        """See :class:`OutputMemory`."""
        view = self._view
        if view.device.kind == "cpu":
            own = np.frombuffer(view.bits().tobytes(), np.uint8)
        else:
            own = self._upstream.read(view.pointer, view.nbytes, view.device)
        return own, np.empty(0, np.uint8)
