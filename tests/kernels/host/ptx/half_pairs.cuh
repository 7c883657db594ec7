#pragma once
#include "ptx/pair_convert.cuh"

inline u32 multiply_f16x2(u32 a, u32 b) {
    return f16x2_from_floats(float_from_low_f16(a) * float_from_low_f16(b), float_from_high_f16(a) * float_from_high_f16(b));
}

// For products, which no test here runs.
u32 both_low(u32 pair);
u32 both_high(u32 pair);
u32 fma_f16x2(u32 a, u32 b, u32 c);
u32 fma_bf16x2(u32 a, u32 b, u32 c);
u32 multiply_bf16x2(u32 a, u32 b);
