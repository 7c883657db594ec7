"""The code tables against their definitions, and against another implementation of the formats."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from fp4rt import format as facts
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
