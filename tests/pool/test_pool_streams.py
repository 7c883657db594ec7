"""Stream order: a block goes to another stream only behind an event, and back upstream only when its work is known."""

from __future__ import annotations

import random
import threading

import pytest

from fp4rt.errors import OutOfMemoryError
from fp4rt.pool import PaddedPool
from fp4rt.pool.stream_key import PER_THREAD_STREAM

ROUNDS = 200


def test_the_fake_device_sees_an_illegal_reuse(fake, gpu, illegal_access):
    pointer, _ = fake.alloc(512, gpu, 1)
    fake.work(1, pointer)
    fake.work(1, pointer)
    with pytest.raises(illegal_access, match="stream 12 while stream 1"):
        fake.work(12, pointer)
    event = fake.record_event(gpu, 1)
    fake.wait_event(event, gpu, 12)
    fake.work(12, pointer)
    with pytest.raises(illegal_access, match="freed on stream 1 while stream 12"):
        fake.free(pointer)


def test_the_same_stream_reuses_at_once_without_events(pool, fake, gpu):
    for _ in range(ROUNDS):
        fake.work(3, pool.allocate(4096, gpu, 3).pointer)
    assert fake.calls == ["alloc"]
    assert pool.stats().reuses == ROUNDS - 1


def test_other_streams_get_other_memory_while_there_is_some(pool, fake, gpu):
    for round_ in range(ROUNDS):
        stream = 11 + round_ % 4
        fake.work(stream, pool.allocate(4096, gpu, stream).pointer)
    stats = pool.stats()
    assert (stats.upstream_allocations, stats.moves) == (4, 0)
    assert "record" not in fake.calls


def test_a_short_pool_moves_blocks_between_streams_behind_an_event(make_fake, gpu):
    fake = make_fake(capacity=4096)
    pool = PaddedPool(upstream=fake)
    for round_ in range(ROUNDS):
        stream = 11 + round_ % 3
        buffer = pool.allocate(4096, gpu, stream)
        assert buffer.stream == stream
        fake.work(stream, buffer.pointer)  # IllegalAccess without the event
        del buffer
    stats = pool.stats()
    assert (stats.moves, stats.upstream_allocations) == (ROUNDS - 1, 1)
    assert fake.calls.count("synchronize") == 0, "the host never waits for a move"


def test_a_moved_block_goes_upstream_after_its_last_stream(make_fake, gpu):
    fake = make_fake(capacity=4096)
    pool = PaddedPool(upstream=fake)
    fake.work(1, pool.allocate(4096, gpu, 1).pointer)
    fake.work(12, pool.allocate(4096, gpu, 12).pointer)
    assert pool.trim() == 4096  # IllegalAccess if upstream, which knows stream 1, got it too early
    assert fake.held == 0


def test_limit_moves_blocks_of_the_size_and_gives_back_the_others(fake, gpu):
    pool = PaddedPool(upstream=fake, limit=8192)
    for stream, nbytes in ((1, 4096), (1, 2048)):
        fake.work(stream, pool.allocate(nbytes, gpu, stream).pointer)
    fake.work(12, pool.allocate(4096, gpu, 12).pointer)  # 6144 + 4096 > 8192
    assert pool.stats().moves == 1
    fake.work(12, pool.allocate(8192, gpu, 12).pointer)
    assert fake.held == 8192


def test_use_on_another_stream_is_waited_for_at_the_next_use(pool, fake, gpu):
    for _ in range(ROUNDS):
        buffer = pool.allocate(4096, gpu, 1)
        fake.work(1, buffer.pointer)
        fake.wait_event(fake.record_event(gpu, 1), gpu, 12)  # the consumer waits for the producer
        fake.work(12, buffer.pointer)
        buffer.used_on(12)
        del buffer
    assert pool.stats().upstream_allocations == 1


def test_use_on_another_stream_without_saying_so_is_what_the_fake_catches(pool, fake, gpu, illegal_access):
    buffer = pool.allocate(4096, gpu, 1)
    fake.work(12, buffer.pointer)
    del buffer
    buffer = pool.allocate(4096, gpu, 1)
    with pytest.raises(illegal_access):
        fake.work(1, buffer.pointer)


def test_trim_waits_for_other_streams_that_used_a_block(pool, fake, gpu):
    buffer = pool.allocate(4096, gpu, 1)
    fake.work(12, buffer.pointer)
    buffer.used_on(12)
    del buffer
    assert pool.trim() == 4096
    assert fake.held == 0


