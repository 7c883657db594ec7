// Half a block, eight codes, to numbers: code * fp32(scale / global_scale), then one rounding.
#pragma once
#include "num/bits.cuh"
#include "num/constants.cuh"
#include "block/e2m1.cuh"
#include "ptx/half_pairs.cuh"
#include "ptx/pair_convert.cuh"

constexpr u32 HALF_BLOCK = BLOCK / 2;

// Codes j and j + 4 of eight as a pair of fp16, exact. Their bits in fp16's place are the value times UNIT.
__device__ __forceinline__ u32 pair_of_values(u32 codes, u32 j) {
    constexpr u32 ONE_OVER_UNIT = 0x74007400u;  // 2^14
    const u32 magnitude = j < 3 ? codes << (9 - 4 * j) : codes >> (4 * j - 9);  // from bits 4 j + 2 .. 4 j
    const u32 sign = codes << (12 - 4 * j);                                     // from bit 4 j + 3
    return multiply_f16x2((magnitude & SIX_UNITS) | (sign & 0x80008000u), ONE_OVER_UNIT);
}

// Eight numbers of the type as words in memory order: 4 words for fp16 and bf16, 8 for fp32.
template <int TYPE>
__device__ __forceinline__ void dequantize_half_block(u32 codes, float scale, u32* word) {
    float value[HALF_BLOCK];
#pragma unroll
    for (u32 j = 0; j < 4; ++j) {
        const u32 pair = pair_of_values(codes, j);
        value[j] = float_from_low_f16(pair) * scale;
        value[j + 4] = float_from_high_f16(pair) * scale;
    }
#pragma unroll
    for (u32 i = 0; i < HALF_BLOCK; ++i) {
        if (TYPE == FLOAT32) word[i] = bits_of(value[i]);
        if (TYPE == FLOAT16 && i % 2) word[i / 2] = f16x2_from_floats(value[i - 1], value[i]);
        if (TYPE == BFLOAT16 && i % 2) word[i / 2] = bf16x2_from_floats(value[i - 1], value[i]);
    }
}
