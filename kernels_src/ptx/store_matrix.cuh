// 8x8 matrices of two-byte elements from registers to shared memory, each transposed (stmatrix, sm_90).
// Lane l gives the address of a 16-byte row: row l%8 of matrix l/8.
// Source: PTX ISA, "Data Movement and Conversion Instructions: stmatrix".
#pragma once
#include "num/integers.cuh"

__device__ __forceinline__ void store_matrix_x2_transposed(u32 address, u32 m0, u32 m1) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(m0), "r"(m1)
                 : "memory");
}

__device__ __forceinline__ void store_matrix_x4_transposed(u32 address, u32 m0, u32 m1, u32 m2, u32 m3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(m0),
                 "r"(m1), "r"(m2), "r"(m3)
                 : "memory");
}
