"""Which pair of counters of amax.cu a launch takes: no two launches that may run at once share one.

The counters are 0 when the module is loaded, and every launch leaves them at 0. Launches of one stream follow each
other, so a stream keeps its slot. A launch that is captured into a graph gets a slot of its own for good: the graph may
be replayed on any stream, at any time.
"""

from __future__ import annotations

import threading
from typing import Any

from fp4rt.errors import BackendUnavailable
from fp4rt.pool.stream_key import stream_key

__all__ = ["SLOTS", "SlotTable"]

SLOTS = 16384
_STREAM_SLOTS = SLOTS // 2


class SlotTable:
    """The slots of one device. ``synchronize`` waits for all of the device's work."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of_stream: dict[Any, int] = {}  # guarded by _lock
        self._captured = 0  # guarded by _lock

    def for_stream(self, stream: int, synchronize: Any) -> int:
        """The stream's slot. Where more streams have come by than there are slots, all start anew."""
        key = stream_key(stream)
        slot = self._of_stream.get(key)
        if slot is None:
            with self._lock:
                if len(self._of_stream) >= _STREAM_SLOTS and key not in self._of_stream:
                    synchronize()
                    self._of_stream.clear()
                slot = self._of_stream.setdefault(key, len(self._of_stream))
        return slot

    def for_capture(self) -> int:
        """A slot that no other launch gets.

        Raises:
            BackendUnavailable: all are taken.
        """
        with self._lock:
            if self._captured >= SLOTS - _STREAM_SLOTS:
                raise BackendUnavailable(
                    f"{self._captured} automatic global scales have been captured into graphs, and there is no room "
                    "for more; compute the scale once with fp4rt.global_scale and pass it as global_scale="
                )
            self._captured += 1
            return _STREAM_SLOTS + self._captured - 1
