"""Packing on the device gives the bytes of packing on the host, and unpacking gives the weight back."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import fp4rt
from fp4rt import api, prepacked
from fp4rt.layout import LAYOUTS, block_columns, ceil_div, round_up

pytestmark = pytest.mark.gpu

SHAPES = [(1, 16), (16, 256), (17, 48), (130, 80), (31, 7152), (300, 272), (3, 50), (5, 33), (257, 1024)]


def weight_bytes(n, k, highest_scale=256):
    """(codes, row-major scales) over every byte, padding included."""
    rng = np.random.default_rng(n * 1000 + k)
    padded = round_up(k, 32)
    data = rng.integers(0, 256, (n, padded // 2), np.uint8)
    return data, rng.integers(0, highest_scale, (n, block_columns(padded)), np.uint8)


def on_device(array, offset=0):
    """A copy on the device, ``offset`` bytes off its alignment."""
    import cupy

    memory = cupy.empty(array.size + offset, cupy.uint8)
    memory[offset:] = cupy.asarray(array.reshape(-1))
    return memory[offset:].reshape(array.shape)


def quantized(data, scales, k, layout, offset=0):
    import cupy

    packed = LAYOUTS[layout].pack(scales)
    arrays = on_device(data, offset), on_device(packed, offset)
    return fp4rt.QuantizedTensor(*arrays, cupy.full(1, 3.5, cupy.float32), (len(data), k), layout, data.shape[1] * 2)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_tiles_and_records_are_those_of_the_host(n, k, layout):
    data, scales = weight_bytes(n, k)
    got = fp4rt.prepack(quantized(data, scales, k, layout))
    tiles, records = prepacked.pack(data, scales, k)
    np.testing.assert_array_equal(got.data.get(), tiles)
    np.testing.assert_array_equal(got.restored.get(), records)
    assert got.version == prepacked.PREPACKED_VERSION
    assert float(got.global_scale[0]) == 3.5


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_unpacking_gives_every_byte_back_and_zeros_for_padding(n, k, layout):
    data, scales = weight_bytes(n, k)
    back = fp4rt.prepack(quantized(data, scales, k, layout)).unpack()
    want_data, want_scales = prepacked.unpack(*prepacked.pack(data, scales, k), n, k, data.shape[1] * 2)
    np.testing.assert_array_equal(back.data.get(), want_data)
    np.testing.assert_array_equal(back.scales.get(), LAYOUTS[layout].pack(want_scales))
    whole = k // 2
    np.testing.assert_array_equal(back.data.get()[:, :whole], data[:, :whole])
    blocks = ceil_div(k, 16)
    np.testing.assert_array_equal(
        LAYOUTS[layout].unpack(back.scales.get(), n, scales.shape[1])[:, :blocks], scales[:, :blocks]
    )
    assert (back.shape, back.layout, back.padded_n) == ((n, k), layout, data.shape[1] * 2)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_values_are_those_of_the_unpacked_weight(n, k, layout, dtype):
    import cupy

    packed = fp4rt.prepack(quantized(*weight_bytes(n, k), k, layout))
    out, wanted = (cupy.full((n, k), 7, cupy.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)) for _ in "12")
    api.weight_values(packed, out)
    fp4rt.dequantize(packed.unpack(), dtype, out=wanted)
    np.testing.assert_array_equal(out.view("u1").get(), wanted.view("u1").get())


@pytest.mark.parametrize("offset", [1, 2, 4, 8])
def test_tiles_and_records_at_odd_addresses_unpack_alike(offset):
    import cupy

    data, scales = weight_bytes(33, 272)
    packed = fp4rt.prepack(quantized(data, scales, 272, "128x4"))
    parts = on_device(packed.data.get(), offset), on_device(packed.restored.get(), offset), packed.global_scale
    moved = fp4rt.PrepackedWeight(*parts, packed.shape, packed.layout, packed.padded_n)
    assert (moved.unpack().data == packed.unpack().data).all()
    assert (moved.unpack().scales == packed.unpack().scales).all()
    out, wanted = (cupy.full((33, 272), 7, cupy.float16) for _ in "12")
    api.weight_values(moved, out)
    api.weight_values(packed, wanted)
    np.testing.assert_array_equal(out.view("u2").get(), wanted.view("u2").get())


def test_operands_at_odd_addresses_pack_alike():
    data, scales = weight_bytes(33, 272)
    for offset in (1, 2, 4):
        got = fp4rt.prepack(quantized(data, scales, 272, "linear", offset))
        np.testing.assert_array_equal(got.data.get(), prepacked.pack(data, scales, 272)[0])


def test_a_weight_that_was_quantized_here_needs_no_records():
    import cupy

    x = cupy.random.default_rng(0).standard_normal((64, 512), dtype=cupy.float32)
    x[3, :40] = 0
    q = fp4rt.quantize(x)
    packed = fp4rt.prepack(q)
    assert packed.restored.shape == (0, 16)
    assert packed.nbytes == 64 * 512 * 9 // 16 + 4
    back = packed.unpack()
    assert (back.data == q.data).all()
    assert (back.scales == q.scales).all()


def test_an_idle_expert_s_weight_of_no_rows_packs_unpacks_and_multiplies():
    import cupy

    q = fp4rt.quantize(cupy.zeros((0, 64), cupy.float16), 1.0)
    weight = fp4rt.prepack(q)
    assert weight.unpack().data.shape == (0, 32)
    x = cupy.ones((3, 64), cupy.float16)
    for b in (q, weight):
        assert fp4rt.matmul(x, b).shape == (3, 0)
