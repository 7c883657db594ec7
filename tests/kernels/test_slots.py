"""Counters of a module: one stream keeps its slot, a captured launch has its own for good."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from fp4rt.cuda import slots
from fp4rt.cuda.quantizers import amax
from fp4rt.cuda.slots import SlotTable, slots_of
from fp4rt.errors import BackendUnavailable

SLOTS = 1000


def never():
    raise AssertionError("synchronized")


def test_streams_keep_their_slots_and_never_share_one():
    table = SlotTable(SLOTS, never)
    first = {stream: table.for_stream(stream).number for stream in (0, 1 << 40, 2 << 40)}
    assert len(set(first.values())) == 3
    assert all(table.for_stream(stream).number == slot for stream, slot in first.items())


def test_the_per_thread_stream_is_another_stream_in_every_thread():
    table, found = SlotTable(SLOTS, never), []
    gate = threading.Barrier(2)

    def ask():
        gate.wait()
        found.append(table.for_stream(2).number)
        gate.wait()  # both threads live at the same time: their numbers differ

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 2


def test_a_thread_that_has_ended_does_not_pass_its_per_thread_slot_on():
    table, found = SlotTable(SLOTS, never), []
    for _ in range(5):
        thread = threading.Thread(target=lambda: found.append(table.for_stream(2).number))
        thread.start()
        thread.join()  # Python and the system give the thread's number to the next one
    assert len(set(found)) == 5


def test_captured_launches_share_with_nobody_until_there_are_no_more():
    table = SlotTable(SLOTS, never)
    captured = [table.for_capture().number for _ in range(100)]
    eager = [table.for_stream(stream).number for stream in range(10, 110)]
    assert len({*captured, *eager}) == 200
    assert max(captured) < SLOTS
    more = [table.for_capture() for _ in range(SLOTS // 2 - 100 + 1)]
    assert None not in more[:-1]
    assert more[-1] is None


@pytest.fixture
def four():
    """A table with slots for four streams, and how often it has waited for the device."""
    waited = []
    return SlotTable(8, lambda: waited.append(True)), waited


def test_more_streams_than_slots_start_anew_once_the_device_is_idle(four):
    table, waited = four
    found = [table.for_stream(16 * stream).number for stream in range(1, 10)]
    assert found == [0, 1, 2, 3, 0, 1, 2, 3, 0]
    assert len(waited) == 2


def test_a_slot_that_a_launch_is_about_to_take_is_given_to_no_other_stream(four):
    table, waited = four
    held = table.for_stream(16)
    assert held.number not in [table.for_stream(16 * stream).number for stream in range(2, 10)]
    assert len(waited) == 2
    del held  # its launch is queued
    assert 0 in [table.for_stream(16 * stream).number for stream in range(10, 14)]
    assert len(waited) == 3


def test_a_slot_that_was_launched_with_during_the_wait_is_not_free_after_it():
    held, waits = [], []

    def synchronize():
        held.clear()
        waits.append(True)

    table = SlotTable(8, synchronize)
    held.append(table.for_stream(16))
    assert [table.for_stream(16 * stream).number for stream in range(2, 8)] == [1, 2, 3, 1, 2, 3]
    assert len(waits) == 1
    assert table.for_stream(16 * 8).number == 0
    assert len(waits) == 2, "only this one has seen that launch"


def test_where_the_wait_fails_streams_keep_their_slots_and_the_new_one_gets_one_of_those_for_captures():
    waits = []

    def synchronize():
        waits.append(True)
        if len(waits) == 1:
            raise RuntimeError("a stream is captured")

    table = SlotTable(8, synchronize)
    held = table.for_stream(16)
    for stream in range(2, 5):
        table.for_stream(16 * stream)
    assert table.for_stream(16 * 5).number == 4
    assert [table.for_stream(16 * stream).number for stream in range(2, 6)] == [1, 2, 3, 4]
    assert len(waits) == 1
    new = [table.for_stream(16 * stream).number for stream in range(6, 9)]
    assert len(waits) == 2
    assert sorted(new) == [1, 2, 3], "all but the one that is still held"
    del held


def test_what_asks_for_a_slot_during_the_wait_takes_none_that_others_may_launch_with():
    """As a destructor may that a collector runs."""
    found = []

    def synchronize():
        if not found:
            found.append(None)
            found[0] = table.for_stream(16 * 6)

    table = SlotTable(8, synchronize)
    for stream in range(1, 5):
        table.for_stream(16 * stream)
    taken = [table.for_stream(16 * stream) for stream in (5, 7, 8, 9)]
    numbers = [slot.number for slot in (*found, *taken)]
    assert len(set(numbers)) == 5


def test_a_table_that_cannot_wait_has_no_slot_for_further_streams():
    table = SlotTable(8)
    found = [table.for_stream(16 * stream) for stream in range(1, 7)]
    assert [slot and slot.number for slot in found] == [0, 1, 2, 3, None, None]
    assert table.for_capture().number == 4
    assert table.for_stream(16).number == 0


def test_a_slot_that_is_asked_for_while_another_one_is_made_is_not_the_same(monkeypatch):
    table = SlotTable(8)
    inner = []

    class Interrupted(slots.Slot):
        __slots__ = ()

        def __init__(self, *args):
            if not inner:
                inner.append(None)
                inner[0] = table.for_capture()
            super().__init__(*args)

    monkeypatch.setattr(slots, "Slot", Interrupted)
    assert table.for_capture().number != inner[0].number


def test_where_every_slot_is_held_a_new_stream_gets_one_of_those_for_captures(four):
    table, _ = four
    held = [table.for_stream(16 * stream) for stream in range(1, 6)]
    assert len({slot.number for slot in held}) == 5
    assert table.for_capture().number not in {slot.number for slot in held}


def test_where_all_are_held_there_is_none():
    table = SlotTable(4, lambda: None)
    held = [table.for_stream(16 * stream) for stream in range(1, 6)]
    assert [slot.number for slot in held[:-1]] == [0, 1, 2, 3]
    assert held[-1] is None
    del held[0], held[-1]
    assert table.for_stream(16 * 7) is not None


def test_threads_that_ask_for_a_modules_slots_at_once_get_one_table():
    gate, tables = threading.Barrier(2), {}

    def make():
        gate.wait()  # both threads have found none
        return SlotTable(SLOTS, never)

    with ThreadPoolExecutor(2) as pool:
        taken = list(pool.map(lambda stream: slots_of(tables, 0, make).for_stream(stream).number, [16, 32]))
    assert sorted(taken) == [0, 1]


def test_where_no_slot_is_left_a_global_scale_says_what_to_do(monkeypatch):
    class Full:
        for_launch = staticmethod(lambda stream: None)

    monkeypatch.setattr(amax, "_tables", {0: Full})
    with pytest.raises(BackendUnavailable, match="pass it as global_scale="):
        amax._slot(0, 16)
