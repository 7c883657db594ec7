"""Codes and scales against exact arithmetic: every fp16 and bf16 pattern, every tie and both its neighbours."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

import fp4rt
from fp4rt.cpu import reference
from fp4rt.format import FP32_MAX
from tests.cpu import exact_oracle as oracle
from tests.cpu.comparison import DTYPES, assert_same_bits, bits_of, widened

ONE_ULP_ABOVE_1 = np.float32(1 + 2.0**-23)
ORDINARY_SCALES = (np.float32(1), np.float32(0.37), np.float32(2688 / 65504), np.float32(448), ONE_ULP_ABOVE_1)
EXTREME_SCALES = (np.float32(1e6), np.float32(2688) / np.float32(3.3e38), FP32_MAX, np.float32(2.0**-125))


def check(x: np.ndarray, scale: np.float32, what: str) -> None:
    """x (blocks, 16) of any dtype: the package against the oracle, through the public function."""
    codes, scales = oracle.quantize_blocks(bits_of(widened(x)), scale)
    q = fp4rt.quantize(x, scale, layout="linear")
    assert_same_bits(q.scales, scales[:, None], f"{what}, scales")
    assert_same_bits(reference.unpack_codes(q.data), codes, f"{what}, codes")


def every_pattern(dtype: str) -> np.ndarray:
    """All 65,536 patterns, NaN and infinity included."""
    return np.arange(1 << 16, dtype=np.uint16).view(DTYPES[dtype])


@pytest.mark.parametrize("scale", [*ORDINARY_SCALES, *EXTREME_SCALES], ids=lambda scale: f"{scale:.9g}")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_pattern_as_the_maximum_of_its_block(dtype: str, scale: np.float32) -> None:
    blocks = np.zeros((1 << 16, 16), DTYPES[dtype])
    blocks[:, 3] = every_pattern(dtype)
    check(blocks, scale, f"{dtype}, global scale {scale}")


@pytest.mark.parametrize("scale", [*ORDINARY_SCALES, *EXTREME_SCALES], ids=lambda scale: f"{scale:.9g}")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_pattern_among_neighbours_and_among_strangers(dtype: str, scale: np.float32) -> None:
    patterns = every_pattern(dtype)
    check(patterns.reshape(-1, 16), scale, f"{dtype} in sequence, global scale {scale}")
    check(np.ascontiguousarray(patterns.reshape(16, -1).T), scale, f"{dtype} strided, global scale {scale}")


@pytest.mark.parametrize("scale", ORDINARY_SCALES, ids=lambda scale: f"{scale:.9g}")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_pattern_below_a_fixed_maximum(dtype: str, scale: np.float32) -> None:
    """Each finite pattern meets a block scale that it did not choose: one maximum a binade above, one far above."""
    patterns = every_pattern(dtype)
    finite = patterns[np.isfinite(patterns.astype(np.float32))]
    magnitudes = np.sort(np.abs(finite.astype(np.float32)))[: len(finite) // 15 * 15].reshape(-1, 15)
    for factor in (1.0, 1.7, 5.3):
        blocks = np.empty((len(magnitudes), 16), np.float32)
        blocks[:, :15] = magnitudes
        with np.errstate(over="ignore"):
            blocks[:, 15] = magnitudes[:, -1] * np.float32(factor)
            x = blocks.astype(DTYPES[dtype])
        check(x, scale, f"{dtype} below {factor} times the largest, global scale {scale}")


def with_neighbours(values: np.ndarray) -> np.ndarray:
    """fp32 values, each with the next fp32 below and above."""
    values = values.astype(np.float32)
    return np.stack([np.nextafter(values, np.float32(0)), values, np.nextafter(values, np.float32(np.inf))], axis=-1)


@pytest.mark.parametrize("scale", [*ORDINARY_SCALES, np.float32(2.0**-20)], ids=lambda scale: f"{scale:.9g}")
def test_every_code_tie_and_its_neighbours_under_every_block_scale(scale: np.float32) -> None:
    """x with x * enc on, just below and just above each of the seven ties, for all 126 scale bytes and both signs."""
    values = np.array([float(v) for v in oracle.E4M3_VALUES[1:]], np.float32)
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32)
    decoded = values * (np.float32(1) / scale)
    near = with_neighbours(ties * decoded[:, None]).reshape(len(values), 21)
    blocks = np.zeros((len(values), 2, 32), np.float32)
    blocks[:, 0, :21], blocks[:, 1, :21] = near, -near
    blocks = blocks.reshape(-1, 2, 16)
    blocks[:, :, 15] = np.repeat(decoded * np.float32(6), 2)[:, None]  # fixes the block scale
    check(blocks.reshape(-1, 16), scale, f"code ties, global scale {scale}")


@pytest.mark.parametrize("scale", [*ORDINARY_SCALES, *EXTREME_SCALES], ids=lambda scale: f"{scale:.9g}")
def test_every_scale_tie_and_its_neighbours(scale: np.float32) -> None:
    """Block maxima whose t lies on, and within two units of, each tie between two e4m3 values; and beyond 448."""
    values = [float(v) for v in oracle.E4M3_VALUES]
    ties = [(low + high) / 2 for low, high in pairwise(values)] + [448.0, 464.0, 480.0]
    with np.errstate(over="ignore"):
        centre = np.minimum((np.array(ties) * 6 / float(scale)), float(FP32_MAX) * 0.99).astype(np.float32)
    steps = np.arange(-4, 5)
    maxima = (bits_of(centre)[:, None].astype(np.int64) + steps).clip(0, 0x7F7FFFFF).astype(np.uint32).view(np.float32)
    blocks = np.zeros((maxima.size, 16), np.float32)
    blocks[:, 7] = -maxima.reshape(-1)
    blocks[:, 2] = maxima.reshape(-1) / 3
    check(blocks, scale, f"scale ties, global scale {scale}")


@pytest.mark.parametrize("scale", [np.float32(1), FP32_MAX, np.float32(2.0**-125), np.float32(3e-39)], ids=str)
def test_fp32_extremes_subnormals_and_infinities(scale: np.float32) -> None:
    rng = np.random.default_rng(7)
    bits = rng.integers(0, 1 << 32, (4096, 16), dtype=np.uint32)
    bits[1024:2048] &= 0x807FFFFF  # subnormals
    bits[2048:3072] = (bits[2048:3072] & 0x80FFFFFF) | 0x7E000000  # near the largest
    bits[3072:, 5] = 0x7F800000
    bits[3072:, 6] = 0xFF800000
    check(bits.view(np.float32), scale, f"fp32 extremes, global scale {scale}")


def test_automatic_global_scale_is_the_exact_quotient_rounded_once() -> None:
    rng = np.random.default_rng(8)
    bits = rng.integers(1, 0x7F800000, 1500, dtype=np.uint32)
    bits[:500] %= 0x00800000  # subnormal amax: the quotient may overflow
    bits[bits == 0] = 1
    wanted = oracle.divide(2688, bits)
    wanted = np.where(wanted == oracle.INFINITY, bits_of(np.array(FP32_MAX)), wanted).astype(np.uint32)
    got = np.array([fp4rt.global_scale(v.reshape(1, 1))[0] for v in bits.view(np.float32)], np.float32)
    assert_same_bits(got, wanted.view(np.float32), "global scale")


def test_the_oracle_agrees_with_rationals() -> None:
    rng = np.random.default_rng(9)
    exponents = rng.integers(90, 150, (300, 1)) + rng.integers(-3, 4, (300, 16))
    bits = rng.integers(0, 2, (300, 16)) << 31 | exponents << 23 | rng.integers(0, 1 << 23, (300, 16))
    for scale in ORDINARY_SCALES:
        codes, scales = oracle.quantize_blocks(bits.astype(np.uint32), scale)
        for block in range(0, 300, 3):
            want_codes, want_scale = oracle.quantize_block([int(b) for b in bits[block]], scale)
            assert scales[block] == want_scale, f"block {block}, global scale {scale}"
            assert codes[block].tolist() == want_codes, f"block {block}, global scale {scale}"
