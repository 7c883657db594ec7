"""Public faults of memory and streams, on a device: stale padding (B01), late producers (B16), writes outside (B26),
views at odd addresses (B33).
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import fp4rt
from fp4rt import interop
from fp4rt.device import Device
from fp4rt.layout import LAYOUTS
from fp4rt.pool import FILLS, PaddedPool, use_pool

pytestmark = pytest.mark.gpu

cupy = pytest.importorskip("cupy", reason="needs cupy")

GPU = Device("cuda", 0)
OFFSETS = [0, 1, 2, 16, 17, 18, 32, 33, 34]
CANARY_BYTES, CANARY = 64 * 1024, 0xA5


@pytest.fixture(params=["cupy", "torch"])
def library(request):
    if request.param == "torch":
        torch = pytest.importorskip("torch", reason="needs torch")
        if not torch.cuda.is_available():
            pytest.skip("needs torch with CUDA")
    return request.param


def as_library(array, library: str):
    return array if library == "cupy" else pytest.importorskip("torch").from_dlpack(array)


def host(array) -> np.ndarray:
    return cupy.asnumpy(cupy.from_dlpack(array))


def poison(pool: PaddedPool, *sizes: int) -> None:
    kept = []
    for size in sizes * 2:
        kept.append(interop.from_device(pool.allocate(size, GPU), (size,), "uint8", "cupy"))
        kept[-1].fill(0x7F)


@pytest.mark.parametrize("fill", FILLS)
def test_stale_memory_never_shows_in_a_swizzled_scale_buffer(fill, library):
    x = as_library(cupy.ones((3, 48), cupy.float32), library)
    with use_pool(PaddedPool(fill)) as pool:
        for _ in range(20):
            poison(pool, 512, 72)
            q = fp4rt.quantize(x, 1.0, layout="128x4")
            scales = host(q.scales).reshape(-1)
            assert (host(q.data) == 0x77).all()
            assert np.flatnonzero(scales).tolist() == OFFSETS
            assert set(scales[OFFSETS].tolist()) == {0x23}
            assert (host(fp4rt.dequantize(q)) == 1.03125).all()
            del q
        assert pool.stats().reuses > 20


class Exporter:
    """An array that can do nothing but DLPack."""

    def __init__(self, array) -> None:
        self.array = array

    def __dlpack__(self, **keywords):
        return self.array.__dlpack__(**keywords)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def test_a_late_producer_is_waited_for_and_a_third_stream_waits_for_us(library):
    source = 'extern "C" __global__ void spin(long long n) { long long t = clock64(); while (clock64() - t < n) {} }'
    spin = cupy.RawKernel(source, "spin")
    producer, ours, reader = (cupy.cuda.Stream(non_blocking=True) for _ in range(3))
    x = cupy.zeros((1024, 1024), cupy.float16)
    cycles = np.int64(20e-3 * 1.7e9)
    wrong = 0
    for _ in range(200):
        x.fill(0)
        cupy.cuda.Device().synchronize()
        with producer:
            spin((1,), (1,), (cycles,))
            x.fill(6)
            q = quantize_from(x, library, producer, ours)
        with reader:
            reader.wait_event(ours.record())
            wrong += int((cupy.from_dlpack(q.data) != 0x77).any()) + int((cupy.from_dlpack(q.scales) != 0x38).any())
    assert wrong == 0


def quantize_from(x, library: str, producer, ours):
    """Quantize on stream ``ours`` what ``library`` exports from its current stream, the producer's."""
    if library == "cupy":
        return fp4rt.quantize(Exporter(x), 1.0, stream=ours)
    torch = pytest.importorskip("torch")
    with torch.cuda.stream(torch.cuda.ExternalStream(producer.ptr)):
        return fp4rt.quantize(Exporter(torch.from_dlpack(x)), 1.0, stream=ours)


def guarded(nbytes: int, shape: tuple[int, ...]):
    """(memory with canaries around, the array inside)."""
    memory = cupy.full(nbytes + 2 * CANARY_BYTES, CANARY, cupy.uint8)
    return memory, memory[CANARY_BYTES : CANARY_BYTES + nbytes].reshape(shape)


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@pytest.mark.parametrize("m, n", [(1030, 512), *itertools.product([1, 7, 1024, 1025, 1151], [16, 48, 512, 528])])
def test_nothing_outside_of_the_outputs_is_written(layout, m, n):
    x = cupy.full((m, n), 6, cupy.float16)
    shape = LAYOUTS[layout].shape(m, n // 16)
    around_data, data = guarded(m * n // 2, (m, n // 2))
    around_scales, scales = guarded(shape[0] * shape[1], shape)
    out = fp4rt.QuantizedTensor(data, scales, cupy.zeros(1, cupy.float32), (m, n), layout)
    fp4rt.quantize(x, 1.0, layout=layout, out=out)
    assert bool((data == 0x77).all())
    if layout == "linear":
        assert scales.size == m * (n // 16)
        assert bool((scales == 0x38).all())
    for memory in (around_data, around_scales):
        assert bool((memory[:CANARY_BYTES] == CANARY).all())
        assert bool((memory[-CANARY_BYTES:] == CANARY).all())


def test_views_that_start_at_any_byte_give_the_same_results():
    x = cupy.zeros(2 * 32 + 1, cupy.float16)[1:].reshape(2, 32)
    x[:] = 6
    for layout in LAYOUTS:
        q = fp4rt.quantize(x, 1.0, layout=layout)
        assert bool((q.data == 0x77).all())
        odd = []
        for part in (q.data, q.scales):
            odd.append(cupy.zeros(part.size + 1, cupy.uint8)[1:].reshape(part.shape))
            odd[-1][...] = part
        moved = fp4rt.QuantizedTensor(*odd, q.global_scale, q.shape, layout)
        for _ in range(2):
            assert bool((fp4rt.dequantize(moved) == 6).all())
        out = fp4rt.QuantizedTensor(*odd, q.global_scale.copy(), q.shape, layout)
        fp4rt.quantize(x, 1.0, layout=layout, out=out)
        assert bool((out.scales == q.scales).all())
        assert bool((out.data == q.data).all())


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_views_that_start_at_any_byte_can_be_multiplied(layout):
    x = cupy.full((2, 32), 6, cupy.float16)
    q = fp4rt.quantize(x, 1.0, layout=layout)
    odd = [cupy.zeros(p.size + 1, cupy.uint8)[1:].reshape(p.shape) for p in (q.data, q.scales)]
    odd[0][...], odd[1][...] = q.data, q.scales
    moved = fp4rt.QuantizedTensor(*odd, q.global_scale, q.shape, layout)
    for _ in range(2):
        assert bool((fp4rt.matmul(moved, moved, out_dtype="float32") == 32 * 36).all())


def test_a_captured_quantization_keeps_its_memory_and_repeats():
    stream = cupy.cuda.Stream(non_blocking=True)
    x = cupy.full((150, 80), 6, cupy.float16)
    with use_pool(PaddedPool("zero")) as pool, stream:
        fp4rt.quantize(x, 1.0)  # compiles, and warms the pool
        stream.synchronize()
        stream.begin_capture()
        q = fp4rt.quantize(x, 1.0)
        graph = stream.end_capture()
        expected = q.scales.data.ptr
        for value, byte in ((6, 0x38), (3, 0x30), (6, 0x38)):
            x.fill(value)
            graph.launch(stream)
            stream.synchronize()
            assert int(q.scales.reshape(-1)[0]) == byte
        del q
        assert expected not in [fp4rt.quantize(x, 1.0).scales.data.ptr for _ in range(3)]
        assert pool.stats().bytes_captured > 0
