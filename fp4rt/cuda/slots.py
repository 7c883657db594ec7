"""Which of a kernel's sets of counters a launch takes: no two launches that may run at once share one.

The counters are 0 when the module is loaded, and every launch leaves them at 0. Launches of one stream follow each
other, so a stream keeps its slot. A launch that is captured into a graph gets a slot of its own for good: the graph may
be replayed on any stream, at any time.

A stream is known by its handle. The driver may hand out the handle of a destroyed stream while the work of that one is
still queued; then both have one slot, and their results may be wrong. So wait for a stream's work before destroying it,
if a global scale or a large product was computed on it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from fp4rt.cuda.kernel import CurrentDevice
from fp4rt.pool.stream_key import stream_key

__all__ = ["Slot", "SlotTable", "device_slots"]


class Slot:
    """A set of counters. Whoever launches with ``number`` holds the slot until the launch is queued."""

    __slots__ = ("_dropped", "number")

    def __init__(self, number: int, dropped: deque[int]) -> None:
        self.number = number
        self._dropped = dropped

    def __del__(self) -> None:
        self._dropped.append(self.number)  # takes no lock: this runs wherever the last reference dies


class SlotTable:
    """The slots of one module on one device: half of them for streams, half for captures.

    Args:
        slots: how many there are.
        synchronize: waits for all of the device's work.
    """

    def __init__(self, slots: int, synchronize: Callable[[], None]) -> None:
        self._synchronize = synchronize
        self._slots = slots
        self._of_stream: dict[Any, Slot] = {}  # guarded by _lock, read without
        self._dropped: deque[int] = deque()  # nobody will launch with them, but work may be queued
        self._lock = threading.RLock()  # reentrant: a collector may run Python that asks for a slot while it is held
        # Guarded by _lock from here on.
        self._free = deque(range(slots // 2))
        self._captured: list[Slot] = []

    def for_launch(self, stream: int) -> Slot | None:
        """:meth:`for_capture` where the stream records a graph, else :meth:`for_stream`."""
        from cupy.cuda import runtime

        try:
            capturing = runtime.streamIsCapturing(stream)
        except runtime.CUDARuntimeError:  # the default stream while another one is captured: the launch will say so
            capturing = False
        return self.for_capture() if capturing else self.for_stream(stream)

    def for_stream(self, stream: int) -> Slot | None:
        """The stream's slot. Where more streams have come by than there are slots, all start anew.

        Args:
            stream: handle; that of the per-thread stream means the calling thread's.

        Returns:
            The slot; None where all are held, and those for captures are taken. No other stream gets it while it is
            held, or while work is queued that was launched with it.
        """
        key = stream_key(stream)
        return self._of_stream.get(key) or self._new(key)

    def for_capture(self) -> Slot | None:
        """A slot that no other launch gets; None where all are taken."""
        with self._lock:
            number = self._slots // 2 + len(self._captured)
            if number >= self._slots:
                return None
            slot = Slot(number, self._dropped)
            self._captured.append(slot)
            return slot

    def _new(self, key: Any) -> Slot | None:
        with self._lock:
            slot = self._of_stream.get(key)
            if slot is None:
                if not self._free:
                    self._start_anew()
                slot = Slot(self._free.popleft(), self._dropped) if self._free else self.for_capture()
                if slot is not None:
                    self._of_stream[key] = slot
            return slot

    def _start_anew(self) -> None:
        """Forgets every stream; slots that nobody holds are free after the wait."""
        self._of_stream.clear()
        launched = len(self._dropped)  # one that is dropped later may have been launched with during the wait
        self._synchronize()
        self._free.extend(self._dropped.popleft() for _ in range(launched))


def device_slots(device: int, slots: int) -> SlotTable:
    """The table for a module on a CUDA device."""
    return SlotTable(slots, partial(_synchronize, device))


def _synchronize(device: int) -> None:
    from cupy.cuda import runtime

    with CurrentDevice(device):
        runtime.deviceSynchronize()
