// The warp-wide matrix product m16n8k16 with fp32 accumulation (mma.sync, sm_80).
//
// Lane = 4 g + t. Each register of a and b holds two neighbours along k, the lower k in the low half:
//   a[0] row g, k 2t   a[1] row g+8, k 2t   a[2] row g, k 2t+8   a[3] row g+8, k 2t+8
//   b[0] column g, k 2t                     b[1] column g, k 2t+8
//   c[0] row g, column 2t   c[1] row g, column 2t+1   c[2] row g+8, column 2t   c[3] row g+8, column 2t+1
// Source: PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type".
#pragma once
#include "num/integers.cuh"

__device__ __forceinline__ void mma_f16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void mma_bf16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
