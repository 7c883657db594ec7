"""Graph capture: nothing that would end it, and memory of a graph stays the graph's."""

from __future__ import annotations

import pytest

from fp4rt.errors import BackendUnavailable, OutOfMemoryError
from fp4rt.pool import PaddedPool, scale_tag

TAG = scale_tag("128x4", 3, 48, 48)
STREAM, CAPTURE = 4, 41


@pytest.fixture
def captured(fake, pool, gpu):
    """The address of a block that a finished capture used."""
    fake.captures[STREAM] = CAPTURE
    pointer = pool.allocate(512, gpu, STREAM).pointer
    fake.captures.clear()
    return pointer


def test_memory_of_a_graph_is_not_handed_out_after_the_capture(pool, gpu, captured):
    assert pool.allocate(512, gpu, STREAM).pointer != captured
    assert pool.stats().bytes_captured == 512


def test_memory_of_a_graph_is_not_trimmed(pool, fake, captured):
    assert pool.trim() == 0
    assert captured in fake.live


def test_a_second_capture_does_not_share_memory_with_the_first(pool, fake, gpu, captured):
    fake.captures[STREAM] = CAPTURE + 1
    assert pool.allocate(512, gpu, STREAM).pointer != captured


def test_the_same_capture_reuses_in_stream_order(pool, fake, gpu):
    fake.captures[STREAM] = CAPTURE
    pointers = {pool.allocate(512, gpu, STREAM).pointer for _ in range(10)}
    assert len(pointers) == 1


def test_buffer_that_outlives_its_capture_stays_the_graphs(pool, fake, gpu):
    fake.captures[STREAM] = CAPTURE
    buffer = pool.allocate(512, gpu, STREAM)
    fake.captures.clear()
    pointer = buffer.pointer
    del buffer
    assert pool.allocate(512, gpu, STREAM).pointer != pointer


def test_released_captures_serve_everybody_again(pool, gpu, captured):
    assert pool.release_captures(CAPTURE + 1) == 0
    assert pool.release_captures(CAPTURE) == 512
    assert pool.allocate(512, gpu, STREAM).pointer == captured
    assert pool.stats().bytes_captured == 0


def test_memory_from_before_the_capture_may_be_used_in_it(pool, fake, gpu):
    pointer = pool.allocate(512, gpu, STREAM).pointer
    fake.captures[STREAM] = CAPTURE
    assert pool.allocate(512, gpu, STREAM).pointer == pointer


def test_a_block_that_another_stream_used_is_passed_over_in_a_capture(pool, fake, gpu):
    buffer = pool.allocate(512, gpu, STREAM)
    pointer = buffer.pointer
    buffer.used_on(9)
    del buffer
    fake.captures[STREAM] = CAPTURE
    assert pool.allocate(512, gpu, STREAM).pointer != pointer


def test_memory_used_by_a_captured_stream_becomes_the_graphs(pool, fake, gpu):
    buffer = pool.allocate(512, gpu, 1)
    fake.captures[STREAM] = CAPTURE
    buffer.used_on(STREAM)
    fake.captures.clear()
    pointer = buffer.pointer
    del buffer
    assert pool.allocate(512, gpu, 1).pointer != pointer


def test_a_zero_fill_in_a_capture_is_recorded_each_time_and_proves_nothing(fake, gpu):
    pool = PaddedPool("zero", upstream=fake)
    pool.allocate(512, gpu, STREAM, TAG)  # known to be zero from here
    fake.captures[STREAM] = CAPTURE
    for _ in range(3):
        pool.allocate(512, gpu, STREAM, TAG)
    fake.captures.clear()
    pool.release_captures()
    pool.allocate(512, gpu, STREAM, TAG)
    stats = pool.stats()
    assert (stats.zero_fills, stats.zero_fills_avoided) == (5, 0)


def test_a_full_pool_in_a_capture_says_to_warm_up(fake, gpu):
    pool = PaddedPool(upstream=fake, limit=1024)
    pool.allocate(512, gpu, 1)
    pool.allocate(1024, gpu, 1)
    fake.captures[STREAM] = CAPTURE
    fake.calls.clear()
    with pytest.raises(OutOfMemoryError, match="A graph is being captured: make the same calls once before it"):
        pool.allocate(512, gpu, STREAM)
    assert fake.calls == [], "nothing was recorded, waited for or given back"


