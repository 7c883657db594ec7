"""NVFP4 said once: number formats, constants, and the order of operations.

Every backend follows these steps, in fp32, round to nearest even at each step, without flush-to-zero,
fused multiply-add or approximate reciprocal. Codes and scales of two backends are equal bit for bit.

Quantize, per block of 16 consecutive columns of a row:

    1. v     = max |x| of the block, after widening to fp32
    2. t     = global_scale * (v * R6)                     R6 = fp32(1/6)
    3. scale = e4m3(t)                                     nearest even, subnormals kept, saturating at 448
    4. enc   = 0 if scale = 0, else 1 / (scale * (1 / global_scale))
    5. code  = e2m1(x * enc)                               nearest, ties to the even code, saturating at 6;
                                                           the sign bit is x's own: -0 gives code 8

A block whose scale is 0 has codes 0 (without signs). A block with a NaN has scale 0x7F and codes 0.
+-Inf saturates: scale 0x7E, and the element becomes +-6.

Global scale of a tensor: 2688 / amax over the finite values, 1.0 where amax is 0 or nothing is finite, clamped
to the largest finite fp32. It is the *encode* scale; checkpoints that store its reciprocal call it decode scale.

Dequantize: code * fp32(scale / global_scale), then one rounding to the output dtype.

Source: the order is that of vLLM's reference for ``scaled_fp4_quant``; e2m1 and e4m3 are those of the OCP
Microscaling Formats (MX) v1.0 specification and of the OCP 8-bit floating point specification (FP8 E4M3).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

__all__ = [
    "AMAX_TARGET",
    "BLOCK",
    "CODES_PER_BYTE",
    "E2M1",
    "E2M1_MAX",
    "E4M3",
    "E4M3_MAX",
    "E4M3_MAX_BYTE",
    "E4M3_NAN_BYTE",
    "FP32_MAX",
    "INPUT_DTYPES",
    "NEGATIVE_ZERO_CODE",
    "R6",
    "R6_BITS",
    "FloatFormat",
]


@dataclass(frozen=True)
class FloatFormat:
    """A small binary float: sign, ``exponent_bits``, ``mantissa_bits``, ``bias``; ``nan_codes`` are magnitudes."""

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    nan_codes: tuple[int, ...] = ()

    @property
    def magnitude_count(self) -> int:
        """Number of codes with the sign bit clear."""
        return 1 << (self.exponent_bits + self.mantissa_bits)

    def decode_magnitude(self, code: int) -> float:
        """Value of a code with the sign bit clear."""
        if code in self.nan_codes:
            return float("nan")
        exponent, mantissa = divmod(code, 1 << self.mantissa_bits)
        fraction = mantissa / (1 << self.mantissa_bits)
        if exponent == 0:  # subnormal
            return fraction * 2.0 ** (1 - self.bias)
        return (1.0 + fraction) * 2.0 ** (exponent - self.bias)

    @cached_property
    def values(self) -> np.ndarray:
        """fp32 values of every code, negative half included; exact for both formats here."""
        magnitudes = np.array([self.decode_magnitude(c) for c in range(self.magnitude_count)], np.float32)
        table = np.concatenate([magnitudes, -magnitudes])
        table.setflags(write=False)
        return table


# 0b0'00'0 0.0   0b0'00'1 0.5   0b0'01'0 1.0   0b0'01'1 1.5   0b0'10'0 2.0   0b0'10'1 3.0   0b0'11'0 4.0   0b0'11'1 6.0
E2M1 = FloatFormat("e2m1", exponent_bits=2, mantissa_bits=1, bias=1)
# 0b0'0000'001 2^-9   0b0'0001'000 2^-6   0b0'0111'000 1.0   0b0'1111'110 448   0b0'1111'111 NaN; no infinity
E4M3 = FloatFormat("e4m3", exponent_bits=4, mantissa_bits=3, bias=7, nan_codes=(0x7F,))

BLOCK = 16
CODES_PER_BYTE = 2
NEGATIVE_ZERO_CODE = 0x8
E2M1_MAX = 6.0
E4M3_MAX = 448.0
E4M3_MAX_BYTE = 0x7E
E4M3_NAN_BYTE = 0x7F
AMAX_TARGET = E2M1_MAX * E4M3_MAX  # 2688: the amax that a global scale of 1 represents exactly
R6_BITS = 0x3E2AAAAB
R6 = np.uint32(R6_BITS).view(np.float32)
FP32_MAX = np.finfo(np.float32).max

INPUT_DTYPES = ("float16", "bfloat16", "float32")
