// One number between fp32 and fp16 or bf16, as bits; narrowing rounds to nearest even.
// Source: PTX ISA, "Data Movement and Conversion Instructions: cvt".
#pragma once
#include "num/integers.cuh"

__device__ __forceinline__ u16 f16_from_float(float value) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

__device__ __forceinline__ u16 bf16_from_float(float value) {
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

__device__ __forceinline__ float float_from_f16(u16 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

__device__ __forceinline__ float float_from_bf16(u16 bits) { return __uint_as_float((u32)bits << 16); }
