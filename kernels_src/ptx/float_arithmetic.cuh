// fp32 arithmetic, one instruction each; round to nearest even, nothing flushed to zero.
// Source: PTX ISA, "Floating Point Instructions: mul, fma, max".
#pragma once

// a * b rounded, then clamped to [0, 1]; NaN gives 0.
__device__ __forceinline__ float multiply_saturate(float a, float b) {
    float result;
    asm("mul.rn.sat.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
}

__device__ __forceinline__ float fused_multiply_add(float a, float b, float c) {
    float result;
    asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(result) : "f"(a), "f"(b), "f"(c));
    return result;
}

__device__ __forceinline__ float absolute(float a) {
    float result;
    asm("abs.f32 %0, %1;" : "=f"(result) : "f"(a));
    return result;
}

// The larger one; a NaN loses.
__device__ __forceinline__ float maximum(float a, float b) {
    float result;
    asm("max.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
}

// The larger one; NaN if one of them is.
__device__ __forceinline__ float maximum_nan(float a, float b) {
    float result;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
}
