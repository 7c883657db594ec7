"""Counters of amax.cu: one stream keeps its slot, a captured launch has its own for good."""

from __future__ import annotations

import threading

import pytest

from fp4rt.cuda.quantizers import slots
from fp4rt.cuda.quantizers.slots import SLOTS, SlotTable
from fp4rt.errors import BackendUnavailable


def never():
    raise AssertionError("synchronized")


def test_streams_keep_their_slots_and_never_share_one():
    table = SlotTable()
    first = {stream: table.for_stream(stream, never) for stream in (0, 1 << 40, 2 << 40)}
    assert len(set(first.values())) == 3
    assert all(table.for_stream(stream, never) == slot for stream, slot in first.items())


def test_the_per_thread_stream_is_another_stream_in_every_thread():
    table, found = SlotTable(), []
    gate = threading.Barrier(2)

    def ask():
        gate.wait()
        found.append(table.for_stream(2, never))
        gate.wait()  # both threads live at the same time: their numbers differ

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 2


def test_a_thread_that_has_ended_does_not_pass_its_per_thread_slot_on():
    table, found = SlotTable(), []
    for _ in range(5):
        thread = threading.Thread(target=lambda: found.append(table.for_stream(2, never)))
        thread.start()
        thread.join()  # Python and the system give the thread's number to the next one
    assert len(set(found)) == 5


def test_captured_launches_share_with_nobody_until_there_are_no_more(monkeypatch):
    table = SlotTable()
    captured = [table.for_capture() for _ in range(100)]
    eager = [table.for_stream(stream, never) for stream in range(10, 110)]
    assert len({*captured, *eager}) == 200
    assert max(captured) < SLOTS
    monkeypatch.setattr(slots, "SLOTS", slots._STREAM_SLOTS + 100)
    with pytest.raises(BackendUnavailable, match="100 automatic global scales"):
        table.for_capture()


def test_more_streams_than_slots_start_anew_once_the_device_is_idle(monkeypatch):
    monkeypatch.setattr(slots, "_STREAM_SLOTS", 4)
    table, waited = SlotTable(), []
    found = [table.for_stream(16 * stream, lambda: waited.append(True)) for stream in range(1, 10)]
    assert found == [0, 1, 2, 3, 0, 1, 2, 3, 0]
    assert len(waited) == 2
