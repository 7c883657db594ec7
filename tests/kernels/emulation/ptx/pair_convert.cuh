// kernels_src/ptx/pair_convert.cuh on a CPU: what the emulated kernels use of it.
#pragma once
#include "ptx/half_convert.cuh"

inline u32 f16x2_from_floats(float low, float high) { return f16_from_float(low) | (u32)f16_from_float(high) << 16; }
inline u32 bf16x2_from_floats(float low, float high) { return bf16_from_float(low) | (u32)bf16_from_float(high) << 16; }
