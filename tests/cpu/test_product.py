"""matmul on the CPU: against float64 under a derived bound, exact where it can be, and deaf to padding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import fp4rt
from fp4rt import api
from fp4rt.cpu import product
from fp4rt.layout import LAYOUTS
from tests.cpu.comparison import DTYPES, assert_same_bits, assert_same_tensor

OUTPUT_EPSILON = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24}
SMALLEST_NORMAL = {"float16": 2.0**-14, "bfloat16": 2.0**-126, "float32": 2.0**-126}


def quantized(m: int, k: int, layout: str = "128x4", padded: int = 0, seed: int = 0) -> fp4rt.QuantizedTensor:
    x = np.random.default_rng(seed + m + k).standard_normal((m, k)).astype(np.float32)
    return fp4rt.quantize(x, layout=layout, padded_n=-(-k // 16) * 16 + padded)


def values(operand: Any) -> np.ndarray:
    """float64 values; a quantized operand without its global scale, as the product sees it."""
    if isinstance(operand, fp4rt.QuantizedTensor):
        one = fp4rt.QuantizedTensor(
            operand.data, operand.scales, np.ones(1, np.float32), operand.shape, operand.layout, operand.padded_n
        )
        return one.dequantize().astype(np.float64)
    return operand.astype(np.float64)


def scale_of(operand: Any) -> float:
    return float(operand.global_scale[0]) if isinstance(operand, fp4rt.QuantizedTensor) else 1.0


def assert_within_the_derived_bound(
    got: np.ndarray, a: Any, b: Any, alpha: float | None = None, bias: np.ndarray | None = None
) -> None:
    """|error| <= k * 2^-24 * sum |a b| * alpha for the sum, and half a unit for each rounding after it."""
    k = a.shape[1]
    factor = float(np.float32(1 / (scale_of(a) * scale_of(b)) if alpha is None else alpha))
    exact = values(a) @ values(b).T * factor
    absolute = np.abs(values(a)) @ np.abs(values(b)).T * abs(factor)
    if bias is not None:
        exact += bias.astype(np.float64)
        absolute += np.abs(bias.astype(np.float64))
    dtype = got.dtype.name
    rounding = OUTPUT_EPSILON[dtype] * np.maximum(np.abs(exact), SMALLEST_NORMAL[dtype])
    bound = (k + 3) * 2.0**-24 * absolute + rounding * (1 + 2.0**-10)
    excess = np.abs(got.astype(np.float64) - exact) - bound
    assert (excess <= 0).all(), f"{(excess > 0).sum()} of {got.size} beyond the bound, the worst by {excess.max()}"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 16), (5, 37, 48), (17, 130, 80), (64, 33, 7152), (3, 200, 7)])
def test_both_operand_kinds_are_within_the_bound(m: int, n: int, k: int, layout: str) -> None:
    b = quantized(n, k, layout, padded=16, seed=1)
    rng = np.random.default_rng(m)
    operands = [quantized(m, k, layout, padded=32)]
    operands += [rng.standard_normal((m, k)).astype(DTYPES[dtype]) for dtype in ("float16", "bfloat16")]
    for a in operands:
        for dtype in DTYPES:
            got = fp4rt.matmul(a, b, out_dtype=dtype)
            assert got.dtype == DTYPES[dtype]
            assert_within_the_derived_bound(got, a, b)


def test_blocks_of_rows_and_columns_join_without_a_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product, "OPERAND_BLOCK", 96 * 20)
    a, b = quantized(50, 96), quantized(90, 96, "8x4", seed=3)
    bias = np.arange(90, dtype=np.float32)
    for weight in (b, fp4rt.prepack(b)):
        got = fp4rt.matmul(a, weight, out_dtype="float32", bias=bias)
        assert_within_the_derived_bound(got, a, b, bias=bias)


@pytest.mark.parametrize("amax", [3e-20, 3e-18, 1e-15, 2e19, 1e21])
def test_global_scales_whose_product_leaves_fp32_take_no_bit_of_the_result(amax: float) -> None:
    x = np.random.default_rng(1).uniform(-amax, amax, (9, 256)).astype(np.float32)
    x[4] = 0
    a, b = fp4rt.quantize(x), fp4rt.quantize(np.float32(1) / 64 * x[:7])
    exact = values(a) @ values(b).T / (scale_of(a) * scale_of(b))
    size = np.abs(values(a)) @ np.abs(values(b)).T / (scale_of(a) * scale_of(b))
    with np.errstate(over="ignore"):
        got = fp4rt.matmul(a, b, out_dtype="float32").astype(np.float64)
    overflows = np.abs(exact) > 2.0**128 * (1 + 2.0**-16)
    assert np.array_equal(got[overflows], np.copysign(np.inf, exact[overflows]))
    assert (got[4] == 0).all()
    assert (got[:, 4] == 0).all()
    assert (np.abs(got - exact) <= (256 + 4) * 2.0**-24 * size + 2.0**-149)[~overflows].all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_small_integers_give_exact_products(layout: str) -> None:
    rng = np.random.default_rng(4)
    codes = np.array([0, 1, 2, 3, 4, 6, -1, -2, -3, -4, -6], np.float32)
    x, w = rng.choice(codes, (40, 64)), rng.choice(codes, (70, 64))
    x[:, 0] = w[:, 0] = 6
    x[:, 16::16] = w[:, 16::16] = 6
    a, b = fp4rt.quantize(x, 1.0, layout=layout), fp4rt.quantize(w, 1.0, layout=layout)
    bias = rng.integers(-8, 8, 70).astype(np.float16)
    for operand in (a, x.astype(np.float16)):
        got = fp4rt.matmul(operand, b, out_dtype="float32", bias=bias)
        assert_same_bits(got, (x @ w.T + bias).astype(np.float32), "exact product")


@pytest.mark.parametrize("bias_dtype", DTYPES)
def test_alpha_and_bias_are_applied_in_fp32_before_the_one_rounding(bias_dtype: str) -> None:
    """The sum 196608 overflows float16; alpha brings it back, and only then is it rounded."""
    x = np.full((1, 512), 64, np.float16)
    b = fp4rt.quantize(np.full((3, 512), 6, np.float32), 1.0)
    bias = np.array([0, 0.5, 2.0**-6], DTYPES[bias_dtype])
    got = fp4rt.matmul(x, b, out_dtype="float16", alpha=2.0**-10, bias=bias)
    assert got.tolist() == [[192, 192.5, 192]]
    array = np.array([2.0**-10], np.float32)
    assert_same_bits(fp4rt.matmul(x, b, out_dtype="float16", alpha=array, bias=bias), got, "alpha as an array")


def test_alpha_replaces_the_global_scales() -> None:
    a, b = quantized(4, 32), quantized(6, 32, seed=5)
    assert_within_the_derived_bound(fp4rt.matmul(a, b, out_dtype="float32", alpha=0.25), a, b, alpha=0.25)


def poison_padding(q: fp4rt.QuantizedTensor, scale_byte: int) -> fp4rt.QuantizedTensor:
    """A copy with every byte of padding overwritten: scales with ``scale_byte``, codes with 0xF."""
    m, n = q.shape
    columns = q.padded_n // 16
    layout = LAYOUTS[q.layout]
    valid = np.zeros((m, columns), np.uint8)
    valid[:, : -(-n // 16)] = 1
    scales = np.where(layout.pack(valid) == 1, q.scales, np.uint8(scale_byte))
    data = q.data.copy()
    data[:, (n + 1) // 2 :] = 0xFF
    if n % 2:
        data[:, n // 2] |= 0xF0
    return fp4rt.QuantizedTensor(data, scales, q.global_scale, q.shape, q.layout, q.padded_n)


@pytest.mark.parametrize("scale_byte", [0x7F, 0x7E, 0xFF])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("k", [48, 50, 33])
def test_poisoned_padding_changes_no_bit(k: int, layout: str, scale_byte: int) -> None:
    a, b = quantized(5, k, layout, padded=48), quantized(11, k, layout, padded=16, seed=2)
    bad_a, bad_b = poison_padding(a, scale_byte), poison_padding(b, scale_byte)
    x = np.random.default_rng(0).standard_normal((5, k)).astype(np.float16)
    assert_same_bits(fp4rt.matmul(bad_a, bad_b), fp4rt.matmul(a, b), "quantized activations")
    assert_same_bits(fp4rt.matmul(x, bad_b), fp4rt.matmul(x, b), "float16 activations")
    assert_same_bits(fp4rt.matmul(x, fp4rt.prepack(bad_b)), fp4rt.matmul(x, fp4rt.prepack(b)), "prepacked weight")
    assert_same_bits(bad_a.dequantize(), a.dequantize(), "dequantized")
    assert_same_bits(bad_a.relayout("128x4").scales, a.relayout("128x4").scales, "relaid out")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_nan_block_makes_exactly_its_rows_nan(layout: str) -> None:
    a, b = quantized(20, 64, layout), quantized(30, 64, layout, seed=1)
    offset = LAYOUTS[layout].offset
    a.scales.reshape(-1)[offset(7, 2, 4)] = 0x7F
    b.scales.reshape(-1)[offset(11, 0, 4)] = 0xFF
    for weight in (b, fp4rt.prepack(b)):
        nan = np.isnan(fp4rt.matmul(a, weight, out_dtype="float32"))
        wanted = np.zeros((20, 30), bool)
        wanted[7, :] = wanted[:, 11] = True
        assert (nan == wanted).all()
        one_row = np.isnan(fp4rt.matmul(np.zeros((1, 64), np.float16), weight, out_dtype="float32"))
        assert np.flatnonzero(one_row).tolist() == [11]


def test_zero_activations_times_a_finite_weight_are_zero() -> None:
    product = fp4rt.matmul(np.zeros((3, 64), np.float16), quantized(9, 64), out_dtype="float32")
    assert not product.any()


def test_zeros_stay_zeros_where_the_product_of_the_global_scales_has_no_reciprocal_in_fp32() -> None:
    a, b = (fp4rt.quantize(np.zeros((rows, 64), np.float32), 1e-30) for rows in (3, 9))
    for weight in (b, fp4rt.prepack(b)):
        assert_same_bits(fp4rt.matmul(a, weight, out_dtype="float32"), np.zeros((3, 9), np.float32), "zeros")


def test_the_same_inputs_give_the_same_bits_every_time() -> None:
    a, b = quantized(33, 1000, padded=8 * 16), quantized(65, 1000, padded=8 * 16, seed=1)
    first = fp4rt.matmul(a, b, out_dtype="float32")
    for _ in range(20):
        assert_same_bits(fp4rt.matmul(a, b, out_dtype="float32"), first, "repeat")


@pytest.mark.parametrize("view", [lambda x: x[:, ::-1], lambda x: x[::-1], lambda x: x[:, ::2].repeat(2, 1)[:, 1::2]])
def test_activations_of_any_strides(view: Any) -> None:
    base = np.random.default_rng(1).standard_normal((9, 64)).astype(np.float16)
    x = view(base)
    b = quantized(21, x.shape[1])
    assert_same_bits(fp4rt.matmul(x, b), fp4rt.matmul(np.ascontiguousarray(x), b), "strided activations")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("n", "k"), [(16, 64), (130, 80), (37, 50), (5, 7)])
def test_a_prepacked_weight_multiplies_alike_and_unpacks_to_the_same_bytes(n: int, k: int, layout: str) -> None:
    b = quantized(n, k, layout, padded=16)
    b.scales.reshape(-1)[0] = 0x7F
    packed = fp4rt.prepack(b)
    assert packed.shape == (n, k)
    back = packed.unpack()
    assert_same_bits(back.data, b.data, "data")
    assert_same_bits(back.scales, b.scales, "scales")
    assert_same_bits(back.global_scale, b.global_scale, "global scale")
    x = np.random.default_rng(2).standard_normal((3, k)).astype(np.float16)
    got, wanted = fp4rt.matmul(x, packed, out_dtype="float32"), fp4rt.matmul(x, b, out_dtype="float32")
    assert ((got == wanted) | (np.isnan(got) & np.isnan(wanted))).all()
    values = np.full((n, k), 7, np.float32)
    api.weight_values(packed, values)
    assert_same_bits(values, fp4rt.dequantize(b), "values")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_weight_of_no_rows_prepacks_to_a_product_of_no_columns(layout: str) -> None:
    empty = fp4rt.quantize(np.zeros((0, 48), np.float32), layout=layout, padded_n=64)
    weight = fp4rt.prepack(empty)
    assert fp4rt.matmul(np.ones((3, 48), np.float16), weight).shape == (3, 0)
    assert fp4rt.matmul(empty, weight, out_dtype="float32").shape == (0, 0)
    assert_same_tensor(weight.unpack(), empty, "unpacked")
