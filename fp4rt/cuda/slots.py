"""Which of a kernel's sets of counters a launch takes: no two launches that may run at once share one.

The counters are 0 when the module is loaded, and every launch leaves them at 0. Launches of one stream follow each
other, so a stream keeps its slot. A launch that is captured into a graph gets a slot of its own for good: the graph may
be replayed on any stream, at any time, but not beside itself.

Two launches that run at once with one slot have wrong results, or wait for ever. Streams are known by their handles,
and the driver gives that of a destroyed stream to the next one, whatever is still queued (seen on an H200, 50 times of
50): ``interop.enter_stream`` has seen to that before a slot is asked for. Two executables of one captured graph, or two
children that are, must not run at once.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

from fp4rt.cuda.kernel import CurrentDevice
from fp4rt.pool.stream_key import stream_key

__all__ = ["Slot", "SlotTable", "slots_of", "waits_for"]


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
        synchronize: waits for all of the device's work, so that streams of the past leave their slots; None: once all
            are taken there are none for other streams.
    """

    def __init__(self, slots: int, synchronize: Callable[[], None] | None = None) -> None:
        self._synchronize = synchronize
        self._slots = slots
        self._of_stream: dict[Any, Slot] = {}  # guarded by _lock, read without
        self._dropped: deque[int] = deque()  # nobody will launch with them, but work may be queued
        self._lock = threading.RLock()  # reentrant: a collector may run Python that asks for a slot while it is held
        # Guarded by _lock from here on.
        self._free = deque(range(slots // 2))
        self._captured: list[Slot] = []
        self._capture_numbers = itertools.count(slots // 2)

    def for_launch(self, stream: int) -> Slot | None:
        """:meth:`for_capture` where the stream records a graph, else :meth:`for_stream`."""
        from cupy.cuda import runtime

        try:
            capturing = runtime.streamIsCapturing(stream)
        except runtime.CUDARuntimeError:  # the default stream while another one is captured: the launch will say so
            capturing = False
        return self.for_capture() if capturing else self.for_stream(stream)

    def for_stream(self, stream: int) -> Slot | None:
        """The stream's slot. Where more streams have come by than there are slots, all start anew, if they can.

        Args:
            stream: handle; that of the per-thread stream means the calling thread's.

        Returns:
            The slot; None where there is none. No other stream gets it while it is held, or while work is queued that
            was launched with it.
        """
        key = stream_key(stream)
        return self._of_stream.get(key) or self._new(key)

    def for_capture(self) -> Slot | None:
        """A slot that no other launch gets; None where all are taken."""
        with self._lock:
            number = next(self._capture_numbers)
            if number >= self._slots:
                return None
            slot = Slot(number, self._dropped)
            self._captured.append(slot)
            return slot

    def _new(self, key: Any) -> Slot | None:
        with self._lock:
            slot = self._of_stream.get(key)
            if slot is None:
                slot = self._for_new_stream()
                if slot is not None:
                    self._of_stream[key] = slot
            return slot

    def _for_new_stream(self) -> Slot | None:
        if not self._free:
            if self._synchronize is None:
                return None
            self._start_anew(self._synchronize)
        return Slot(self._free.popleft(), self._dropped) if self._free else self.for_capture()

    def _start_anew(self, synchronize: Callable[[], None]) -> None:
        """Forgets every stream; slots that nobody holds are free after the wait.

        Where the device cannot be waited for, as while a stream of it is captured, none is free, and streams keep
        theirs.
        """
        numbers = {key: slot.number for key, slot in self._of_stream.items()}
        self._of_stream.clear()
        launched: list[int] = []  # one that is dropped later may have been launched with during the wait
        while self._dropped:
            launched.append(self._dropped.popleft())
        try:
            synchronize()
        except Exception:
            unheld = set(launched)
            kept = {key: number for key, number in numbers.items() if number in unheld}
            for key, number in kept.items():
                self._of_stream.setdefault(key, Slot(number, self._dropped))
            self._dropped.extend(unheld.difference(kept.values()))
        else:
            self._free.extend(launched)


def slots_of(tables: dict[Any, SlotTable], key: Hashable, make: Callable[[], SlotTable]) -> SlotTable:
    """``tables[key]``, made at its first use: threads that come at once get one table."""
    table = tables.get(key)
    return table if table is not None else tables.setdefault(key, make())


def waits_for(device: int) -> Callable[[], None]:
    """What waits for all work of a CUDA device."""
    return partial(_synchronize, device)


def _synchronize(device: int) -> None:
    from cupy.cuda import runtime

    with CurrentDevice(device):
        runtime.deviceSynchronize()
