// Arithmetic on two fp16 or two bf16 numbers in one register. Nothing is flushed to zero.
// Source: PTX ISA, "Half Precision Floating Point Instructions: mul, fma". bf16 has only fma before sm_90:
// a * b + (-0) is a * b, signs of zero included.
#pragma once
#include "num/integers.cuh"

__device__ __forceinline__ u32 multiply_f16x2(u32 a, u32 b) {
    u32 result;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
}

__device__ __forceinline__ u32 fma_f16x2(u32 a, u32 b, u32 c) {
    u32 result;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
    return result;
}

__device__ __forceinline__ u32 fma_bf16x2(u32 a, u32 b, u32 c) {
    u32 result;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
    return result;
}

__device__ __forceinline__ u32 multiply_bf16x2(u32 a, u32 b) { return fma_bf16x2(a, b, 0x80008000u); }

// The low (high) half in both halves. The compiler folds it into the operand of a packed multiplication.
__device__ __forceinline__ u32 both_low(u32 pair) {
    u32 result;
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {l, l};}" : "=r"(result) : "r"(pair));
    return result;
}

__device__ __forceinline__ u32 both_high(u32 pair) {
    u32 result;
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {h, h};}" : "=r"(result) : "r"(pair));
    return result;
}
