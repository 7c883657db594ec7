#pragma once
#include "half.h"

inline u32 f16x2_from_floats(float low, float high) { return f16_of_float(low) | f16_of_float(high) << 16; }
inline u32 bf16x2_from_floats(float low, float high) { return bf16_of_float(low) | bf16_of_float(high) << 16; }
inline float float_from_low_f16(u32 pair) { return float_of_f16(pair & 0xFFFFu); }
inline float float_from_high_f16(u32 pair) { return float_of_f16(pair >> 16); }
inline float float_from_low_bf16(u32 pair) { return float_of(pair << 16); }
inline float float_from_high_bf16(u32 pair) { return float_of(pair & 0xFFFF0000u); }
