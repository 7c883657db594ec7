"""Public faults of padded memory, on the CPU: vllm #45741 (stale padding) and qkan #26 (views at odd addresses)."""

from __future__ import annotations

import numpy as np
import pytest

import fp4rt
from fp4rt.layout import LAYOUTS
from fp4rt.pool import FILLS, PaddedPool, use_pool
from fp4rt.pool.upstream import host_bytes

ROUNDS = 20
SCALE_BYTE = 0x23  # e4m3(1/6 rounded up to 0.171875)
OFFSETS = {0, 1, 2, 16, 17, 18, 32, 33, 34}  # rows 0, 1, 2 of the tile, block columns 0, 1, 2


def poison(pool: PaddedPool, *sizes: int) -> None:
    """Leaves blocks full of e4m3 NaN for the next allocations of these sizes."""
    buffers = [pool.allocate(size) for size in sizes for _ in range(2)]
    for buffer in buffers:
        host_bytes(buffer.pointer, buffer.nbytes)[:] = 0x7F


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_stale_memory_never_shows_in_a_swizzled_scale_buffer(fill, library):
    x = np.ones((3, 48), np.float32)
    if library == "torch":
        x = pytest.importorskip("torch", reason="needs torch").from_numpy(x)
    with use_pool(PaddedPool(fill)) as pool:
        for _ in range(ROUNDS):
            poison(pool, 512, 72)
            q = fp4rt.quantize(x, 1.0, layout="128x4")
            scales = np.asarray(q.scales).reshape(-1)
            assert (np.asarray(q.data) == 0x77).all()
            assert scales.shape == (512,)
            assert {int(i) for i in np.flatnonzero(scales)} == OFFSETS
            assert set(scales[list(OFFSETS)].tolist()) == {SCALE_BYTE}
            assert (np.asarray(fp4rt.dequantize(q)) == 1.03125).all()
            del q, scales
        assert pool.stats().reuses > ROUNDS


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@pytest.mark.parametrize("m, n, padded_n", [(3, 48, 48), (150, 80, 96), (1, 7, 32), (9, 200, 256)])
def test_bytes_of_a_result_are_the_same_under_every_fill_and_over_poison(layout, m, n, padded_n):
    x = np.random.default_rng(7).normal(size=(m, n)).astype(np.float32)
    expected = fp4rt.quantize(x, layout=layout, padded_n=padded_n)
    for fill in FILLS:
        with use_pool(PaddedPool(fill)) as pool:
            poison(pool, expected.data.size, expected.scales.size)
            q = fp4rt.quantize(x, layout=layout, padded_n=padded_n)
            assert q.data.tobytes() == expected.data.tobytes()
            assert q.scales.tobytes() == expected.scales.tobytes()
    out = fp4rt.QuantizedTensor(
        np.full_like(expected.data, 0x7F),
        np.full_like(expected.scales, 0x7F),
        np.full(1, np.nan, np.float32),
        (m, n),
        layout,
        padded_n,
    )
    fp4rt.quantize(x, layout=layout, padded_n=padded_n, out=out)
    assert out.data.tobytes() == expected.data.tobytes()
    assert out.scales.tobytes() == expected.scales.tobytes()


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_a_product_does_not_depend_on_padding_whatever_it_holds(layout):
    rng = np.random.default_rng(3)
    a = fp4rt.quantize(rng.normal(size=(5, 40)).astype(np.float32), layout=layout, padded_n=64)
    b = fp4rt.quantize(rng.normal(size=(6, 40)).astype(np.float32), layout=layout, padded_n=48)
    expected = fp4rt.matmul(a, b, out_dtype="float32")
    for operand in (a, b):
        m, n = operand.shape
        mask = fp4rt.pool.scale_tag(layout, m, n, operand.padded_n).padding_mask()
        operand.scales.reshape(-1)[mask] = 0x7F
        operand.data[:, 20:] = 0x77
    assert fp4rt.matmul(a, b, out_dtype="float32").tobytes() == expected.tobytes()


def test_zero_policy_zeroes_scales_and_data_before_each_call():
    x = np.ones((3, 48), np.float32)
    with use_pool(PaddedPool("zero")) as pool:
        for _ in range(3):
            fp4rt.quantize(x, 1.0)
    stats = pool.stats()
    assert stats.zero_fills == 6
    assert stats.bytes_zeroed == 3 * (512 + 72)
    assert stats.zero_fills_avoided == 0, "the user had the arrays, so nobody knows what the padding holds"


def test_views_that_start_at_any_byte_give_the_same_results():
    base = np.zeros(2 * 32 + 1, np.float16)
    x = base[1:].reshape(2, 32)
    x[:] = 6
    q = fp4rt.quantize(x, 1.0)
    assert (q.data == 0x77).all()
    assert set(q.scales.reshape(-1)[[0, 1, 16, 17]].tolist()) == {0x38}
    odd = [np.zeros(a.size + 1, np.uint8)[1:].reshape(a.shape) for a in (q.data, q.scales)]
    odd[0][:], odd[1][:] = q.data, q.scales
    moved = fp4rt.QuantizedTensor(*odd, q.global_scale, q.shape, q.layout, q.padded_n)
    for _ in range(2):
        assert (fp4rt.dequantize(moved) == 6).all()
        assert (fp4rt.matmul(moved, moved, out_dtype="float32") == 32 * 36).all()
