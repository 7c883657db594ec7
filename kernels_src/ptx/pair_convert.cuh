// Two numbers between fp32 and a pair of fp16 or bf16; narrowing rounds to nearest even.
// Source: PTX ISA, "Data Movement and Conversion Instructions: cvt" (f16x2, bf16x2: sm_80).
#pragma once
#include "num/bits.cuh"

__device__ __forceinline__ u32 f16x2_from_floats(float low, float high) {
    u32 pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

__device__ __forceinline__ u32 bf16x2_from_floats(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

__device__ __forceinline__ float float_from_low_f16(u32 pair) {
    float value;
    asm("{.reg .f16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l;}" : "=f"(value) : "r"(pair));
    return value;
}

__device__ __forceinline__ float float_from_high_f16(u32 pair) {
    float value;
    asm("{.reg .f16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, h;}" : "=f"(value) : "r"(pair));
    return value;
}

__device__ __forceinline__ float float_from_low_bf16(u32 pair) { return float_of(pair << 16); }

__device__ __forceinline__ float float_from_high_bf16(u32 pair) { return float_of(pair & 0xFFFF0000u); }
