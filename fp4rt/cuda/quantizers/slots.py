"""Which pair of counters of amax.cu a launch takes: no two launches that may run at once share one.

The counters are 0 when the module is loaded, and every launch leaves them at 0. Launches of one stream follow each
other, so a stream keeps its slot. A launch that is captured into a graph gets a slot of its own for good: the graph may
be replayed on any stream, at any time.

A stream is known by its handle. The driver may hand out the handle of a destroyed stream while the work of that one is
still queued; then both have one slot, and their global scales may be wrong. So wait for a stream's work before
destroying it, if a global scale was computed on it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from fp4rt.errors import BackendUnavailable
from fp4rt.pool.stream_key import stream_key

__all__ = ["SLOTS", "Slot", "SlotTable"]

SLOTS = 16384
_STREAM_SLOTS = SLOTS // 2


class Slot:
    """A pair of counters. Whoever launches with ``number`` holds the slot until the launch is queued."""

    __slots__ = ("_dropped", "number")

    def __init__(self, number: int, dropped: deque[int]) -> None:
        self.number = number
        self._dropped = dropped

    def __del__(self) -> None:
        self._dropped.append(self.number)  # takes no lock: this runs wherever the last reference dies


class SlotTable:
    """The slots of one device.

    Args:
        synchronize: waits for all of the device's work.
    """

    def __init__(self, synchronize: Callable[[], None]) -> None:
        self._synchronize = synchronize
        self._of_stream: dict[Any, Slot] = {}  # guarded by _lock, read without
        self._dropped: deque[int] = deque()  # nobody will launch with them, but work may be queued
        self._lock = threading.RLock()  # reentrant: a collector may run Python that asks for a slot while it is held
        # Guarded by _lock from here on.
        self._free = deque(range(_STREAM_SLOTS))
        self._captured: list[Slot] = []

    def for_stream(self, stream: int) -> Slot:
        """The stream's slot. Where more streams have come by than there are slots, all start anew.

        Args:
            stream: handle; that of the per-thread stream means the calling thread's.

        Returns:
            The slot. No other stream gets it while it is held, or while work is queued that was launched with it.

        Raises:
            BackendUnavailable: all slots are held, and those for captures are taken.
        """
        key = stream_key(stream)
        return self._of_stream.get(key) or self._new(key)

    def for_capture(self) -> Slot:
        """A slot that no other launch gets.

        Raises:
            BackendUnavailable: all are taken.
        """
        with self._lock:
            if len(self._captured) >= SLOTS - _STREAM_SLOTS:
                raise BackendUnavailable(
                    f"{len(self._captured)} automatic global scales have been captured into graphs, and there is no "
                    "room for more; compute the scale once with fp4rt.global_scale and pass it as global_scale="
                )
            slot = Slot(_STREAM_SLOTS + len(self._captured), self._dropped)
            self._captured.append(slot)
            return slot

    def _new(self, key: Any) -> Slot:
        with self._lock:
            slot = self._of_stream.get(key)
            if slot is None:
                if not self._free:
                    self._start_anew()
                slot = Slot(self._free.popleft(), self._dropped) if self._free else self.for_capture()
                self._of_stream[key] = slot
            return slot

    def _start_anew(self) -> None:
        """Forgets every stream; slots that nobody holds are free after the wait."""
        self._of_stream.clear()
        launched = len(self._dropped)  # one that is dropped later may have been launched with during the wait
        self._synchronize()
        self._free.extend(self._dropped.popleft() for _ in range(launched))
