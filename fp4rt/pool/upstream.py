"""Where the pool gets its memory: the protocol of an upstream, the host's own, and the registry of device kinds.

An upstream is stream-ordered: memory from ``alloc(n, device, s)`` may be used by work queued on ``s`` afterwards, and
``free`` may be called while ``s`` still works on it. Only :mod:`fp4rt.cuda` knows an upstream of device memory.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from fp4rt.device import Device
from fp4rt.errors import BackendUnavailable, DeviceError

__all__ = ["HostUpstream", "Upstream", "check_upstream", "make_upstream", "register_upstream"]

BACKENDS = {"cuda": "fp4rt.cuda.memory"}  # the module that registers a device kind's upstream, loaded when needed
HOST_ALIGNMENT = 64  # a cache line, and the widest vector load


class Upstream(Protocol):
    """What the pool needs of an allocator. ``kind`` is the device kind that it serves.

    ``has_streams`` False says that work is done when the call that started it returns; then the pool calls none of the
    methods about captures and events. An event is waited for once.
    """

    kind: str
    has_streams: bool

    def alloc(self, nbytes: int, device: Device, stream: int) -> tuple[int, Any]:
        """(address, handle for ``free``). Raises MemoryError, or a subclass, where there is no more."""

    def free(self, handle: Any) -> None:
        """Gives the memory back."""

    def must_be_idle(self, handle: Any) -> bool:
        """Whether ``free`` needs the work of the memory's own stream to be done; the pool then waits for it."""

    def fill(self, pointer: int, nbytes: int, byte: int, device: Device, stream: int) -> None:
        """Queues on ``stream`` the setting of ``nbytes`` bytes to ``byte``; legal during a graph capture."""

    def read(self, pointer: int, nbytes: int, device: Device) -> np.ndarray:
        """uint8 copy on the host, taken after all work of the device is done. For checkers, never on a hot path."""

    def is_capturing(self, stream: int) -> bool:
        """Whether the stream is recording a graph. Called at each allocation, except for the default stream."""

    def capture_id(self, device: Device, stream: int) -> int:
        """The number of the graph capture that ``stream`` is recording, or 0."""

    def watch_capture(self, device: Device, stream: int) -> Callable[[], bool]:
        """What tells whether the capture that ``stream`` is recording still goes on.

        Called once a capture. The answer is asked for from any thread, and must not touch the stream: it may be
        destroyed by then.
        """

    def record_event(self, device: Device, stream: int) -> Any:
        """An event that is done when the work queued on ``stream`` up to now is done."""

    def record_all(self, device: Device) -> Any:
        """An event that is done when all work queued on the device up to now is done, on whatever stream.

        It names no stream: the streams of free blocks may have been destroyed. It would end a capture.
        """

    def wait_event(self, event: Any, device: Device, stream: int) -> None:
        """Makes later work of ``stream`` wait for ``event``, without the host waiting."""

    def synchronize_event(self, event: Any) -> None:
        """Makes the host wait for ``event``."""


