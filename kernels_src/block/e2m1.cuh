// e2m1 by fp32 arithmetic: sign, two exponent bits, one mantissa bit.
//
//   code   0    1    2    3    4    5    6    7
//   value  0   0.5   1   1.5   2    3    4    6
//
// Source: OCP Microscaling Formats (MX) v1.0, E2M1; the rules are those of fp4rt/format.py, step 5.
#pragma once
#include "num/bits.cuh"
#include "num/constants.cuh"
#include "ptx/float_arithmetic.cuh"
#include "ptx/logic.cuh"
#include "ptx/pair_convert.cuh"
#include "ptx/pair_maximum.cuh"

// Everything here works on y = a * UNIT, a = |x * factor|. In fp16, an e2m1 value times UNIT has the value's code in
// bits 11..9, the subnormal 0.5 included: 0.5 * 2^-14 = 0x0200, 6 * 2^-14 = 0x0E00.
constexpr float UNIT = 6.103515625e-05f;  // 2^-14
constexpr u32 SIX_UNITS = 0x0E000E00u;    // as a pair of fp16

// a rounded to an e2m1 value as if the format had no largest one: 8, 12, 16, ... On entry: y in [0, 1].
//
// With t = max(y, 1.5 UNIT) and M = 2^22 t, exact inside the fma, w = -RN(M - y) is one rounding:
//   a < 1.5              M - y lies in a binade whose neighbours are UNIT / 2 apart: multiples of 0.5, ties to even.
//   a in [2^e, 2^(e+1))  M = 2^22 y is a multiple of 2^(e-1) UNIT, so a is rounded to 2^(e-1): e2m1's spacing there.
// M - y may fall below its binade only for a just above a power of two, where the finer spacing rounds to 2^e as well;
// M + y would rise above it for a just below one, and round 2 - ulp to 1.5. A tie goes to the even code because M is
// an even multiple of the spacing. w + M is exact.
__device__ __forceinline__ float round_to_e2m1(float y) {
    constexpr float SHIFT = 4194304.0f;  // 2^22
    const float t = maximum(y, 1.5f * UNIT);
    const float w = fused_multiply_add(t, -SHIFT, y);
    return fused_multiply_add(t, SHIFT, w);
}

// Two rounded values and the word that has their signs in bits 15 and 31, to codes in bits 15..12 and 31..28. The bits
// below a code are 0.
__device__ __forceinline__ u32 pair_of_codes(float even, float odd, u32 signs) {
    const u32 pair = minimum_f16x2(f16x2_from_floats(even, odd), SIX_UNITS);
    return bit_select(signs, pair * 8u, 0x80008000u);
}

// Four such pairs to eight nibbles, the first element lowest.
__device__ __forceinline__ u32 gather_codes(const u32* pair) {
    const u32 first = permute_bytes(pair[0], pair[1], 0x7351);   // even 0, even 1, odd 0, odd 1
    const u32 second = permute_bytes(pair[2], pair[3], 0x7351);  // even 2, even 3, odd 2, odd 3
    const u32 even = permute_bytes(first, second, 0x5410);
    const u32 odd = permute_bytes(first, second, 0x7632);
    return odd | even >> 4;
}

// The magnitude in comparisons, as the specification says it: slow, for the tests. NaN gives 0.
__device__ __forceinline__ u32 e2m1_magnitude_by_comparison(float a) {
    return (u32)(a > 0.25f) + (u32)(a >= 0.75f) + (u32)(a > 1.25f) + (u32)(a >= 1.75f) + (u32)(a > 2.5f) +
           (u32)(a >= 3.5f) + (u32)(a > 5.0f);
}
