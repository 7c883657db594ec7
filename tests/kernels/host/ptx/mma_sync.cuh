#pragma once
#include "num/integers.cuh"

// The decoding of codes shares a file with the product; no test here multiplies matrices.
void mma_f16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1);
void mma_bf16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1);
