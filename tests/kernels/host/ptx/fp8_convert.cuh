#pragma once
#include "num/e4m3.cuh"

inline u32 e4m3x2_from_floats(float low, float high) {
    return e4m3_from_float_portable(low) | e4m3_from_float_portable(high) << 8;
}

inline float float_from_e4m3(u32 byte) { return float_from_e4m3_portable(byte); }
