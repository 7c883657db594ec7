"""Streams, graphs, threads and devices: work goes where the array's library works, and nothing waits."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import fp4rt

pytestmark = pytest.mark.gpu

SPIN = r"""
extern "C" __global__ void spin(long long nanoseconds) {
    long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); while (now - start < nanoseconds);
}"""


@pytest.fixture(scope="module")
def spin(device):
    kernel = device.cupy.RawKernel(SPIN, "spin")
    return lambda milliseconds: kernel((1,), (1,), (np.int64(milliseconds * 1_000_000),))


def test_work_goes_to_the_current_stream_of_the_array_s_library(device, spin):
    cupy = device.cupy
    x = cupy.zeros((256, 1024), np.float16)
    stream = cupy.cuda.Stream(non_blocking=True)

    def work():
        x[...] = 6
        q = fp4rt.quantize(x, 1.0)
        return q, fp4rt.quantize(x), fp4rt.dequantize(q, "float16")

    with stream:
        work()  # everything is compiled, and the stream has its memory
        stream.synchronize()
        x[...] = 0
        spin(20)
        q, auto, y = work()
    assert not stream.done
    stream.synchronize()
    assert bool((q.data == 0x77).all())
    assert float(auto.global_scale[0]) == 448.0
    assert bool((y == 6).all())


def test_torch_s_current_stream_is_used(device):
    torch = pytest.importorskip("torch")
    x = torch.zeros((256, 1024), dtype=torch.bfloat16, device="cuda")
    fp4rt.quantize(x, 1.0)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(40_000_000)
        x.fill_(6)
        q = fp4rt.quantize(x, 1.0)
    assert not stream.query()
    again = fp4rt.quantize(x, 1.0, stream=stream)
    stream.synchronize()
    assert bool((again.data == 0x77).all())
    assert bool((q.data == 0x77).all())
    assert isinstance(q.data, torch.Tensor)
    assert q.scales.dtype == torch.uint8


def test_b16_a_stream_argument_waits_for_the_producer(device, spin):
    """The producer is still writing on its own stream while the consumer quantizes on another one."""
    cupy = device.cupy
    x = cupy.zeros((1024, 1024), np.float16)
    fp4rt.quantize(x, 1.0)
    producer, consumer = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    for _ in range(50):
        with producer:
            x[...] = 0
            spin(2)
            x[...] = 6
            q = fp4rt.quantize(x, 1.0, stream=consumer)
        consumer.synchronize()
        assert bool((q.data == 0x77).all())
        assert int((q.scales == 0x38).sum()) == 1024 * 64


def test_a_stream_with_a_destroyed_ones_handle_waits_for_what_that_one_left(device, spin):
    """Its memory and counters are the other one's, by the handle."""
    cupy = device.cupy
    x, done, seen = cupy.ones((256, 1024), np.float16), cupy.zeros(1, np.int32), cupy.zeros(1, np.int32)
    fp4rt.quantize(x, 1.0)
    done[...] = seen
    for _ in range(20):
        done[...] = 0
        first = cupy.cuda.Stream(non_blocking=True)
        handle = first.ptr
        cupy.cuda.Device().synchronize()
        with first:
            fp4rt.quantize(x, 1.0)
            spin(20)
            done[...] = 1
        del first
        streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(40)]
        again = [stream for stream in streams if stream.ptr == handle]
        if again:
            break
    else:
        pytest.skip("the driver gave no handle again")
    with again[0]:
        fp4rt.quantize(x, 1.0)
        seen[...] = done
    again[0].synchronize()
    assert int(seen[0]) == 1


@pytest.mark.parametrize("automatic", [False, True])
def test_a_graph_replays_on_new_values(device, automatic):
    cupy = device.cupy
    x, stream = cupy.zeros((512, 4096), np.float16), cupy.cuda.Stream(non_blocking=True)
    scale = None if automatic else device.floats(448)
    with stream:
        x[...] = 1
        q = fp4rt.quantize(x, scale)
        y = fp4rt.dequantize(q, "float16")
        moved = fp4rt.relayout(q, "8x4")
        stream.synchronize()
        stream.begin_capture()
        fp4rt.quantize(x, scale, out=q)
        fp4rt.relayout(q, "8x4", out=moved)
        fp4rt.dequantize(moved, "float16", out=y)
        graph = stream.end_capture()
        for value in (6, 3, 1.5):
            x[...] = value
            graph.launch(stream)
            stream.synchronize()
            assert bool((y == value).all()), value
            assert float(q.global_scale[0]) == (2688 / value if automatic else 448)


