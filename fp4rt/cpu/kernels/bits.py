"""Conversions between fp16, bf16, fp32, e4m3 and e2m1 on bit patterns.

Bits, not casts: the result is the same whatever the processor's conversion instructions and rounding modes do.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import intrinsic

from fp4rt.cpu.kernels.compiled import element_function
from fp4rt.format import E2M1, E4M3, E4M3_MAX, E4M3_MAX_BYTE

__all__ = [
    "BFLOAT16",
    "FLOAT16",
    "FLOAT32",
    "INFINITY_BITS",
    "KINDS",
    "MAGNITUDE_MASK",
    "bits_of",
    "e2m1_of_magnitude",
    "e4m3_of_magnitude",
    "float_of",
    "round_to_kind",
    "widen",
]

# Source and target types, as kernels name them; float16 and bfloat16 share an integer type.
FLOAT16, BFLOAT16, FLOAT32 = 0, 1, 2
KINDS = {"float16": FLOAT16, "bfloat16": BFLOAT16, "float32": FLOAT32}

u32 = np.uint32
f32 = np.float32

MAGNITUDE_MASK = u32(0x7FFFFFFF)
INFINITY_BITS = u32(0x7F800000)
FLOAT16_REBIAS = u32((127 - 15) << 23)  # between the exponents of fp16 and of fp32
FLOAT16_TOP = u32((255 - 31) << 23)  # between the exponents of their infinities

# TIES[i] lies between codes i and i + 1: .25 .75 1.25 1.75 2.5 3.5 5
E2M1_MAGNITUDES = E2M1.values[: E2M1.magnitude_count]
TIES = tuple((E2M1_MAGNITUDES[:-1] + E2M1_MAGNITUDES[1:]) / f32(2))

E4M3_MANTISSA_SHIFT = u32(23 - E4M3.mantissa_bits)
E4M3_REBIAS = u32((127 - E4M3.bias) << E4M3.mantissa_bits)
E4M3_SMALLEST_NORMAL = f32(2.0 ** (1 - E4M3.bias))
# Adding 2^14 leaves 2^-9, the step of e4m3's subnormals, as the last bit of an fp32 mantissa.
E4M3_SUBNORMAL_MAGIC = f32(2.0 ** (23 + 1 - E4M3.bias - E4M3.mantissa_bits))


@intrinsic
def bits_of(context: Any, value: Any) -> Any:
    """uint32 with the bits of a float32."""

    def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], target.get_value_type(types.uint32))

    return types.uint32(types.float32), generate


@intrinsic
def float_of(context: Any, bits: Any) -> Any:
    """float32 with the bits of a uint32."""

    def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], target.get_value_type(types.float32))

    return types.float32(types.uint32), generate


@element_function
def widen(bits, kind):
    """fp32 bits of a float16, bfloat16 or float32 pattern (uint32 in its low bits); exact, NaN stays NaN."""
    if kind == FLOAT32:
        return bits
    if kind == BFLOAT16:
        return bits << u32(16)
    magnitude = bits & u32(0x7FFF)
    sign = (bits & u32(0x8000)) << u32(16)
    rebias = FLOAT16_REBIAS if magnitude < u32(0x7C00) else FLOAT16_TOP  # infinity, NaN: the largest exponent
    normal = u32((magnitude << u32(13)) + rebias)
    subnormal = bits_of(f32(np.int32(magnitude)) * f32(2.0**-24))  # or zero; exact, and normal in fp32
    return sign | (subnormal if magnitude < u32(0x0400) else normal)


@element_function
def round_to_kind(value, kind):
    """Bits of an fp32 value rounded to nearest even; overflow becomes infinity, NaN stays NaN."""
    bits = bits_of(value)
    if kind == FLOAT32:
        return bits
    magnitude = bits & MAGNITUDE_MASK
    sign = (bits >> u32(16)) & u32(0x8000)
    if kind == BFLOAT16:
        if magnitude > INFINITY_BITS:
            return sign | u32(0x7FC0)
        return (bits + u32(0x7FFF) + ((bits >> u32(16)) & u32(1))) >> u32(16)
    if magnitude > INFINITY_BITS:
        return sign | u32(0x7E00)
    if magnitude >= u32(0x477FF000):  # 65520, the tie between the largest fp16 and 2^16
        return sign | u32(0x7C00)
    if magnitude < u32(0x38800000):  # below 2^-14: adding 1/2 leaves 2^-24 as the last bit of the mantissa
        return sign | (bits_of(float_of(magnitude) + f32(0.5)) - bits_of(f32(0.5)))
    rounded = (magnitude + u32(0x0FFF) + ((magnitude >> u32(13)) & u32(1))) >> u32(13)
    return sign | (rounded - (FLOAT16_REBIAS >> u32(13)))


@element_function
def e4m3_of_magnitude(t):
    """e4m3 byte of a float32 that is not negative and not NaN: nearest even, subnormals kept, saturating."""
    if t >= f32(E4M3_MAX):
        return u32(E4M3_MAX_BYTE)
    if t < E4M3_SMALLEST_NORMAL:
        return bits_of(t + E4M3_SUBNORMAL_MAGIC) - bits_of(E4M3_SUBNORMAL_MAGIC)
    bits = bits_of(t)
    half = (u32(1) << (E4M3_MANTISSA_SHIFT - u32(1))) - u32(1)
    rounded = (bits + half + ((bits >> E4M3_MANTISSA_SHIFT) & u32(1))) >> E4M3_MANTISSA_SHIFT
    return rounded - E4M3_REBIAS


@element_function
def e2m1_of_magnitude(a):
    """e2m1 code of a float32 that is not negative: the number of ties below it, the even neighbour at a tie.

    NaN, which passes no comparison, gives 0.
    """
    low = np.int32(a > TIES[0]) + np.int32(a >= TIES[1]) + np.int32(a > TIES[2]) + np.int32(a >= TIES[3])
    high = np.int32(a > TIES[4]) + np.int32(a >= TIES[5]) + np.int32(a > TIES[6])
    return np.uint8(low + high)
