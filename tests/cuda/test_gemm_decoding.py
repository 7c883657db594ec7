"""Large products whose blocks decode NVFP4 activations among themselves: the bits of a product behind a pass."""

from __future__ import annotations

import numpy as np
import pytest

import fp4rt
from fp4rt.cuda.gemm.hopper import PrefillTile
from fp4rt.layout import LAYOUTS
from tests.cuda import gemm_cases as cases

pytestmark = pytest.mark.gpu

SHARING_TOKENS = PrefillTile(256, 1, 8, 4, 2, 4, cluster=2, one_piece=True, decodes=True)
SINGLE = PrefillTile(128, 1, 8, 4, 2, 4, one_piece=True, decodes=True)
PAIRED = PrefillTile(128, 1, 8, 4, 2, 4, stage_chunks=2, one_piece=True, decodes=True)
REPEATS = 200
SPIN = r"""
extern "C" __global__ void spin(long long cycles) {
    const long long begin = clock64();
    while (clock64() - begin < cycles) {}
}
"""


@pytest.fixture
def rng():
    if not cases.has_hopper():
        pytest.skip("the Hopper kernels need sm_90a")
    return np.random.default_rng(31)


def both(a, b, tile):
    """(launch into an array, result behind a pass) of one product."""
    from fp4rt.cuda.gemm.matmul import _behind_pass, launch

    xp = cases.cupy()
    plan, left, weight = cases.plan_of_tile(a, b, tile)
    assert plan.choice.activations == "beside"
    shape = a.values.shape[0], b.values.shape[0]

    def beside(out, stream=0):
        launch(plan, left, weight, "bfloat16", None, None, out.data.ptr, stream)

    wanted = xp.empty(shape, np.uint16)
    launch(_behind_pass(plan, left, weight), left, weight, "bfloat16", None, None, wanted.data.ptr, 0)
    return beside, wanted


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tile", [SHARING_TOKENS, SINGLE, PAIRED], ids=["sharing tokens", "single", "paired"])
def test_the_bits_are_those_of_a_product_behind_a_pass(tile, layout, rng):
    xp = cases.cupy()
    for m, n, k, padded in (
        (1024, 4096, 4096, 4096),
        (1000, 4096, 528, 576),
        (70, 500, 1040, 1088),
        (300, 136, 272, 320),
    ):
        if tile.tiles(m, n) * tile.cluster > 132:
            continue  # several pieces a block
        a, b = cases.quantized(rng, m, k, layout, padded=padded, padding=(0x7F, 0xFF)), cases.quantized(rng, n, k)
        cases.check_tile(f"{layout} m={m} n={n} k={k}", a, b, tile, "bfloat16")
        beside, wanted = both(a, b, tile)
        out = xp.full(wanted.shape, 0xFFFF, np.uint16)
        for _ in range(3):
            beside(out)
            assert bool((out == wanted).all()), (m, n, k)


def test_selection_takes_it_and_bits_stay_the_same_beside_busy_multiprocessors(rng):
    """Also where so many are busy that blocks come one after the other, and those that wait must help themselves."""
    xp = cases.cupy()
    m, n, k = 1024, 4096, 4096
    a, b = cases.quantized(rng, m, k), cases.quantized(rng, n, k)
    assert "decodes=True" in fp4rt.explain(a.given, b.packed).tile
    beside, wanted = both(a, b, SHARING_TOKENS)
    spin = xp.RawKernel(SPIN, "spin")
    spin.max_dynamic_shared_size_bytes = 200 * 1024
    noise = xp.cuda.Stream(non_blocking=True)
    streams = [xp.cuda.Stream(non_blocking=True) for _ in range(2)]
    outs = [xp.zeros((m, n), np.uint16) for _ in streams]
    differing = [xp.zeros((), np.int64) for _ in streams]
    xp.cuda.Device().synchronize()
    for repeat in range(REPEATS):
        if repeat % 4 == 0:  # 30 to 126 multiprocessors have no room for a block, for about 0.2 ms
            with noise:
                spin((30 + repeat % 97,), (32,), (np.int64(300_000),), shared_mem=200 * 1024)
        for stream, out, count in zip(streams, outs, differing, strict=True):
            beside(out, stream.ptr)
            with stream:
                count += (out != wanted).sum()
    xp.cuda.Device().synchronize()
    assert [int(count) for count in differing] == [0, 0]


def test_captured_products_have_their_own_counters_or_a_pass(rng, monkeypatch):
    from fp4rt.cuda.slots import SlotTable

    xp = cases.cupy()
    m, n, k = 1024, 4096, 512
    a, b = cases.quantized(rng, m, k), cases.quantized(rng, n, k)
    beside, wanted = both(a, b, SHARING_TOKENS)
    streams = [xp.cuda.Stream(non_blocking=True) for _ in range(3)]
    for patched in (False, True):
        if patched:
            monkeypatch.setattr(SlotTable, "for_capture", lambda self: None)
        outs = [xp.zeros((m, n), np.uint16) for _ in streams]
        graphs = []
        for stream, out in zip(streams, outs, strict=True):
            beside(out, stream.ptr)  # the stream has its memory
            stream.synchronize()
            stream.begin_capture()
            beside(out, stream.ptr)
            graphs.append(stream.end_capture())
        for out in outs:
            out.fill(0)
        xp.cuda.Device().synchronize()
        for _ in range(20):  # replayed beside each other, and on streams that they were not captured on
            for graph, stream in zip(graphs, streams[1:] + streams[:1], strict=True):
                graph.launch(stream)
        xp.cuda.Device().synchronize()
        assert all(bool((out == wanted).all()) for out in outs), patched
