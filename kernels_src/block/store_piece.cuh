// A piece of results (block/dequantize_block.cuh) to a dense row, at any alignment.
#pragma once
#include "block/dequantize_block.cuh"
#include "ptx/global_memory.cuh"

template <int TYPE, u32 BYTES>
__device__ __forceinline__ void store_dense(u8* to, const u32* word) {
#pragma unroll
    for (u32 i = 0; i < Piece<TYPE>::WORDS; i += BYTES < 4 ? 1 : BYTES / 4) {
        if constexpr (BYTES == 8) store_8(to + 4 * i, word[i], word[i + 1]);
        if constexpr (BYTES == 4) store_4(to + 4 * i, word[i]);
        if constexpr (BYTES == 2) {
            store_2(to + 4 * i, word[i] & 0xFFFFu);
            store_2(to + 4 * i + 2, word[i] >> 16);
        }
    }
}

// The first `count` numbers of a piece. `access_bytes`: the widest access that every piece allows.
template <int TYPE>
__device__ __forceinline__ void store_numbers(u8* to, const u32* word, u64 count, u32 access_bytes) {
    using Result = Piece<TYPE>;
    if (count >= Result::ELEMENTS && access_bytes == 16) {
        store_16(to, word);
    } else if (count >= Result::ELEMENTS && access_bytes == 8) {
        store_dense<TYPE, 8>(to, word);
    } else if (count >= Result::ELEMENTS && access_bytes == 4) {
        store_dense<TYPE, 4>(to, word);
    } else if (count >= Result::ELEMENTS && Result::ELEMENT_BYTES == 2) {
        store_dense<TYPE, 2>(to, word);
    } else {
#pragma unroll
        for (u32 i = 0; i < Result::ELEMENTS; ++i) {
            if (i >= count) break;
            if (Result::ELEMENT_BYTES == 4) {
                store_4(to + 4 * i, word[i]);
            } else {
                store_2(to + 2 * i, word[i / 2] >> 16 * (i % 2) & 0xFFFFu);
            }
        }
    }
}
