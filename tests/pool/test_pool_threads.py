"""8 threads x 10,000 allocations: no double hand-out, no leak, statistics that add up."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import threading

import pytest

from fp4rt.pool import HostUpstream, PaddedPool

THREADS, ROUNDS = 8, 10_000


def hammer(pool: PaddedPool, device, stream_of, seed: int, owners: dict, problems: list) -> None:
    draw = random.Random(seed)
    alive = []
    me = object()
    for _ in range(ROUNDS):
        buffer = pool.allocate(draw.choice((1, 512, 513, 4000)), device, stream_of(draw))
        pointer = buffer.contract_pointer
        if owners.setdefault(pointer, me) is not me or any(pointer == b.contract_pointer for b in alive):
            problems.append(f"{pointer:#x} is handed out twice")
        alive.append(buffer)
        del buffer
        if len(alive) > 4:
            victim = alive.pop(draw.randrange(len(alive)))
            del owners[victim.contract_pointer]
            del victim
    for buffer in alive:
        del owners[buffer.contract_pointer]


@pytest.mark.parametrize("streams", ["one stream", "a stream each", "any stream"])
def test_threads_never_get_the_same_block(make_fake, gpu, streams):
    fake = make_fake()
    pool = PaddedPool(upstream=fake)
    owners, problems = {}, []
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # switch inside the pool, not only between calls
    try:
        threads = []
        for i in range(THREADS):
            stream_of = {
                "one stream": lambda draw: 1,
                "a stream each": lambda draw, i=i: 11 + i,
                "any stream": lambda draw: draw.randrange(11, 14),
            }[streams]
            threads.append(threading.Thread(target=hammer, args=(pool, gpu, stream_of, i, owners, problems)))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    gc.collect()
    assert problems == []
    assert owners == {}
    stats = pool.stats()
    assert stats.allocations == THREADS * ROUNDS
    assert stats.reuses + stats.upstream_allocations == stats.allocations
    assert stats.bytes_in_use == 0
    assert stats.bytes_held == fake.held
    assert pool.trim() == stats.bytes_held
    assert fake.held == 0


def test_buffers_that_die_in_the_garbage_collector_come_back(pool, gpu):
    class Cycle:
        pass

    for _ in range(200):
        cycle = Cycle()
        cycle.self, cycle.buffer = cycle, pool.allocate(512, gpu)
        del cycle
    gc.collect()
    stats = pool.stats()
    assert stats.bytes_in_use == 0
    assert stats.allocations == 200


def test_a_buffer_may_die_in_another_thread(pool, gpu):
    boxes = [[pool.allocate(512, gpu)] for _ in range(100)]
    thread = threading.Thread(target=lambda: [box.clear() for box in boxes])
    thread.start()
    thread.join()
    assert pool.stats().bytes_in_use == 0


def test_a_finalizer_may_allocate(pool, gpu):
    class Last:
        def __del__(self):
            pool.allocate(512, gpu)
            pool.stats()

    for _ in range(50):
        last = Last()
        last.self = last
        del last
    gc.collect()
    assert pool.stats().allocations == 50


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_leaves_no_lock_behind():
    pool, raised = PaddedPool(), 0
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for turn in range(150):
            try:  # again and again: where it comes while a buffer dies, it is lost
                signal.setitimer(signal.ITIMER_REAL, 1e-4 + turn % 13 * 1e-5, 0.01)
                while True:
                    pool.allocate(100)
            except KeyboardInterrupt:
                signal.setitimer(signal.ITIMER_REAL, 0)
                raised += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert raised == 150
    got = []
    thread = threading.Thread(target=lambda: got.append(pool.allocate(100)), daemon=True)
    thread.start()
    thread.join(20)
    assert got


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_child_allocates_though_another_thread_was_allocating_when_it_was_forked():
    inside, go_on = threading.Event(), threading.Event()

    class Slow(HostUpstream):
        def alloc(self, *args):
            if threading.current_thread() is not threading.main_thread():
                inside.set()
                go_on.wait(20)
            return super().alloc(*args)

    pool = PaddedPool(upstream=Slow())
    thread = threading.Thread(target=pool.allocate, args=(100,))
    thread.start()
    assert inside.wait(20)
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # ends it where it hangs
        pool.allocate(5000)
        os._exit(0)
    go_on.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0
