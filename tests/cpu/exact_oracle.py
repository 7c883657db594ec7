"""An oracle for quantization in exact integer arithmetic; no floating-point operation decides anything.

A number is ``mantissa * 2**exponent`` in int64 arrays. Products and quotients of two fp32 mantissas fit, so each step
of the specification is computed exactly and then rounded once to fp32 by integer shifts. Codes are found by comparing
with the midpoints of the code tables as integers. Nothing here comes from the package but the tables' values, which
the tests of the facts check against the formats' definitions.

``Fraction`` versions of the same steps, one number at a time, check the vectorized ones.
"""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

import numpy as np

# Values as the formats define them, from small to large code; e4m3 code 0x7F is NaN and not among them.
E2M1_VALUES = [Fraction(v) for v in ("0", "1/2", "1", "3/2", "2", "3", "4", "6")]
E4M3_VALUES = [
    Fraction(code & 7, 8) * Fraction(2) ** -6
    if code < 8
    else (1 + Fraction(code & 7, 8)) * Fraction(2) ** ((code >> 3) - 7)
    for code in range(0x7F)
]
R6_BITS = 0x3E2AAAAB
INFINITY = 0x7F800000
SMALLEST_EXPONENT = -149
MANTISSA_BITS = 24


class Exact(NamedTuple):
    """mantissa * 2**exponent, plus something below half of the last place of ``mantissa`` where ``more`` is set."""

    mantissa: np.ndarray
    exponent: np.ndarray
    more: np.ndarray


def bit_length(value: np.ndarray) -> np.ndarray:
    length = np.zeros(value.shape, np.int64)
    rest = value.copy()
    for step in (32, 16, 8, 4, 2, 1):
        big = rest >= (np.int64(1) << step)
        length += np.where(big, step, 0)
        rest = np.where(big, rest >> step, rest)
    return length + (rest > 0)


