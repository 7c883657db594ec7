#pragma once
#include "ptx/float_arithmetic.cuh"
#include "ptx/pair_convert.cuh"

inline u32 absolute_f16x2(u32 a) { return a & 0x7FFF7FFFu; }
inline u32 absolute_bf16x2(u32 a) { return a & 0x7FFF7FFFu; }

template <float (*CHOOSE)(float, float)>
u32 choose_f16x2(u32 a, u32 b) {
    return f16x2_from_floats(CHOOSE(float_from_low_f16(a), float_from_low_f16(b)),
                             CHOOSE(float_from_high_f16(a), float_from_high_f16(b)));
}

template <float (*CHOOSE)(float, float)>
u32 choose_bf16x2(u32 a, u32 b) {
    return bf16x2_from_floats(CHOOSE(float_from_low_bf16(a), float_from_low_bf16(b)),
                              CHOOSE(float_from_high_bf16(a), float_from_high_bf16(b)));
}

inline float minimum_of_numbers(float a, float b) { return a != a ? b : b != b ? a : a < b ? a : b; }

inline u32 maximum_nan_f16x2(u32 a, u32 b) { return choose_f16x2<maximum_nan>(a, b); }
inline u32 maximum_nan_bf16x2(u32 a, u32 b) { return choose_bf16x2<maximum_nan>(a, b); }
inline u32 minimum_f16x2(u32 a, u32 b) { return choose_f16x2<minimum_of_numbers>(a, b); }
inline u32 maximum_f16x2(u32 a, u32 b) { return choose_f16x2<maximum>(a, b); }
inline u32 maximum_bf16x2(u32 a, u32 b) { return choose_bf16x2<maximum>(a, b); }
