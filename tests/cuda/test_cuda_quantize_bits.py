"""CUDA = CPU, bit for bit: every pattern, every layout, golden vectors, random shapes, views and special values."""

from __future__ import annotations

import json

import numpy as np
import pytest

import fp4rt
from fp4rt.cuda.quantizers.quantize import READ_ONCE
from fp4rt.format import INPUT_DTYPES
from fp4rt.layout import LAYOUTS, round_up
from tests.golden.vectors import files_of_kind

pytestmark = pytest.mark.gpu

ORDINARY = (1.0, 0.37, 448.0, 2688 / 65504, 1 + 2**-23, 1 - 2**-24, 1 / 3, 3.1e4, 1e6, 2688 / 3.3e38, 1e-4)
EXTREME = (1e-45, 2e-41, 1e-38, 2.0**-127, 2.0**-119, 2.0**-101, 2.0**101, 1e37, 3.4028235e38)
EVERY = np.arange(65536, dtype=np.uint16)


def pattern_matrices():
    """(m, 2048): each pattern alone in its block; all patterns mixed; each pattern beside larger ones of all kinds."""
    rng = np.random.default_rng(1)
    yield np.repeat(EVERY, 16).reshape(-1, 2048)
    yield np.concatenate([rng.permutation(EVERY) for _ in range(16)]).reshape(-1, 2048)
    maxima = rng.integers(1, 0x7BFF, (65536, 1))
    below = np.maximum(maxima - rng.integers(0, 6 << 7, (65536, 16)), 0)
    yield (below | rng.integers(0, 2, below.shape) << 15).astype(np.uint16).reshape(-1, 2048)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_pattern_in_every_layout(check_quantize, device, dtype):
    """Dense rows go to quantize.cu; the same one element further in memory go to quantize_any.cu."""
    for i, bits in enumerate(pattern_matrices()):
        for j, global_scale in enumerate(ORDINARY + EXTREME):
            layout = list(LAYOUTS)[(i + j) % 3]
            check_quantize(bits, dtype, float(np.float32(global_scale)), layout)
            some = bits[j % 5 :: 6]
            shifted = device.array(np.concatenate([[np.uint16(0)], some.ravel()]), dtype)[1:].reshape(some.shape)
            check_quantize(some, dtype, float(np.float32(global_scale)), layout, x=shifted)


@pytest.mark.parametrize("global_scale", ORDINARY + EXTREME)
def test_fp32_of_all_sizes(check_quantize, global_scale):
    rng = np.random.default_rng(2)
    top = rng.integers(1, 0x7F7FFFFF, (65536, 1))
    bits = np.maximum(top - rng.integers(0, 8 << 23, (65536, 16)), 0).astype(np.uint32)
    bits |= rng.integers(0, 2, bits.shape, dtype=np.uint32) << 31
    where = rng.random(bits.shape) < 0.01
    bits[where] = rng.choice(
        np.array([0, 1 << 31, 1, 0x7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000], np.uint32), where.sum()
    )
    check_quantize(bits.reshape(512, 2048), "float32", float(np.float32(global_scale)))


def test_fp32_blocks_with_subnormal_maxima(check_quantize):
    bits = np.random.default_rng(3).integers(0, 0x00800000, (512, 2048), dtype=np.uint32)
    for global_scale in (1.0, 1e38, 3.3e38, None):
        check_quantize(bits, "float32", global_scale)


@pytest.mark.parametrize("path", files_of_kind("quant", "quant_multi_gs"), ids=lambda p: p.stem)
def test_golden_vectors(check_quantize, path):
    golden = np.load(path)
    meta = json.loads(str(golden["meta"]))
    scales = golden["gs_list"] if "gs_list" in golden else golden["gs"][None]
    bits = golden["x_bits"]
    n = bits.shape[1]
    for global_scale in scales:
        for layout in LAYOUTS:
            check_quantize(bits, meta["dtype"], float(global_scale), layout, round_up(n, 16))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", INPUT_DTYPES)
def test_random_shapes_paddings_and_scales(check_quantize, random_bits, dtype, layout):
    rng = np.random.default_rng(4)
    for _ in range(60):
        m, n = int(rng.integers(0, 301)), int(rng.integers(1, 301))
        padded_n = round_up(n, 16) + 16 * int(rng.integers(0, 4))
        global_scale = [None, 1.0, float(np.float32(rng.random() * 100)), np.float32(3.7)][rng.integers(0, 4)]
        check_quantize(
            random_bits(rng, m, n, dtype), dtype, global_scale, layout, padded_n, out=bool(rng.integers(0, 2))
        )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", INPUT_DTYPES)
def test_large_shapes_with_padding(check_quantize, random_bits, dtype, layout):
    rng = np.random.default_rng(5)
    for m, n, padded_n in [(1025, 1120, 1152), (129, 16384, 16384), (8200, 144, 144), (65, 16400, 17424)]:
        bits = random_bits(rng, m, n, dtype)
        check_quantize(bits, dtype, 1.7, layout, padded_n)
        check_quantize(bits, dtype, None, layout, padded_n)


