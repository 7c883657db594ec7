// Bit logic that C++ has no operator for: three-input logic, byte permutation, rotation.
// Source: PTX ISA, "Logic and Shift Instructions: lop3, shf" and "prmt".
#pragma once
#include "num/integers.cuh"

// Bits of `ones` where `mask` is 1, of `zeros` where it is 0.
__device__ __forceinline__ u32 bit_select(u32 ones, u32 zeros, u32 mask) {
    u32 result;
    asm("lop3.b32 %0, %1, %2, %3, 0xE2;" : "=r"(result) : "r"(ones), "r"(mask), "r"(zeros));
    return result;
}

// (a & mask) | b
__device__ __forceinline__ u32 and_or(u32 a, u32 mask, u32 b) {
    u32 result;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(result) : "r"(a), "r"(mask), "r"(b));
    return result;
}

// Four bytes out of the eight of (high, low): selector nibble i says which one byte i of the result is.
__device__ __forceinline__ u32 permute_bytes(u32 low, u32 high, u32 selector) {
    u32 result;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(low), "r"(high), "r"(selector));
    return result;
}

__device__ __forceinline__ u32 rotate_left(u32 value, u32 bits) {
    u32 result;
    asm("shf.l.wrap.b32 %0, %1, %1, %2;" : "=r"(result) : "r"(value), "r"(bits));
    return result;
}

// Left shifts as a multiplication: it runs on the multiply-add pipe, which the decoding of codes leaves idle,
// while shifts share the logic pipe with everything else.
template <u32 FACTOR>
__device__ __forceinline__ u32 multiply_by(u32 value) {
    u32 result;
    asm("mul.lo.u32 %0, %1, %2;" : "=r"(result) : "r"(value), "n"(FACTOR));
    return result;
}

template <int BITS>
__device__ __forceinline__ u32 multiply_shift(u32 value) {
    return multiply_by<1u << BITS>(value);
}
