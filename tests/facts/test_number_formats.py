"""The code tables against their definitions, and against another implementation of the formats."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from fp4rt import format as facts
from fp4rt import fp32
from fp4rt.format import E2M1, E4M3


def test_e2m1_has_the_eight_magnitudes_of_the_specification() -> None:
    assert E2M1.values.tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]
    assert np.signbit(E2M1.values[8])


@pytest.mark.parametrize(
    ("byte", "value"),
    [
        (0b0_0000_000, 0.0),
        (0b0_0000_001, 2.0**-9),
        (0b0_0000_111, 7 * 2.0**-9),
        (0b0_0001_000, 2.0**-6),
        (0b0_0101_000, 0.25),
        (0b0_0110_000, 0.5),
        (0b0_0111_000, 1.0),
        (0b0_1000_000, 2.0),
        (0b0_1111_110, 448.0),
    ],
)
def test_e4m3_at_the_borders_of_its_fields(byte: int, value: float) -> None:
    assert E4M3.values[byte] == value
    assert E4M3.values[byte | 0x80] == -value


def test_e4m3_has_two_nans_and_no_infinity() -> None:
    assert np.flatnonzero(np.isnan(E4M3.values)).tolist() == [0x7F, 0xFF]
    assert not np.isinf(E4M3.values).any()


@pytest.mark.parametrize(
    ("format_", "dtype"), [(E4M3, ml_dtypes.float8_e4m3fn), (E2M1, ml_dtypes.float4_e2m1fn)], ids=["e4m3", "e2m1"]
)
def test_tables_agree_with_ml_dtypes(format_: facts.FloatFormat, dtype: type) -> None:
    wanted = np.arange(format_.values.size, dtype=np.uint8).view(dtype).astype(np.float32)
    assert np.array_equal(format_.values, wanted, equal_nan=True)
    assert np.array_equal(np.signbit(format_.values[::2]), np.signbit(wanted[::2]))


def test_tables_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="read-only"):
        E4M3.values[0] = 1


def test_constants_follow_from_the_tables() -> None:
    assert E2M1.values[7] == facts.E2M1_MAX
    assert E4M3.values[facts.E4M3_MAX_BYTE] == facts.E4M3_MAX
    assert np.isnan(E4M3.values[facts.E4M3_NAN_BYTE])
    assert float(facts.AMAX_TARGET) == 2688.0
    assert E2M1.values[facts.NEGATIVE_ZERO_CODE] == 0
    assert np.float32(1 / 6) == facts.R6
    assert facts.R6.view(np.uint32) == 0x3E2AAAAB


def fp64_numbers_around_fp32() -> np.ndarray:
    """Every exponent, its ties and their neighbours, the ends of fp32, and what fp64 holds beyond them."""
    bits = np.arange(0, 1 << 32, 65521 * 3, np.uint64).astype(np.uint32)
    numbers = bits[bits & 0x7F800000 != 0x7F800000].view(np.float32).astype(np.float64)
    with np.errstate(over="ignore"):
        ties = (numbers + np.nextafter(numbers.astype(np.float32), np.float32(np.inf)).astype(np.float64)) / 2
    rest = [0.0, -0.0, 5e-324, 2.0**-150, 2.0**-151, -(2.0**-150), 2.0**128, 3.5e38, 1e308, np.inf, -np.inf, 0.1, 1 / 3]
    around = np.concatenate([numbers, ties, ties * (1 + 2.0**-52), ties * (1 - 2.0**-53), rest])
    return around[~np.isnan(around)]


def test_fp32_numbers_are_found_without_floating_point() -> None:
    numbers = fp64_numbers_around_fp32()
    with np.errstate(over="ignore"):
        wanted = numbers.astype(np.float32)
    got = np.array([fp32.bits_of(number) for number in numbers.tolist()], np.uint32)
    np.testing.assert_array_equal(got, wanted.view(np.uint32))
    for bits, number in zip(got[::7].tolist(), wanted[::7].tolist(), strict=True):
        assert fp32.number_of(bits) == number
        assert np.signbit(fp32.number_of(bits)) == np.signbit(number)
    assert np.isnan(fp32.number_of(fp32.bits_of(float("nan"))))


def test_numbers_of_any_kind_become_the_nearest_fp32_number() -> None:
    from fractions import Fraction

    assert fp32.nearest(np.float32(1e-45)) == 2.0**-149
    assert fp32.nearest(np.float16(6e-8)) == 2.0**-24
    assert fp32.nearest(0.1) == float(np.float32(0.1))
    assert fp32.nearest(Fraction(1, 3)) == float(np.float32(1 / 3))
    assert fp32.nearest(2**24 + 1) == 2**24
    with pytest.raises(OverflowError):
        fp32.nearest(10**400)