def test_while_a_graph_is_recorded_others_get_no_block_that_would_need_waiting(make_fake, gpu):
    fake = make_fake(capacity=2048)
    pool = PaddedPool(upstream=fake)
    pool.allocate(1024, gpu, STREAM)
    used = pool.allocate(512, gpu, 1)
    used.used_on(9)
    del used
    fake.captures[STREAM] = CAPTURE
    captured = pool.allocate(512, gpu, STREAM)
    fake.calls.clear()
    with pytest.raises(OutOfMemoryError, match="A graph is being captured"):
        pool.allocate(2048, gpu, 1)
    assert fake.calls == ["free"], "the block that is ordered by its own stream, and nothing that waits"
    fake.captures.clear()
    del captured
    pool.release_captures()
    assert pool.allocate(2048, gpu, 1).nbytes == 2048


def test_blocks_of_others_are_given_back_once_the_capture_has_ended(fake, gpu):
    fake.idle_before_free = True
    pool = PaddedPool(upstream=fake, limit=4096)
    before = pool.allocate(512, gpu, STREAM)
    fake.captures[STREAM] = CAPTURE
    captured = pool.allocate(512, gpu, STREAM)
    fake.captures.clear()
    pointer = captured.pointer
    del before, captured
    others = [pool.allocate(512, gpu, 12) for _ in range(5)]
    del others
    assert pool.allocate(2048, gpu, 12).nbytes == 2048
    assert pointer in fake.live


def test_a_stream_that_was_destroyed_after_its_capture_is_not_asked_about_it(fake, gpu):
    pool = PaddedPool(upstream=fake, limit=1024)
    before = pool.allocate(512, gpu, STREAM)
    fake.captures[STREAM] = CAPTURE
    pool.allocate(512, gpu, STREAM)
    fake.captures.clear()
    fake.destroy(STREAM)
    del before
    assert pool.allocate(512, gpu, 12).nbytes == 512
    assert pool.stats().moves == 1


def test_a_second_capture_of_a_stream_holds_blocks_back_like_the_first(fake, gpu):
    fake.idle_before_free = True
    pool = PaddedPool(upstream=fake, limit=1024)
    before = pool.allocate(512, gpu, STREAM)
    for number in (CAPTURE, CAPTURE + 1):
        fake.captures[STREAM] = number
        pool.allocate(512, gpu, STREAM)
        pool.release_captures(CAPTURE)
    del before
    with pytest.raises(OutOfMemoryError, match="A graph is being captured"):
        pool.allocate(512, gpu, 12)


def test_a_pool_that_is_full_of_blocks_of_graphs_says_so(fake, gpu):
    pool = PaddedPool(upstream=fake, limit=1024)
    fake.captures[STREAM] = CAPTURE
    pool.allocate(1024, gpu, STREAM)
    fake.captures.clear()
    with pytest.raises(OutOfMemoryError, match=r"in use 0 B, held 1 KiB, kept for graphs 1 KiB, limit 1 KiB\. Drop"):
        pool.allocate(512, gpu, 12)


def refused(*args):
    raise BackendUnavailable("cuCtxRecordEvent failed with error 900")


@pytest.mark.parametrize("used_on", [None, 9])
@pytest.mark.parametrize("wanted", [512, 2048])
def test_where_nothing_can_be_waited_for_no_block_is_lost(fake, gpu, monkeypatch, wanted, used_on):
    """So it is while somebody captures on a stream that the pool has not seen: there the driver records no event."""
    pool = PaddedPool(upstream=fake, limit=2048)
    blocks = [pool.allocate(512, gpu, 5) for _ in range(4)]
    for block in blocks:
        if used_on:
            block.used_on(used_on)
        else:
            fake.idle_before_free = True
    del block, blocks
    with monkeypatch.context() as context:
        context.setattr(fake, "record_all", refused)
        with pytest.raises(OutOfMemoryError) as caught:
            pool.allocate(wanted, gpu, 6)
        assert isinstance(caught.value.__cause__, BackendUnavailable)
        with pytest.raises(BackendUnavailable):
            pool.trim()
    assert pool.allocate(wanted, gpu, 6).nbytes == wanted
    pool.trim()
    assert (pool.stats().bytes_held, fake.held) == (0, 0)