def split(bits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(mantissa, exponent) of finite fp32 magnitudes."""
    bits = bits.astype(np.int64)
    field, fraction = bits >> 23, bits & 0x7FFFFF
    return np.where(field == 0, fraction, fraction | 0x800000), np.maximum(field, 1) - 150


def round_to_fp32(value: Exact) -> np.ndarray:
    """Bits of the nearest fp32, ties to even, subnormals kept, overflow to infinity."""
    mantissa, exponent, more = value
    shift = np.maximum(bit_length(mantissa) - MANTISSA_BITS, SMALLEST_EXPONENT - exponent)
    right = np.clip(shift, 0, 62)
    kept = mantissa >> right
    lost = mantissa - (kept << right)
    half = np.where(right > 0, np.int64(1) << np.maximum(right - 1, 0), np.int64(1) << 62)
    up = (lost > half) | ((lost == half) & (more | (kept & 1 == 1)))
    kept = np.where(shift > 62, 0, kept + up)
    left = np.clip(-shift, 0, 62)  # fewer bits than fp32 has: exact
    kept, place = kept << left, exponent + right - left
    carried = kept == 1 << MANTISSA_BITS
    kept, place = np.where(carried, kept >> 1, kept), place + carried
    field = np.where(kept < 0x800000, 0, place + 150)
    bits = (field << 23) | (kept & 0x7FFFFF)
    return np.where(field >= 255, INFINITY, np.where(kept == 0, 0, bits)).astype(np.uint32)


def multiply(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """fp32 bits of the rounded product of finite magnitudes."""
    (ma, ea), (mb, eb) = split(a), split(b)
    product = ma * mb
    return round_to_fp32(Exact(product, ea + eb + np.zeros_like(product), np.zeros(product.shape, bool)))


def reciprocal(b: np.ndarray) -> np.ndarray:
    """fp32 bits of the rounded 1 / b of finite positive magnitudes."""
    mantissa, exponent = split(b)
    numerator = np.int64(1) << 61
    quotient, rest = numerator // mantissa, numerator % mantissa
    return round_to_fp32(Exact(quotient, -61 - exponent, rest > 0))


def divide(numerator: int, b: np.ndarray) -> np.ndarray:
    """fp32 bits of the rounded quotient of a small integer and finite positive magnitudes."""
    mantissa, exponent = split(b)
    scaled = np.int64(numerator) << 48
    quotient, rest = scaled // mantissa, scaled % mantissa
    return round_to_fp32(Exact(quotient, -48 - exponent, rest > 0))


def nearest_code(bits: np.ndarray, values: list[Fraction], fraction_bits: int) -> np.ndarray:
    """Code of the nearest value, ties to the even code, saturating; infinity too. Every midpoint has at most
    ``fraction_bits`` bits behind the point."""
    midpoints = [(low + high) / 2 * 2**fraction_bits for low, high in pairwise(values)]
    assert all(midpoint.denominator == 1 for midpoint in midpoints)
    ties = np.array([int(midpoint) for midpoint in midpoints], np.int64)
    mantissa, exponent = split(np.where(bits == INFINITY, 0, bits))
    shift = exponent + fraction_bits
    huge = (bits == INFINITY) | (shift + bit_length(mantissa) > 40)
    left, right = np.clip(shift, 0, 38), np.clip(-shift, 0, 62)
    whole = np.where(huge, 1 << 40, np.where(shift >= 0, mantissa << left, mantissa >> right))
    beyond = ~huge & (shift < 0) & ((mantissa - ((mantissa >> right) << right) != 0) | (-shift > 62) & (mantissa > 0))
    code = np.searchsorted(ties, whole, side="left")  # the number of ties below the whole part
    on_tie = (code < len(ties)) & (whole == ties[np.minimum(code, len(ties) - 1)])
    return (code + (on_tie & (beyond | (code % 2 == 1)))).astype(np.uint8)


def quantize_blocks(bits: np.ndarray, global_scale: np.float32) -> tuple[np.ndarray, np.ndarray]:
    """Codes (blocks, 16) and scales (blocks,) of fp32 bit patterns (blocks, 16)."""
    magnitude, sign = bits & np.uint32(0x7FFFFFFF), (bits >> np.uint32(31)).astype(np.uint8)
    gs = np.array(global_scale, np.float32).view(np.uint32)
    v = magnitude.max(axis=1)  # 1: magnitudes order as integers
    is_nan, is_infinite = v > INFINITY, v == INFINITY
    finite = np.where(is_nan | is_infinite, 0, v)
    inner = multiply(finite, np.uint32(R6_BITS))
    t = np.where(inner == INFINITY, INFINITY, multiply(np.where(inner == INFINITY, 0, inner), gs))  # 2
    t = np.where(is_infinite, INFINITY, t).astype(np.uint32)
    scales = np.where(is_nan, 0x7F, nearest_code(t, E4M3_VALUES, 10)).astype(np.uint8)  # 3
    enc = np.array([_encode_factor(code, gs) for code in range(0x7F)] + [0], np.uint32)[scales]  # 4
    codes = _codes(magnitude, enc[:, None])  # 5
    codes |= sign << 3
    codes[(scales == 0) | (scales == 0x7F)] = 0
    return codes, scales


def _encode_factor(code: int, gs: np.ndarray) -> int:
    """Step 4 for one scale byte: fp32 bits of 1 / (scale * (1 / global_scale))."""
    if code == 0:
        return 0
    scale = np.array(float(E4M3_VALUES[code]), np.float32).view(np.uint32)
    inverse = reciprocal(gs)
    decoded = INFINITY if inverse == INFINITY else int(multiply(scale, inverse))
    return 0 if decoded == INFINITY else int(reciprocal(np.array(decoded, np.uint32)))


def _codes(magnitude: np.ndarray, enc: np.ndarray) -> np.ndarray:
    """Step 5 without signs. Zero stays zero and infinity the largest code, whatever they are multiplied with."""
    enc = np.broadcast_to(enc, magnitude.shape)
    special = (magnitude >= INFINITY) | (enc == INFINITY)
    product = multiply(np.where(special, 0, magnitude), np.where(special, 0, enc))
    product = np.where(special, INFINITY, product).astype(np.uint32)
    codes = nearest_code(product, E2M1_VALUES, 2)
    return np.where(magnitude == 0, 0, codes).astype(np.uint8)


# ---- the same with rationals, one number at a time


def fraction_of(bits: int) -> Fraction:
    """Value of a finite fp32 magnitude."""
    field, fraction = bits >> 23, bits & 0x7FFFFF
    mantissa = fraction if field == 0 else fraction | 0x800000
    return Fraction(mantissa) * Fraction(2) ** (max(field, 1) - 150)


def rounded(value: Fraction) -> Fraction:
    """The nearest fp32 value, ties to even; the caller keeps away from overflow."""
    if value == 0:
        return value
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    if Fraction(2) ** exponent > value:
        exponent -= 1
    step = Fraction(2) ** max(exponent - (MANTISSA_BITS - 1), SMALLEST_EXPONENT)
    return round(value / step) * step  # Python rounds Fractions to nearest even


def nearest(value: Fraction, values: list[Fraction]) -> int:
    """Code of the nearest value, ties to the even code."""
    return min(range(len(values)), key=lambda code: (abs(values[code] - value), code % 2))


def quantize_block(bits: list[int], global_scale: np.float32) -> tuple[list[int], int]:
    """Codes and scale of one block of finite fp32 patterns, by rationals; nothing may overflow."""
    gs = fraction_of(int(np.array(global_scale, np.float32).view(np.uint32)))
    x = [fraction_of(b & 0x7FFFFFFF) for b in bits]
    v = max(x)  # 1
    t = rounded(gs * rounded(v * fraction_of(R6_BITS)))  # 2
    scale = nearest(t, E4M3_VALUES)  # 3
    if scale == 0:
        return [0] * len(bits), 0
    enc = rounded(1 / rounded(E4M3_VALUES[scale] * rounded(1 / gs)))  # 4
    return [nearest(rounded(a * enc), E2M1_VALUES) | (b >> 31) << 3 for a, b in zip(x, bits, strict=True)], scale  # 5
