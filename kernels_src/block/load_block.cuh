// 16 neighbouring elements of a row into registers, whatever the strides and the alignment.
#pragma once
#include "block/elements.cuh"
#include "ptx/global_memory.cuh"

// On entry: `from` is a multiple of BYTES, and all 16 elements are there.
template <u32 BYTES, u32 WORDS>
__device__ __forceinline__ void load_dense(const u8* from, u32* word) {
#pragma unroll
    for (u32 i = 0; i < WORDS; i += BYTES < 4 ? 1 : BYTES / 4) {
        if constexpr (BYTES == 16) load_16(from + 4 * i, word + i);
        if constexpr (BYTES == 8) load_8(from + 4 * i, word + i);
        if constexpr (BYTES == 4) word[i] = load_4(from + 4 * i);
        if constexpr (BYTES == 2) word[i] = load_2(from + 4 * i) | load_2(from + 4 * i + 2) << 16;
    }
}

// `count` elements, `stride` bytes apart; zeros after them.
template <int TYPE>
__device__ __forceinline__ void load_strided(const u8* from, i64 stride, u32 count, u32* word) {
    using E = Elements<TYPE>;
#pragma unroll
    for (u32 i = 0; i < BLOCK; ++i) {
        u32 bits = 0;
        if (i < count) bits = E::BYTES == 4 ? load_4(from + i * stride) : load_2(from + i * stride);
        if (E::BYTES == 4) {
            word[i] = bits;
        } else {
            word[i / 2] = i % 2 ? word[i / 2] | bits << 16 : bits;
        }
    }
}

// `access_bytes` is the widest load that the block allows, 0 where its elements are not neighbours.
template <int TYPE>
__device__ __forceinline__ void load_block(const u8* from, i64 stride, u32 count, u32 access_bytes, u32* word) {
    constexpr u32 WORDS = Elements<TYPE>::WORDS;
    if (count < BLOCK || access_bytes == 0) {
        load_strided<TYPE>(from, stride, count, word);
    } else if (access_bytes == 16) {
        load_dense<16, WORDS>(from, word);
    } else if (access_bytes == 8) {
        load_dense<8, WORDS>(from, word);
    } else if (access_bytes == 4) {
        load_dense<4, WORDS>(from, word);
    } else {
        load_dense<2, WORDS>(from, word);
    }
}
