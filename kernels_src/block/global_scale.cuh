// The global scale of a launch: given by value or at an address, and copied to where the result keeps its own.
#pragma once
#include "num/constants.cuh"

// 2688 / amax, 1 where amax is 0, never infinite.
__device__ __forceinline__ float global_scale_of(float amax) {
    if (amax == 0.0f) return 1.0f;
    const float scale = AMAX_TARGET / amax;
    return scale < FP32_MAX ? scale : FP32_MAX;
}

// `from` null: the value itself.
__device__ __forceinline__ float read_global_scale(const float* from, float value) { return from ? *from : value; }

// One thread of the launch keeps it, unless `keep` is null.
__device__ __forceinline__ void keep_global_scale(float* keep, float global_scale, bool this_thread) {
    if (keep && this_thread) *keep = global_scale;
}

// Whether reciprocals, quotients and products with e4m3 scales stay far from both ends of fp32, powers of two of the
// formats' own size included. Not so for NaN, infinity and what is not positive.
__device__ __forceinline__ bool is_ordinary(float global_scale) {
    constexpr float SMALLEST = 7.8886090522101180541e-31f, LARGEST = 1.2676506002282294015e30f;  // 2^-100, 2^100
    return global_scale >= SMALLEST && global_scale <= LARGEST;
}
