"""Dequantize and relayout on the device: the CPU's bits, whatever the layout, the alignment and the padding."""

from __future__ import annotations

import numpy as np
import pytest

import fp4rt
from fp4rt.format import E4M3, INPUT_DTYPES
from fp4rt.layout import LAYOUTS, block_columns, data_shape, round_up

pytestmark = pytest.mark.gpu


@pytest.fixture
def tensors(device):
    """The same random tensor on the host and on the device; padding holds anything, NaN scales among it."""

    def make(rng, m, n, padded_n, layout, global_scale=0.83, offset=0, nans=True):
        columns = block_columns(padded_n)
        data = rng.integers(0, 256, data_shape(m, padded_n), dtype=np.uint8)
        scales = rng.integers(0, 256, (m, columns), dtype=np.uint8)
        if not nans:
            scales[scales & 0x7F == 0x7F] = 0
        shaped = LAYOUTS[layout].pack(scales)
        shaped[LAYOUTS[layout].padding_mask(m, columns)] = 0x7F
        gs = np.array([global_scale], np.float32)
        host = fp4rt.QuantizedTensor(data, shaped, gs, (m, n), layout, padded_n)
        on_device = []
        for part in (data, shaped):
            memory = device.cupy.empty(part.size + 16, np.uint8)[offset : offset + part.size].reshape(part.shape)
            memory[...] = device.cupy.asarray(part)
            on_device.append(memory)
        return host, fp4rt.QuantizedTensor(*on_device, device.floats(gs), (m, n), layout, padded_n)

    return make


def same_numbers(device, found, wanted, numbers, dtype, assert_equal_bits, what):
    kind = np.uint32 if dtype == "float32" else np.uint16
    got = device.host(found).view(kind).reshape(wanted.shape)
    want = wanted.view(kind)
    nan = np.isnan(numbers(want, dtype))
    assert np.isnan(numbers(got, dtype)[nan]).all(), what  # the bits of a NaN are free
    assert_equal_bits(what, np.where(nan, 0, got), np.where(nan, 0, want))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", INPUT_DTYPES)
def test_every_shape_and_alignment(device, tensors, numbers, assert_equal_bits, dtype, layout):
    rng = np.random.default_rng(1)
    shapes = [(1, 1, 16), (3, 50, 64), (130, 80, 96), (257, 4096, 4096), (64, 7152, 7168), (5, 301, 304)]
    for m, n, padded_n in shapes:
        for offset in (0, 1, 6):
            host, q = tensors(rng, m, n, padded_n, layout, offset=offset)
            what = f"{dtype} {layout} {(m, n, padded_n)} offset {offset}"
            wanted = fp4rt.dequantize(host, dtype)
            same_numbers(device, fp4rt.dequantize(q, dtype), wanted, numbers, dtype, assert_equal_bits, what)


@pytest.mark.parametrize("global_scale", [1.0, 2688 / 65504, 1e-38, 1e38, 3e-42])
@pytest.mark.parametrize("blocks", [1, 32])  # of a row: few columns have a way of their own
def test_every_scale_byte_and_code(device, tensors, numbers, assert_equal_bits, global_scale, blocks):
    data = np.tile(np.array([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE], np.uint8), (256, blocks))
    scales = np.repeat(np.arange(256, dtype=np.uint8)[:, None], blocks, axis=1)
    gs, shape = np.array([global_scale], np.float32), (256, 16 * blocks)
    host = fp4rt.QuantizedTensor(data, scales, gs, shape, "linear")
    q = fp4rt.QuantizedTensor(*map(device.cupy.asarray, (data, scales)), device.floats(gs), shape, "linear")
    for dtype in INPUT_DTYPES:
        found, wanted = fp4rt.dequantize(q, dtype), fp4rt.dequantize(host, dtype)
        same_numbers(device, found, wanted, numbers, dtype, assert_equal_bits, f"{dtype} gs={global_scale}")
    if global_scale == 1.0:
        code_2 = device.host(fp4rt.dequantize(q)).view(np.float32).reshape(shape)[:, 2]
        np.testing.assert_array_equal(code_2, E4M3.values)


@pytest.mark.parametrize("dtype", INPUT_DTYPES)
def test_out_at_any_address_is_filled_and_nothing_else(device, tensors, dtype):
    size = 4 if dtype == "float32" else 2
    for n in (48, 50, 51):
        _, q = tensors(np.random.default_rng(2), 9, n, 64, "8x4", nans=False)
        whole = device.cupy.full(9 * n * size + 64, 0xA5, np.uint8)
        for start in (size, 3 * size, 4 * size, 16):
            whole[...] = 0xA5
            out = (
                whole[start : start + 9 * n * size]
                .view(device.array(np.zeros(1, np.uint16), dtype).dtype if size == 2 else np.float32)
                .reshape(9, n)
            )
            assert fp4rt.dequantize(q, dtype, out=out) is out
            host = whole.get()
            assert host[start : start + 9 * n * size].tobytes() == device.host(fp4rt.dequantize(q, dtype)).tobytes()
            assert (host[:start] == 0xA5).all()
            assert (host[start + 9 * n * size :] == 0xA5).all()


@pytest.mark.parametrize("source", LAYOUTS)
@pytest.mark.parametrize("target", LAYOUTS)
def test_relayout_moves_scales_and_zeroes_padding(device, tensors, assert_equal_bits, source, target):
    rng = np.random.default_rng(3)
    for m, n, padded_n in [(1, 16, 16), (3, 50, 96), (130, 80, 96), (300, 1040, 1072), (1500, 4096, 4096)]:
        host, q = tensors(rng, m, n, padded_n, source, offset=1)
        moved, wanted = fp4rt.relayout(q, target), fp4rt.relayout(host, target)
        assert moved.data is q.data or moved.data.data.ptr == q.data.data.ptr
        assert_equal_bits(f"{source} to {target} {(m, n)}", device.host(moved.scales), wanted.scales)
        cupy = device.cupy
        parts = [cupy.full(part.shape, 0xA5, np.uint8) for part in (wanted.data, wanted.scales)]
        out = fp4rt.QuantizedTensor(*parts, device.floats(0), (m, n), target, padded_n)
        fp4rt.relayout(q, target, out=out)
        for part in ("data", "scales", "global_scale"):
            want = getattr(wanted, part).view(np.uint8)
            assert_equal_bits(part, device.host(getattr(out, part)).reshape(want.shape), want)


def test_quantize_then_dequantize_is_within_half_a_step(device):
    x = device.cupy.random.standard_normal((512, 4096)).astype(np.float16)
    y = fp4rt.dequantize(fp4rt.quantize(x), "float32")
    amax = device.cupy.abs(x.reshape(512, 256, 16)).max(-1, keepdims=True).astype(np.float32)
    error = device.cupy.abs(y - x).reshape(512, 256, 16)
    # Half of e2m1's widest step (4 to 6) is a sixth of the maximum; e4m3 rounds the scale by at most 1/16.
    assert bool((error <= amax * (1 / 6) * (1 + 1 / 16) + 1e-6).all())


def test_padded_n_round_trips_in_every_layout(device):
    x = device.cupy.random.standard_normal((77, 50)).astype(np.float16)
    reference = device.host(fp4rt.dequantize(fp4rt.quantize(x, 1.0, layout="linear", padded_n=64), "float16"))
    for layout in LAYOUTS:
        for padded_n in (round_up(50, 16), 128):
            q = fp4rt.quantize(x, 1.0, layout=layout, padded_n=padded_n)
            assert device.host(fp4rt.dequantize(q, "float16")).tobytes() == reference.tobytes()