def test_use_on_the_buffers_own_stream_costs_no_event(pool, fake, gpu):
    pool.allocate(4096, gpu, 1).used_on(1)
    assert "record" not in fake.calls


def test_destroyed_streams_are_never_touched_again(make_fake, gpu):
    fake = make_fake(capacity=3 * 4096)
    pool = PaddedPool(upstream=fake)
    kept = []
    for stream in range(100, 100 + ROUNDS):
        buffer = pool.allocate(4096, gpu, stream)
        fake.work(stream, buffer.pointer)
        kept = [*kept[-1:], buffer]  # one outlives its stream
        del buffer
        fake.destroy(stream)
    kept.clear()
    pool.trim()
    assert pool.stats().moves > ROUNDS / 2
    assert fake.held == 0


def test_a_retired_streams_blocks_go_upstream_after_its_work(pool, fake, gpu):
    kept = pool.allocate(4096, gpu, 11)
    fake.work(11, kept.pointer)
    fake.work(11, pool.allocate(4096, gpu, 11).pointer)
    pool.retire_stream(gpu, 11)
    fake.destroy(11)
    assert pool.stats().bytes_held == 4096
    del kept
    pool.trim()
    assert fake.held == 0


def test_upstream_that_needs_idle_memory_gets_it_idle(fake, gpu):
    fake.idle_before_free = True
    pool = PaddedPool(upstream=fake, limit=8192)
    for round_ in range(ROUNDS):
        stream = 11 + round_ % 3
        fake.work(stream, pool.allocate((4096, 6144, 8192)[round_ % 3], gpu, stream).pointer)
    pool.trim()
    assert fake.held == 0


def test_retiring_an_unknown_stream_does_nothing(pool, fake, gpu):
    pool.retire_stream(gpu, 77)
    assert fake.calls == []


def in_another_thread(call) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


def test_each_thread_has_its_own_per_thread_stream(pool, gpu):
    def allocate() -> None:
        pointers.append(pool.allocate(512, gpu, PER_THREAD_STREAM).pointer)

    pointers: list[int] = []
    allocate()
    for _ in range(5):
        in_another_thread(allocate)
    allocate()
    assert pool.stats().upstream_allocations == 6
    assert pointers[0] == pointers[-1]


def test_retiring_the_per_thread_stream_retires_the_calling_threads(pool, fake, gpu):
    pool.allocate(512, gpu, PER_THREAD_STREAM)
    in_another_thread(lambda: pool.allocate(4096, gpu, PER_THREAD_STREAM))
    pool.retire_stream(gpu, PER_THREAD_STREAM)
    assert fake.calls == ["alloc", "alloc", "record", "synchronize", "free"]
    assert pool.stats().bytes_held == 4096


def test_use_on_another_threads_per_thread_stream_is_waited_for(pool, fake, gpu):
    box = [pool.allocate(512, gpu, PER_THREAD_STREAM)]
    box[0].used_on(PER_THREAD_STREAM)
    assert "record" not in fake.calls
    in_another_thread(lambda: box[0].used_on(PER_THREAD_STREAM))
    box.clear()
    pool.allocate(512, gpu, PER_THREAD_STREAM)
    assert fake.calls == ["alloc", "record", "wait"]


def test_random_streams_sizes_and_lifetimes_never_collide(make_fake, gpu):
    fake = make_fake(capacity=64 * 1024)
    pool = PaddedPool(upstream=fake)
    draw = random.Random(4)
    alive: list[tuple[int, object]] = []
    refused = 0
    for _ in range(4000):
        stream = draw.randrange(11, 16)
        try:
            buffer = pool.allocate(draw.choice((512, 700, 5000, 9000)), gpu, stream)
        except OutOfMemoryError:
            refused += 1
            alive.clear()
            continue
        fake.work(stream, buffer.pointer)
        if draw.random() < 0.2:
            other = draw.randrange(11, 16)
            fake.wait_event(fake.record_event(gpu, stream), gpu, other)
            fake.work(other, buffer.pointer)
            buffer.used_on(other)
        if draw.random() < 0.5:
            alive.append((stream, buffer))
        if len(alive) > 8:
            alive.pop(draw.randrange(len(alive)))
        if draw.random() < 0.01:
            pool.trim()
    assert pool.stats().moves > 0
    alive.clear()
    del buffer
    pool.trim()
    assert fake.held == 0