@pytest.mark.parametrize("dtype", INPUT_DTYPES)
def test_inputs_that_l2_cannot_hold(check_quantize, random_bits, dtype):
    m, n = 4111, 8176
    assert m * n in READ_ONCE
    bits = random_bits(np.random.default_rng(8), m, n, dtype)
    for layout, global_scale in zip(LAYOUTS, (0.7, None, 1e-38), strict=True):
        check_quantize(bits, dtype, global_scale, layout, 8192)


@pytest.mark.parametrize("dtype", INPUT_DTYPES)
def test_views_equal_their_copies(check_quantize, device, random_bits, dtype):
    rng = np.random.default_rng(6)
    bits = random_bits(rng, 90, 1040, dtype)
    base = device.array(bits, dtype)
    cupy = device.cupy
    cuts = [
        np.s_[1:, 1:],
        np.s_[::-1],
        np.s_[:, ::-1],
        np.s_[::3, ::2],
        np.s_[:, 16:1024],
        np.s_[::-2, 8:],
        np.s_[:, 3:500],
    ]
    for cut in cuts:
        n = bits[cut].shape[1]
        for global_scale in (2.5, None):
            check_quantize(bits[cut], dtype, global_scale, "128x4", round_up(n, 16), x=base[cut])
    for global_scale in (2.5, None):
        check_quantize(bits.T, dtype, global_scale, "8x4", 96, x=base.T)
        row = np.broadcast_to(bits[3], (7, 1040))
        check_quantize(row, dtype, global_scale, "linear", x=cupy.broadcast_to(base[3], (7, 1040)))


@pytest.mark.parametrize("dtype", INPUT_DTYPES)
def test_the_automatic_global_scale_is_the_cpu_s(device, as_host, random_bits, dtype):
    rng = np.random.default_rng(7)
    for special in (0.0, 0.05, 1.0):
        for m, n in [(1, 1), (3, 7), (64, 7168), (200, 7152), (1000, 4099)]:
            bits = random_bits(rng, m, n, dtype, special)
            for cut in (np.s_[:], np.s_[:, 1:] if n > 1 else np.s_[:], np.s_[::-1, ::2]):
                found = device.host(fp4rt.global_scale(device.array(bits, dtype)[cut]))
                wanted = fp4rt.global_scale(as_host(np.ascontiguousarray(bits[cut]), dtype))
                assert found.tobytes() == wanted.tobytes(), (dtype, m, n, cut, special)


def test_special_values_keep_to_their_block(check_quantize, device):
    values = np.full((4, 64), 6, np.float16)
    values[0, 3], values[1, 17], values[2, 40], values[3, 5] = np.nan, np.inf, -np.inf, -0.0
    q = check_quantize(values.view(np.uint16), "float16", 1.0, "linear")
    scales = device.host(q.scales)
    assert scales[0].tolist() == [0x7F, 0x38, 0x38, 0x38]
    assert scales[1].tolist() == [0x38, 0x7E, 0x38, 0x38]
    assert device.host(q.data)[0, :8].tolist() == [0] * 8  # the NaN's block has codes 0


def test_the_same_bits_on_every_run(device, random_bits):
    x = device.array(random_bits(np.random.default_rng(8), 2048, 4096, "float16"), "float16")
    runs = [fp4rt.quantize(x) for _ in range(20)]
    for q in runs[1:]:
        assert all(
            device.host(getattr(q, p)).tobytes() == device.host(getattr(runs[0], p)).tobytes()
            for p in ("data", "scales", "global_scale")
        )


def test_the_short_reciprocal_equals_rcp_rn_for_every_mantissa(device):
    """ptx/reciprocal.cuh leaves out what rcp.rn does for subnormal and huge values only."""
    from fp4rt.sources import read_source

    names = ("num/integers.cuh", "ptx/float_arithmetic.cuh", "ptx/reciprocal.cuh")
    text = "\n".join(line for name in names for line in read_source(name).splitlines() if not line.startswith("#"))
    code = (
        text
        + """
extern "C" __global__ void compare(unsigned exponents, unsigned long long* wrong) {
    const unsigned mantissa = blockIdx.x * blockDim.x + threadIdx.x;
    for (unsigned e = 2; e < 252; e += exponents) {
        const float value = __uint_as_float(e << 23 | mantissa);
        float exact;
        asm("rcp.rn.f32 %0, %1;" : "=f"(exact) : "f"(value));
        if (__float_as_uint(exact) != __float_as_uint(reciprocal_of_normal(value))) atomicAdd(wrong, 1ull);
    }
}"""
    )
    wrong = device.cupy.zeros(1, np.uint64)
    kernel = device.cupy.RawKernel(code, "compare", options=("-std=c++17", "--fmad=false"))
    kernel((1 << 15,), (256,), (np.uint32(31), wrong))
    assert int(wrong[0]) == 0
