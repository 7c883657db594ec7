// e4m3 in integers and fp32 alone: what sm_80 and sm_86 run, and what every other conversion is checked against.
//
//   0b0'0000'001  2^-9     0b0'0001'000  2^-6     0b0'1111'110  448     0b0'1111'111  NaN     no infinity
//
// Source: OCP 8-bit floating point specification (OFP8), E4M3; the rules are those of fp4rt/format.py.
#pragma once
#include "num/bits.cuh"
#include "num/constants.cuh"

// Nearest even, subnormals kept, saturating at 448. On entry: value >= 0 or NaN, which gives 0x7F.
__device__ __forceinline__ u32 e4m3_from_float_portable(float value) {
    constexpr u32 DROPPED = 23 - E4M3_MANTISSA_BITS;
    constexpr u32 REBIAS = (127 - E4M3_BIAS) << E4M3_MANTISSA_BITS;
    constexpr float SMALLEST_NORMAL = 0.015625f;  // 2^-6
    constexpr float SUBNORMAL_STEPS = 16384.0f;   // 2^14: its neighbours are 2^-9 apart, so the sum rounds to them
    const u32 bits = bits_of(value);
    if (bits > 0x7F800000u) return E4M3_NAN_BYTE;
    if (value < SMALLEST_NORMAL) return bits_of(value + SUBNORMAL_STEPS) & 0xFFu;
    const u32 rounded = (bits + ((1u << (DROPPED - 1)) - 1) + ((bits >> DROPPED) & 1)) >> DROPPED;
    return rounded - REBIAS < E4M3_MAX_BYTE ? rounded - REBIAS : E4M3_MAX_BYTE;
}

// Exact. The byte's exponent and mantissa in fp32's place are the value times 2^-120, subnormals included.
__device__ __forceinline__ float float_from_e4m3_portable(u32 byte) {
    constexpr u32 KEPT = 23 - E4M3_MANTISSA_BITS;
    const u32 magnitude = byte & 0x7Fu, sign = (byte & 0x80u) << 24;
    if (magnitude == E4M3_NAN_BYTE) return float_of(sign | 0x7FC00000u);
    return float_of(sign | (magnitude << KEPT)) * float_of((127u + 127u - E4M3_BIAS) << 23);
}
