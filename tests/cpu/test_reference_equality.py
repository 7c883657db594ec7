"""The fast kernels against the plain NumPy reference, bit for bit, over random shapes, scales and special values."""

from __future__ import annotations

import numpy as np
import pytest

import fp4rt
from fp4rt.cpu import reference
from fp4rt.cpu.memory import BITS
from fp4rt.layout import LAYOUTS, block_columns
from tests.cpu.comparison import DTYPES, assert_same_bits, bits_of, widened

ALL_DTYPES = list(DTYPES)


def matrix(rng: np.random.Generator, m: int, n: int, dtype: str, patterns: bool) -> np.ndarray:
    """Rows of very different sizes, or raw bit patterns with NaN and infinity among them."""
    if patterns:
        return rng.integers(0, 1 << (8 * BITS[dtype].itemsize), (m, n)).astype(BITS[dtype]).view(DTYPES[dtype])
    with np.errstate(over="ignore"):
        return (rng.standard_normal((m, n)) * np.exp(rng.uniform(-14, 9, (m, 1)))).astype(DTYPES[dtype])


@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_random_shapes_in_every_layout(layout: str, dtype: str) -> None:
    rng = np.random.default_rng([ALL_DTYPES.index(dtype), LAYOUTS[layout].index])
    for trial in range(25):
        m, n = int(rng.integers(1, 300)), int(rng.integers(1, 300))
        padded_n = -(-n // 16) * 16 + 16 * int(rng.integers(0, 6))
        x = matrix(rng, m, n, dtype, patterns=trial % 3 == 2)
        scale = None if trial % 2 else np.float32(np.exp(rng.uniform(-20, 20)))
        q = fp4rt.quantize(x, scale, layout=layout, padded_n=padded_n)
        what = f"{dtype} ({m}, {n} -> {padded_n}) {layout}"
        used = reference.global_scale(widened(x)) if scale is None else scale
        assert_same_bits(q.global_scale, np.array([used]), f"{what}, global scale")
        data, scales = reference.quantize(widened(x), used, LAYOUTS[layout], padded_n)
        assert_same_bits(q.data, data, f"{what}, data")
        assert_same_bits(q.scales, scales, f"{what}, scales")
        for target in DTYPES:
            y = reference.dequantize(data, scales, used, (m, n), LAYOUTS[layout])
            wanted = reference.round_to_bits(np.ascontiguousarray(y), target).view(DTYPES[target])
            got = q.dequantize(target)
            number = ~np.isnan(wanted.astype(np.float32))
            assert_same_bits(got[number], wanted[number], f"{what}, dequantized to {target}")
            assert np.isnan(got[~number].astype(np.float32)).all()
        for target in LAYOUTS.values():
            wanted = reference.relayout(scales, (m, n), block_columns(padded_n), LAYOUTS[layout], target)
            assert_same_bits(q.relayout(target.name).scales, wanted, f"{what} to {target.name}")


@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("n", [1008, 1024, 1040, 2047, 2048, 5000])
def test_rows_longer_than_the_kernels_chunk(n: int, dtype: str) -> None:
    x = matrix(np.random.default_rng(n), 5, n, dtype, patterns=False)
    padded_n = -(-n // 16) * 16 + 1024
    data, scales = reference.quantize(widened(x), np.float32(3), LAYOUTS["128x4"], padded_n)
    for source in (x, np.asfortranarray(x)):
        q = fp4rt.quantize(source, 3.0, padded_n=padded_n)
        assert_same_bits(q.data, data, f"n = {n}, data")
        assert_same_bits(q.scales, scales, f"n = {n}, scales")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_widening_every_pattern(dtype: str) -> None:
    """Through a product with the identity, which shows the widened value itself."""
    patterns = np.arange(1 << 16, dtype=np.uint16).view(DTYPES[dtype])
    finite = patterns[np.isfinite(patterns.astype(np.float32))].reshape(-1, 16)
    identity = fp4rt.quantize(np.eye(16, dtype=np.float32) * 6, 1.0)
    got = fp4rt.matmul(finite, identity, out_dtype="float32", alpha=1 / 6)
    with np.errstate(over="ignore"):
        wanted = finite.astype(np.float32) * np.float32(6) * np.float32(1 / 6)
    assert (got == wanted).all()


def test_the_reference_matmul_agrees() -> None:
    rng = np.random.default_rng(3)
    x = rng.standard_normal((7, 64)).astype(np.float16)
    b = fp4rt.quantize(rng.standard_normal((9, 64)).astype(np.float32), 1.0)
    bias = rng.standard_normal(9).astype(np.float32)
    for dtype in DTYPES:
        wanted = reference.matmul(widened(x), b.dequantize(), np.float32(0.5), bias, dtype)
        got = fp4rt.matmul(x, b, out_dtype=dtype, alpha=0.5, bias=bias)
        assert_same_bits(bits_of(got), wanted, f"product in {dtype}")
