"""What tests of numbers share: bit patterns of any array, and a report of where two arrays differ."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from fp4rt.cpu import reference

DTYPES = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
}


def bits_of(array: np.ndarray) -> np.ndarray:
    """The elements as unsigned integers."""
    return array.view(f"u{array.itemsize}")


def widened(array: np.ndarray) -> np.ndarray:
    """fp32 values of a float16, bfloat16 or float32 array."""
    return reference.widen(bits_of(array), array.dtype.name)


def assert_same_bits(got: np.ndarray, want: np.ndarray, what: str) -> None:
    """Bit for bit, -0 and NaN payloads included; reports the count and the first difference."""
    assert got.shape == want.shape, f"{what}: shape {got.shape}, wanted {want.shape}"
    got_bits, want_bits = bits_of(np.ascontiguousarray(got)), bits_of(np.ascontiguousarray(want))
    different = np.argwhere(got_bits != want_bits)
    if len(different):
        place = tuple(int(i) for i in different[0])
        raise AssertionError(
            f"{what}: {len(different)} of {got.size} differ, first at {place}: "
            f"got {got_bits[place]:#x} ({got[place]}), wanted {want_bits[place]:#x} ({want[place]})"
        )


def assert_same_tensor(got: Any, want: Any, what: str) -> None:
    """Two QuantizedTensors over NumPy with the same bytes everywhere."""
    assert (got.shape, got.layout, got.padded_n) == (want.shape, want.layout, want.padded_n), what
    assert_same_bits(got.data, want.data, f"{what}, data")
    assert_same_bits(got.scales, want.scales, f"{what}, scales")
    assert_same_bits(got.global_scale, want.global_scale, f"{what}, global scale")
