// Magnitudes and extrema of two fp16 or bf16 numbers in one register.
// Source: PTX ISA, "Half Precision Floating Point Instructions: abs, max, min" (sm_80).
#pragma once
#include "num/integers.cuh"

__device__ __forceinline__ u32 absolute_f16x2(u32 a) {
    u32 result;
    asm("abs.f16x2 %0, %1;" : "=r"(result) : "r"(a));
    return result;
}

__device__ __forceinline__ u32 absolute_bf16x2(u32 a) {
    u32 result;
    asm("abs.bf16x2 %0, %1;" : "=r"(result) : "r"(a));
    return result;
}

// The larger ones; NaN where one of the two is.
__device__ __forceinline__ u32 maximum_nan_f16x2(u32 a, u32 b) {
    u32 result;
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
}

__device__ __forceinline__ u32 maximum_nan_bf16x2(u32 a, u32 b) {
    u32 result;
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
}

__device__ __forceinline__ u32 minimum_f16x2(u32 a, u32 b) {
    u32 result;
    asm("min.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
}

// The larger ones; a NaN loses.
__device__ __forceinline__ u32 maximum_f16x2(u32 a, u32 b) {
    u32 result;
    asm("max.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
}

__device__ __forceinline__ u32 maximum_bf16x2(u32 a, u32 b) {
    u32 result;
    asm("max.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
}
