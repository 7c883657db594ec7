"""A fake device: host memory, streams that only remember what they were told, and a judge of every access.

Work is never done at once and never seen to be done, unless the host waits for an event: the worst order that real
streams allow. Order is kept with vector clocks: an access to memory must come after every earlier access, by stream
order, through events, or because the host waited.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import Any

import numpy as np
import pytest

from fp4rt.device import Device
from fp4rt.pool import PaddedPool
from fp4rt.pool.upstream import host_bytes

Clock = dict[int, int]


class IllegalAccess(AssertionError):
    """Two streams touch the same memory without an order between them."""


class IllegalInCapture(AssertionError):
    """A call that would end a graph capture."""


def merge(into: Clock, other: Clock) -> None:
    for stream, time in other.items():
        into[stream] = max(into.get(stream, 0), time)


class FakeUpstream:
    """An upstream of kind "cuda" with ``capacity`` bytes."""

    kind = "cuda"
    has_streams = True

    def __init__(self, capacity: int | None = None) -> None:
        self.capacity = capacity
        self.idle_before_free = False
        self.lock = threading.RLock()
        self.clocks: defaultdict[int, Clock] = defaultdict(dict)
        self.host: Clock = {}
        self.accesses: defaultdict[int, Clock] = defaultdict(dict)  # pointer -> stream -> last access
        self.live: dict[int, tuple[np.ndarray, int]] = {}  # pointer -> (memory, stream)
        self.destroyed: set[int] = set()
        self.captures: dict[int, int] = {}
        self.calls: list[str] = []

    @property
    def held(self) -> int:
        return sum(memory.size for memory, _ in self.live.values())

    # The protocol.

    def alloc(self, nbytes: int, device: Device, stream: int) -> tuple[int, Any]:
        with self.lock:
            if self.capacity is not None and self.held + nbytes > self.capacity:
                raise MemoryError("the fake device is full")
            memory = np.full(nbytes, 0xCD, np.uint8)
            pointer = memory.ctypes.data
            self.live[pointer] = (memory, stream)
            self.accesses.pop(pointer, None)
            self.calls.append("alloc")
            return pointer, pointer

    def free(self, handle: int) -> None:
        with self.lock:
            _, stream = self.live.pop(handle)  # KeyError: freed twice
            if self.idle_before_free:
                stream = -1  # a stream of upstream's own, which knows of no work
            self._check_after(handle, stream, "freed")
            self.calls.append("free")

    def fill(self, pointer: int, nbytes: int, byte: int, device: Device, stream: int) -> None:
        self.work(stream, pointer)
        host_bytes(pointer, nbytes)[:] = byte
        self.calls.append(f"fill {byte:#x}")

    def read(self, pointer: int, nbytes: int, device: Device) -> np.ndarray:
        with self.lock:
            for clock in self.clocks.values():
                merge(self.host, clock)
        return host_bytes(pointer, nbytes).copy()

    def must_be_idle(self, handle: int) -> bool:
        return self.idle_before_free

    def is_capturing(self, stream: int) -> bool:
        self._refuse_destroyed(stream)
        return stream in self.captures

    def capture_id(self, device: Device, stream: int) -> int:
        self._refuse_destroyed(stream)
        return self.captures.get(stream, 0)

    def watch_capture(self, device: Device, stream: int) -> Any:
        self._refuse_destroyed(stream)
        number = self.captures[stream]
        return lambda: number in self.captures.values()

    def record_event(self, device: Device, stream: int) -> Any:
        with self.lock:
            self._refuse_destroyed(stream)
            if stream in self.captures:
                raise IllegalInCapture("record_event on a stream that is captured")
            self.calls.append("record")
            return dict(self.clocks[stream])

    def record_all(self, device: Device) -> Any:
        with self.lock:
            self._refuse_in_capture("record_all")
            self.calls.append("record")
            everything: Clock = {}
            for clock in self.clocks.values():
                merge(everything, clock)
            return everything

    def wait_event(self, event: Any, device: Device, stream: int) -> None:
        with self.lock:
            self._refuse_destroyed(stream)
            if stream in self.captures:
                raise IllegalInCapture("wait_event, for an event from outside, on a stream that is captured")
            merge(self.clocks[stream], event)
            self.calls.append("wait")

    def synchronize_event(self, event: Any) -> None:
        with self.lock:
            self._refuse_in_capture("synchronize_event")
            merge(self.host, event)
            self.calls.append("synchronize")

    # What tests do with the device.

    def work(self, stream: int, pointer: int) -> None:
        """A kernel on ``stream`` that reads and writes the block at ``pointer``."""
        with self.lock:
            assert pointer in self.live, "work on memory that was given back"
            self._check_after(pointer, stream, "used")
            now = self.clocks[stream][stream] = self.clocks[stream].get(stream, 0) + 1
            self.accesses[pointer][stream] = now

    def destroy(self, stream: int) -> None:
        self.destroyed.add(stream)

    def _check_after(self, pointer: int, stream: int, what: str) -> None:
        for other, time in self.accesses[pointer].items():
            if max(self.clocks[stream].get(other, 0), self.host.get(other, 0)) < time and other != stream:
                raise IllegalAccess(f"{pointer:#x} {what} on stream {stream} while stream {other} may still use it")

    def _refuse_destroyed(self, stream: int) -> None:
        assert stream not in self.destroyed, f"stream {stream} is destroyed: a real driver may crash"

    def _refuse_in_capture(self, what: str) -> None:
        if self.captures:
            raise IllegalInCapture(f"{what} during a capture")


@pytest.fixture
def fake() -> FakeUpstream:
    return FakeUpstream()


@pytest.fixture
def make_fake() -> type[FakeUpstream]:
    return FakeUpstream


@pytest.fixture
def illegal_access() -> type[AssertionError]:
    return IllegalAccess


@pytest.fixture
def gpu() -> Device:
    """The fake device's place."""
    return Device("cuda", 0)


@pytest.fixture
def pool(fake: FakeUpstream) -> PaddedPool:
    return PaddedPool(upstream=fake)
