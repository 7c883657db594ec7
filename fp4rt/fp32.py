"""fp32 numbers and their bits, by integers: the same whatever the calling thread does with subnormals and rounding.

A thread may flush subnormals, as XLA's do and ``torch.set_flush_denormal`` makes any other; every conversion between
fp32 and fp64 by the processor then does so too. Python's floats hold subnormal numbers of fp32 as normal ones.
"""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np

__all__ = ["bits_of", "nearest", "number_of"]

_INFINITY, _NAN = 0x7F800000, 0x7FC00000
_BIAS, _FP64_BIAS = 127, 1023
_FRACTION_BITS, _FP64_FRACTION_BITS = 23, 52


def bits_of(number: float) -> int:
    """The bits of the fp32 number nearest to ``number``, ties to even; infinity beyond the largest one."""
    (wide,) = struct.unpack("<Q", struct.pack("<d", number))
    sign, exponent, fraction = (
        wide >> 63 << 31,
        wide >> _FP64_FRACTION_BITS & 0x7FF,
        wide & (1 << _FP64_FRACTION_BITS) - 1,
    )
    if exponent == 0x7FF:
        return sign | (_NAN if fraction else _INFINITY)
    exponent += _BIAS - _FP64_BIAS
    if exponent >= 0xFF:
        return sign | _INFINITY
    dropped = _FP64_FRACTION_BITS - _FRACTION_BITS + max(0, 1 - exponent)
    significand = fraction | 1 << _FP64_FRACTION_BITS
    half_less_one, odd = (1 << (dropped - 1)) - 1, significand >> dropped & 1
    rounded = (significand + half_less_one + odd) >> dropped
    below = max(0, exponent - 1) << _FRACTION_BITS  # the leading one of a normal number, or a carry, adds the rest
    return sign | below + rounded


def number_of(bits: int) -> float:
    """The fp32 number with these bits."""
    exponent, fraction = bits >> _FRACTION_BITS & 0xFF, bits & (1 << _FRACTION_BITS) - 1
    if exponent == 0xFF:
        size = math.nan if fraction else math.inf
    else:
        significand = fraction | (exponent > 0) << _FRACTION_BITS
        size = math.ldexp(significand, max(exponent, 1) - _BIAS - _FRACTION_BITS)
    return math.copysign(size, -1.0 if bits >> 31 else 1.0)


def nearest(value: Any) -> float:
    """The fp32 number nearest to a real number of Python or NumPy, ties to even.

    Raises:
        OverflowError: an integer that even fp64 cannot hold.
    """
    if isinstance(value, np.float32):
        return number_of(int(value.view(np.uint32)))
    return number_of(bits_of(float(value)))