class HostUpstream:
    """NumPy memory, aligned to a cache line."""

    kind = "cpu"
    has_streams = False

    def alloc(self, nbytes: int, device: Device, stream: int) -> tuple[int, Any]:
        """(address, owner)."""
        owner = np.empty(nbytes + HOST_ALIGNMENT, np.uint8)
        address = owner.__array_interface__["data"][0]
        return -(-address // HOST_ALIGNMENT) * HOST_ALIGNMENT, owner

    def free(self, handle: Any) -> None:
        """Nothing to do: the memory goes with its owner."""

    def fill(self, pointer: int, nbytes: int, byte: int, device: Device, stream: int) -> None:
        """Sets the bytes at once."""
        host_bytes(pointer, nbytes)[:] = byte

    def read(self, pointer: int, nbytes: int, device: Device) -> np.ndarray:
        """A copy, taken at once."""
        return host_bytes(pointer, nbytes).copy()

    def must_be_idle(self, handle: Any) -> bool:
        """Its work is done already."""
        return False

    def is_capturing(self, stream: int) -> bool:
        """Hosts have no graphs."""
        return False

    def capture_id(self, device: Device, stream: int) -> int:
        """Hosts have no graphs."""
        return 0

    def watch_capture(self, device: Device, stream: int) -> Callable[[], bool]:
        """Hosts have no graphs."""
        return lambda: False

    def record_event(self, device: Device, stream: int) -> Any:
        """Hosts have no streams."""
        return None

    def record_all(self, device: Device) -> Any:
        """Hosts have no streams."""
        return None

    def wait_event(self, event: Any, device: Device, stream: int) -> None:
        """Hosts have no streams."""

    def synchronize_event(self, event: Any) -> None:
        """Hosts have no streams."""


class HostMemory:
    """An address as NumPy sees it; ``owner`` lives as long as any array made of it."""

    __slots__ = ("__array_interface__", "owner")

    def __init__(self, pointer: int, shape: tuple[int, ...], typestr: str, owner: Any) -> None:
        self.owner = owner
        self.__array_interface__ = {"data": (pointer, False), "shape": shape, "typestr": typestr, "version": 3}


def host_array(pointer: int, shape: tuple[int, ...], dtype: np.dtype[Any], owner: Any = None) -> np.ndarray:
    """Dense array over host memory; it, and every view of it, keeps ``owner`` alive."""
    if dtype.kind != "V":
        return np.asarray(HostMemory(pointer, shape, dtype.str, owner))
    bits = f"|V{dtype.itemsize}"  # a dtype from outside NumPy, such as bfloat16, has no name in the interface
    return np.asarray(HostMemory(pointer, shape, bits, owner)).view(dtype)


def host_bytes(pointer: int, nbytes: int, owner: Any = None) -> np.ndarray:
    """uint8 array over host memory; it, and every view of it, keeps ``owner`` alive."""
    return np.asarray(HostMemory(pointer, (nbytes,), "|u1", owner))


Adapter = Callable[[Any], Upstream | None]

# device kind -> (default upstream, what makes an upstream of another library's allocator; None: nothing does)
_FACTORIES: dict[str, tuple[Callable[[], Upstream], Adapter | None]] = {}


def register_upstream(kind: str, default: Callable[[], Upstream], adapt: Adapter | None = None) -> None:
    """Names the upstream of a device kind; backends call it when they are imported.

    Args:
        kind: the device kind, "cuda".
        default: makes the upstream of pools that were given none.
        adapt: makes an upstream of an allocator in another library's form (with ``malloc``), or returns None. Without
            it such an allocator does not serve this kind.
    """
    _FACTORIES[kind] = (default, adapt)


def check_upstream(given: Any) -> None:
    """Refuses what can be no allocator of any kind.

    Raises:
        DeviceError: ``given`` has neither the form of an upstream nor ``malloc``.
    """
    if given is not None and not hasattr(given, "kind") and not hasattr(given, "malloc"):
        raise DeviceError(
            f"PaddedPool: upstream of type {type(given).__name__} is no allocator; wanted an object with the methods "
            "of fp4rt.pool.Upstream, or a CuPy memory pool"
        )


def make_upstream(kind: str, given: Any = None) -> Upstream:
    """The upstream for a device kind: ``given`` where it serves that kind, else the registered default.

    Raises:
        BackendUnavailable: nothing is registered for the kind.
        DeviceError: the kind's backend does not know the allocator that was given.
    """
    if getattr(given, "kind", None) == kind:
        upstream: Upstream = given
        return upstream
    if kind not in _FACTORIES and kind in BACKENDS:
        importlib.import_module(BACKENDS[kind])
    if kind not in _FACTORIES:
        raise BackendUnavailable(
            f"pool: no allocator for device kind {kind!r} is registered; import fp4rt.{kind} first, or pass upstream="
        )
    default, adapt = _FACTORIES[kind]
    if given is None or hasattr(given, "kind") or adapt is None:
        return default()
    adapted = adapt(given)
    if adapted is None:
        raise DeviceError(f"pool: the backend of {kind!r} cannot allocate through a {type(given).__name__}")
    return adapted


register_upstream("cpu", HostUpstream)
