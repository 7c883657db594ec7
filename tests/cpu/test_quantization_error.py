"""The error report: the same numbers as float64 NumPy, and counts of what happened to each block."""

from __future__ import annotations

import math

import numpy as np
import pytest

import fp4rt
from fp4rt.layout import LAYOUTS
from tests.cpu.comparison import DTYPES, widened


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "n"), [(1, 16), (37, 50), (130, 129), (3, 2000)])
def test_powers_and_largest_error_are_those_of_float64(m: int, n: int, dtype: str, layout: str) -> None:
    x = np.random.default_rng(m).standard_normal((m, n)).astype(DTYPES[dtype])
    q = fp4rt.quantize(x, layout=layout, padded_n=-(-n // 16) * 16 + 32)
    values = widened(x).astype(np.float64)
    errors = values - q.dequantize().astype(np.float64)
    report = fp4rt.quantization_error(x, q)
    assert report.elements == m * n
    assert report.blocks == m * -(-n // 16)
    assert report.signal_power == pytest.approx((values**2).sum(), rel=1e-12)
    assert report.noise_power == pytest.approx((errors**2).sum(), rel=1e-12)
    assert report.max_abs_error == np.abs(errors).max()
    assert report.sqnr_db == pytest.approx(10 * math.log10((values**2).sum() / (errors**2).sum()), rel=1e-12)
    assert report.scale_counts.sum() == report.blocks


def test_scale_counts_are_a_histogram_of_the_valid_scale_bytes() -> None:
    x = np.random.default_rng(1).standard_normal((50, 80)).astype(np.float32)
    q = fp4rt.quantize(x, layout="linear")
    report = fp4rt.quantization_error(x, q)
    assert report.scale_counts.tolist() == np.bincount(q.scales.reshape(-1), minlength=256).tolist()


def test_zero_flushed_and_nan_blocks_are_told_apart() -> None:
    x = np.zeros((4, 32), np.float32)
    x[0, 0] = 6  # an ordinary block
    x[1, 0] = 1e-6  # too small for a global scale of 1: flushed to zero
    x[2, 0] = np.nan
    x[3, 0] = np.inf
    report = fp4rt.quantization_error(x, fp4rt.quantize(x, 1.0))
    assert (report.blocks, report.zero_blocks, report.flushed_blocks) == (8, 5, 1)
    assert (report.nan_blocks, report.clipped_blocks, report.nonfinite_elements) == (1, 1, 2)


def test_infinite_elements_do_not_enter_the_sums() -> None:
    x = np.full((1, 32), 6, np.float32)
    x[0, 16:] = np.inf
    report = fp4rt.quantization_error(x, fp4rt.quantize(x, 1.0))
    assert report.nonfinite_elements == 16
    assert report.signal_power == 16 * 36
    assert report.noise_power == 0
    assert report.sqnr_db == math.inf


def test_blocks_with_a_nan_do_not_enter_the_sums() -> None:
    x = np.random.default_rng(4).standard_normal((3, 64)).astype(np.float32)
    x[1, 20] = np.nan
    report = fp4rt.quantization_error(x, fp4rt.quantize(x))
    errors = x.astype(np.float64) - fp4rt.quantize(x).dequantize()
    kept = ~np.isnan(errors)
    assert kept.sum() == x.size - 16
    assert (report.nan_blocks, report.nonfinite_elements) == (1, 1)
    assert report.signal_power == pytest.approx((x[kept].astype(np.float64) ** 2).sum(), rel=1e-12)
    assert report.noise_power == pytest.approx((errors[kept] ** 2).sum(), rel=1e-12)
    assert report.max_abs_error == np.abs(errors[kept]).max()
    finite = np.nan_to_num(x)
    other = fp4rt.quantization_error(finite, fp4rt.quantize(x))  # the NaN is in q alone
    assert (other.noise_power, other.nonfinite_elements) == (report.noise_power, 0)


@pytest.mark.parametrize(("amax", "saturates"), [(4.05e-33, False), (4.04e-33, True), (1e-38, True)])
def test_blocks_whose_factor_is_beyond_fp32_count_as_clipped(amax: float, saturates: bool) -> None:
    """The factor of the smallest scale, 2^-9, is finite up to a global scale of 2^119: 2688 / 2^119 = 4.0445e-33."""
    x = np.zeros((1, 48), np.float32)
    x[0, 0] = amax
    x[0, 16] = amax / 448 / 512  # six times the value of scale 2^-9, code 6
    x[0, 17] = x[0, 16] / 3  # code 2
    q = fp4rt.quantize(x, layout="linear")
    if amax > 4e-33:
        assert q.scales.tolist() == [[0x7E, 0x01, 0]]
        assert q.data[0, 8] == (0x77 if saturates else 0x47)
    assert fp4rt.quantization_error(x, q).clipped_blocks == saturates


def test_a_tensor_of_zeros_has_no_error() -> None:
    x = np.zeros((3, 48), np.float16)
    report = fp4rt.quantization_error(x, fp4rt.quantize(x))
    assert report.zero_blocks == report.blocks == 9
    assert (report.noise_power, report.max_abs_error, report.sqnr_db) == (0, 0, math.inf)


def test_a_tensor_lost_altogether_has_the_worst_ratio() -> None:
    x = np.full((1, 16), 1e-9, np.float32)
    report = fp4rt.quantization_error(x, fp4rt.quantize(x, 1.0))
    assert report.noise_power == report.signal_power
    assert report.sqnr_db == 0


def test_a_strided_source_is_read_as_it_lies() -> None:
    base = np.random.default_rng(2).standard_normal((40, 96)).astype(np.float16)
    x = base[::-2, 3:83:2]
    q = fp4rt.quantize(x, padded_n=48)
    got, wanted = fp4rt.quantization_error(x, q), fp4rt.quantization_error(np.ascontiguousarray(x), q)
    assert (got.noise_power, got.max_abs_error) == (wanted.noise_power, wanted.max_abs_error)


@pytest.mark.parametrize("global_scale", [1e-45, 1e-38, 3e38])
def test_no_scale_makes_numpy_warn(global_scale: float) -> None:
    x = np.linspace(-4, 4, 64, dtype=np.float32).reshape(2, 32)
    with np.errstate(all="raise"):
        q = fp4rt.quantize(x, global_scale)
        fp4rt.quantization_error(x, q)
