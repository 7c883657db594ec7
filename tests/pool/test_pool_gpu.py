"""The pool on a device: upstreams, stream order with late kernels, captures, threads, lifetimes over DLPack."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from fp4rt import interop
from fp4rt.device import Device
from fp4rt.errors import OutOfMemoryError
from fp4rt.pool import PaddedPool, scale_tag

pytestmark = pytest.mark.gpu

cupy = pytest.importorskip("cupy", reason="needs cupy")

GPU = Device("cuda", 0)
ROUNDS = 200
NBYTES = 1 << 16
LATE_CYCLES = 1_000_000  # about half a millisecond: long beside a launch
TAG = scale_tag("128x4", 3, 48, 48)


@pytest.fixture(scope="module")
def spin():
    source = 'extern "C" __global__ void spin(long long n) { long long t = clock64(); while (clock64() - t < n) {} }'
    kernel = cupy.RawKernel(source, "spin")
    return lambda cycles=LATE_CYCLES: kernel((1,), (1,), (np.int64(cycles),))


def new_stream():
    return cupy.cuda.Stream(non_blocking=True)


def array_of(buffer, nbytes: int = NBYTES):
    return interop.from_device(buffer, (nbytes,), "uint8", "cupy")


def upstreams():
    from fp4rt.cuda.memory import CupyUpstream

    yield "cupy's default", None
    yield "MemoryPool", cupy.cuda.MemoryPool()
    yield "MemoryAsyncPool", cupy.cuda.MemoryAsyncPool()
    yield "CupyUpstream", CupyUpstream(cupy.cuda.MemoryPool())


def torch_upstream():
    torch = pytest.importorskip("torch", reason="needs torch")
    if not torch.cuda.is_available():
        pytest.skip("needs torch with CUDA")
    from fp4rt.cuda.memory import TorchUpstream

    return TorchUpstream()


@pytest.mark.parametrize("name", ["cupy's default", "MemoryPool", "MemoryAsyncPool", "CupyUpstream", "torch"])
def test_every_upstream_serves_allocates_reuses_and_takes_back(name):
    upstream = torch_upstream() if name == "torch" else dict(upstreams())[name]
    pool = PaddedPool("poison", upstream=upstream)
    stream = new_stream()
    for _ in range(10):
        buffer = pool.allocate(NBYTES, GPU, stream.ptr)
        array = array_of(buffer)
        stream.synchronize()
        assert bool((array == 0xFF).all())
        del buffer, array
    stats = pool.stats()
    assert (stats.reuses, stats.upstream_allocations, stats.poison_fills) == (9, 1, 10)
    assert pool.trim() == stats.bytes_held
    assert pool.stats().bytes_held == 0


def test_memory_given_back_returns_to_cupys_pool():
    upstream = cupy.cuda.MemoryPool()
    pool = PaddedPool(upstream=upstream)
    pool.allocate(NBYTES, GPU)
    assert upstream.used_bytes() == NBYTES
    pool.trim()
    assert upstream.used_bytes() == 0
    assert upstream.free_bytes() == NBYTES


def test_a_full_cupy_pool_is_a_readable_error():
    upstream = cupy.cuda.MemoryPool()
    upstream.set_limit(size=1 << 20)
    with pytest.raises(OutOfMemoryError, match=r"no 4 MiB for a request of 4194304 bytes on cuda:0.*Drop results") as e:
        PaddedPool(upstream=upstream).allocate(4 << 20, GPU)
    assert "OutOfMemoryError" in type(e.value.__cause__).__name__


def late_read(spin, stream, array, value: int, seen) -> None:
    """Writes ``value``, waits long, reads back into ``seen``: wrong if another stream wrote meanwhile.

    Nothing is allocated: taking memory from the driver may wait for the device, and hide what is looked for.
    """
    with stream:
        array.fill(value)
        spin()
        seen[...] = array


@pytest.fixture
def seen(spin):
    """Memory for what each round reads, after a first late read that compiles what is needed."""
    memory, stream = cupy.zeros((ROUNDS, NBYTES), cupy.uint8), new_stream()
    late_read(spin, stream, array_of(PaddedPool().allocate(NBYTES, GPU, stream.ptr)), 9, memory[0])
    cupy.cuda.Device().synchronize()
    return memory


def wrong_rounds(seen) -> list[int]:
    """Rounds whose memory was overwritten before it was read."""
    cupy.cuda.Device().synchronize()
    values = cupy.asnumpy(seen)
    return [i for i in range(ROUNDS) if not (values[i] == i % 251).all()]


def test_the_late_reader_sees_a_writer_that_does_not_wait(spin, seen):
    a, b = new_stream(), new_stream()
    array = array_of(PaddedPool().allocate(NBYTES, GPU, a.ptr))
    for round_ in range(ROUNDS):
        late_read(spin, a, array, round_ % 251, seen[round_])
        with b:
            array.fill(252)
        cupy.cuda.Device().synchronize()  # else the host runs ahead, and b is done before a starts
    assert len(wrong_rounds(seen)) > ROUNDS / 2, "the tests below could not fail"


def test_a_block_moved_to_another_stream_waits_for_the_first(spin, seen):
    pool = PaddedPool(limit=NBYTES)
    streams = [new_stream() for _ in range(3)]
    for round_ in range(ROUNDS):
        stream = streams[round_ % 3]
        late_read(spin, stream, array_of(pool.allocate(NBYTES, GPU, stream.ptr)), round_ % 251, seen[round_])
    assert wrong_rounds(seen) == []
    assert pool.stats().moves == ROUNDS - 1


def test_use_on_another_stream_is_waited_for_before_the_next_use(spin, seen):
    pool = PaddedPool()
    producer, consumer = new_stream(), new_stream()
    for round_ in range(ROUNDS):
        buffer = pool.allocate(NBYTES, GPU, producer.ptr)
        array = array_of(buffer)
        with producer:
            array.fill(round_ % 251)
        consumer.wait_event(producer.record())
        with consumer:
            spin(LATE_CYCLES // 4)
            seen[round_][...] = array
        buffer.used_on(consumer.ptr)
        del buffer, array
    assert wrong_rounds(seen) == []
    assert pool.stats().upstream_allocations == 1


def test_streams_that_are_destroyed_while_the_pool_has_blocks_of_theirs_do_no_harm(spin, seen):
    pool, streams = PaddedPool(limit=NBYTES, upstream=cupy.cuda.MemoryAsyncPool()), []
    for round_ in range(ROUNDS):
        streams = [*streams[-1:], new_stream()]  # destroys the one before the last, whose work is still queued
        late_read(spin, streams[-1], array_of(pool.allocate(NBYTES, GPU, streams[-1].ptr)), round_ % 251, seen[round_])
    streams.clear()
    assert wrong_rounds(seen) == []
    pool.trim()


def test_fill_is_in_the_streams_order(spin):
    pool, stream = PaddedPool("zero"), new_stream()
    for _ in range(ROUNDS):
        with stream:
            spin(LATE_CYCLES // 10)
            array_of(pool.allocate(512, GPU, stream.ptr, TAG), 512).fill(7)  # late, then the next zero fill
    array = array_of(pool.allocate(512, GPU, stream.ptr, TAG), 512)
    stream.synchronize()
    assert not bool(array.any())
    assert pool.stats().zero_fills == ROUNDS + 1


def capture(stream, function):
    with stream:
        stream.begin_capture()
        try:
            kept = function()
        finally:
            graph = stream.end_capture()
    return graph, kept


@pytest.mark.parametrize("warm", [True, False], ids=["warm pool", "cold pool"])
def test_allocations_in_a_capture_belong_to_the_graph(warm):
    pool, stream = PaddedPool("zero", upstream=cupy.cuda.MemoryPool()), new_stream()
    result = cupy.zeros(512, cupy.uint8)

    def work():
        array = array_of(pool.allocate(512, GPU, stream.ptr, TAG), 512)  # the fill becomes a node
        array += 1
        result[:] = array
        return array.data.ptr

    if warm:
        with stream:
            work()
        stream.synchronize()
    graph, pointer = capture(stream, work)
    for _ in range(3):
        result.fill(9)
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        assert bool((result == 1).all())
    others = [pool.allocate(512, GPU, stream.ptr) for _ in range(4)]
    assert pointer not in [b.pointer for b in others]
    assert pool.stats().bytes_captured == 512
    del graph
    assert pool.release_captures() == 512


def test_a_second_capture_gets_memory_of_its_own_and_one_capture_reuses():
    pool, stream = PaddedPool(upstream=cupy.cuda.MemoryPool()), new_stream()

    def work():
        pointers = []
        for _ in range(3):
            array = array_of(pool.allocate(512, GPU, stream.ptr), 512)
            array.fill(1)
            pointers.append(array.data.ptr)
            del array
        return set(pointers)

    _, first = capture(stream, work)
    _, second = capture(stream, work)
    assert (len(first), len(second)) == (1, 1)
    assert not first & second


def test_asynchronous_pool_refuses_to_grow_inside_a_capture():
    pool, stream = PaddedPool(upstream=cupy.cuda.MemoryAsyncPool()), new_stream()

    def work():
        with pytest.raises(OutOfMemoryError, match="A graph is being captured: make the same calls once before it"):
            pool.allocate(512, GPU, stream.ptr)
        array_of(warm, 512).fill(3)

    warm = pool.allocate(512, GPU, stream.ptr)
    array_of(warm, 512).fill(3)
    stream.synchronize()
    graph, _ = capture(stream, work)
    graph.launch(stream)
    stream.synchronize()


@pytest.mark.parametrize("mode", ["Global", "ThreadLocal", "Relaxed"])
def test_a_capture_holds_blocks_of_others_back_until_it_ends_even_if_its_stream_is_destroyed(mode):
    stream, other = new_stream(), new_stream()
    pool = PaddedPool(upstream=cupy.cuda.MemoryPool(), limit=2 * NBYTES)
    result = cupy.zeros(NBYTES, cupy.uint8)
    free = pool.allocate(NBYTES, GPU, stream.ptr)
    with stream:
        stream.begin_capture(getattr(cupy.cuda.runtime, f"streamCaptureMode{mode}"))
        array = array_of(pool.allocate(NBYTES, GPU, stream.ptr))
        array.fill(5)
        free.used_on(other.ptr)  # so that it cannot be given back without waiting
        del free
        with pytest.raises(OutOfMemoryError, match="A graph is being captured"):
            pool.allocate(NBYTES, GPU, other.ptr)
        result[...] = array
        graph = stream.end_capture()
    del stream
    assert pool.allocate(NBYTES, GPU, other.ptr).nbytes == NBYTES
    assert pool.stats().moves == 1
    graph.launch(other)
    other.synchronize()
    assert bool((result == 5).all())


@pytest.mark.parametrize("streams", ["one stream", "a stream each"])
def test_threads_never_get_the_same_block_of_the_device(streams):
    pool, owners, problems = PaddedPool(upstream=cupy.cuda.MemoryPool()), {}, []
    shared = new_stream()
    threads_count, rounds = 8, 10_000

    def hammer(seed: int) -> None:
        cupy.cuda.Device(0).use()
        stream = shared if streams == "one stream" else new_stream()
        draw, me, alive = np.random.default_rng(seed), object(), []
        sizes, victims = draw.choice((1, 512, 513, 4000), rounds), draw.integers(0, 5, rounds)
        for i in range(rounds):
            buffer = pool.allocate(int(sizes[i]), GPU, stream.ptr)
            if owners.setdefault(buffer.contract_pointer, me) is not me:
                problems.append(buffer.contract_pointer)
            alive.append(buffer)
            if len(alive) > 4:
                victim = alive.pop(int(victims[i]))
                del owners[victim.contract_pointer]
                del victim
            del buffer
        for buffer in alive:
            del owners[buffer.contract_pointer]

    threads = [threading.Thread(target=hammer, args=(i,)) for i in range(threads_count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    stats = pool.stats()
    assert stats.allocations == threads_count * rounds == stats.reuses + stats.upstream_allocations
    assert stats.bytes_in_use == 0
    assert pool.trim() == stats.bytes_held


# Lifetime over DLPack.


@pytest.fixture(params=["cupy", "torch"])
def library(request):
    if request.param == "torch":
        torch = pytest.importorskip("torch", reason="needs torch")
        if not torch.cuda.is_available():
            pytest.skip("needs torch with CUDA")
    return request.param


def filled(pool: PaddedPool, library: str):
    array = interop.from_device(pool.allocate(NBYTES, GPU), (NBYTES,), "uint8", library)
    array[:] = 0x38
    return array


def scribble(pool: PaddedPool) -> None:
    for _ in range(2):
        array_of(pool.allocate(NBYTES, GPU)).fill(0x7F)


@pytest.mark.parametrize("case", ["alone", "view", "export", "export twice", "never consumed"])
def test_memory_is_not_reused_while_any_view_lives(library, case):
    pool = PaddedPool()
    for _ in range(ROUNDS):
        array = filled(pool, library)
        if case == "view":
            array = array.reshape(256, 256)[3:9, ::2]
        elif case == "export":
            array = cupy.from_dlpack(array)
        elif case == "export twice":
            array, other = cupy.from_dlpack(array), cupy.from_dlpack(array)
            del other
        elif case == "never consumed":
            capsule = array.__dlpack__()
            del array
            scribble(pool)
            assert pool.stats().bytes_in_use == NBYTES
            del capsule
            assert pool.stats().bytes_in_use == 0
            continue
        scribble(pool)
        assert pool.stats().bytes_in_use == NBYTES
        assert bool((array == 0x38).all())
        del array
        assert pool.stats().bytes_in_use == 0
    assert pool.stats().upstream_allocations <= 3