def test_captured_and_eager_automatic_scales_do_not_disturb_each_other(device):
    cupy = device.cupy
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(3)]
    xs = [cupy.full((2048, 4096), value, np.float16) for value in (6, 3, 1)]
    outs = [fp4rt.quantize(x) for x in xs]
    with streams[0]:
        fp4rt.quantize(xs[0], out=outs[0])
        streams[0].synchronize()
        streams[0].begin_capture()
        fp4rt.quantize(xs[0], out=outs[0])
        graph = streams[0].end_capture()
    cupy.cuda.Device().synchronize()
    for _ in range(50):
        graph.launch(streams[1])
        for stream, x, q in list(zip(streams, xs, outs, strict=True))[1:]:
            with stream:
                fp4rt.quantize(x, out=q)
    cupy.cuda.Device().synchronize()
    assert [float(q.global_scale[0]) for q in outs] == [448, 896, 2688]


def test_out_allocates_nothing(device):
    cupy = device.cupy
    x, scale = cupy.full((512, 1024), 6, np.float16), device.floats(1)
    pool = fp4rt.PaddedPool()
    with fp4rt.use_pool(pool):
        q, y = fp4rt.quantize(x, scale), cupy.empty((512, 1024), np.float16)
        before, held = pool.stats().allocations, cupy.get_default_memory_pool().used_bytes()
        for _ in range(5):
            fp4rt.quantize(x, scale, out=q)
            fp4rt.quantize(x, out=q)
            fp4rt.dequantize(q, "float16", out=y)
        assert pool.stats().allocations == before
        assert cupy.get_default_memory_pool().used_bytes() == held


def test_threads_share_kernels_and_streams_apart(device, random_bits):
    cupy = device.cupy
    bits = random_bits(np.random.default_rng(1), 300, 1024, "float16", special=0)
    wanted = device.host(fp4rt.quantize(device.array(bits, "float16")).data)
    failures = []

    def work():
        try:
            with cupy.cuda.Stream(non_blocking=True) as stream:
                for _ in range(20):
                    q = fp4rt.quantize(device.array(bits, "float16"))
                    stream.synchronize()
                    if device.host(q.data).tobytes() != wanted.tobytes():
                        failures.append("other bytes")
        except Exception as error:
            failures.append(repr(error))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_results_come_back_in_the_library_of_the_input(device):
    torch = pytest.importorskip("torch")
    x = torch.randn(130, 96, device="cuda", dtype=torch.float16)
    q = fp4rt.quantize(x)
    for part in (q.data, q.scales, q.global_scale, fp4rt.dequantize(q, "bfloat16"), fp4rt.global_scale(x)):
        assert isinstance(part, torch.Tensor)
        assert part.device == x.device
    assert fp4rt.dequantize(q, "bfloat16").dtype == torch.bfloat16
    ours = fp4rt.quantize(device.cupy.asarray(x))
    assert isinstance(ours.data, device.cupy.ndarray)
    assert ours.data.get().tobytes() == q.data.cpu().numpy().tobytes()


def test_a_device_array_that_starts_inside_an_element_is_refused(device):
    from fp4rt.errors import ShapeError

    cupy = device.cupy
    memory = cupy.zeros(4 * 64 + 8, np.uint8)
    odd = cupy.ndarray((4, 32), np.float16, cupy.cuda.MemoryPointer(memory.data.mem, 1))
    with pytest.raises(ShapeError, match="starts 1 byte into an element of float16"):
        fp4rt.quantize(odd, 1.0)


def test_a_bad_launch_names_the_kernel_and_the_grid(device):
    from fp4rt.cuda.quantizers.relayout import choose_relayout
    from fp4rt.errors import BackendUnavailable
    from fp4rt.layout import LAYOUTS

    launch = choose_relayout(4, 64, 64, LAYOUTS["linear"], LAYOUTS["8x4"], 0)
    kernel = launch.spec.on(0)
    with pytest.raises(BackendUnavailable, match=r"relayout of kernels/relayout\.cu .* block \(2048, 1, 1\)"):
        kernel.launch((1, 1, 1), (2048, 1, 1), b"\0" * 128, 0)
