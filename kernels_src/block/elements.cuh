// The three input types behind one set of names: Elements<FLOAT16>, Elements<BFLOAT16>, Elements<FLOAT32>.
//
// A block of 16 elements is WORDS registers, in memory order: two elements a word (fp16, bf16) or one (fp32).
#pragma once
#include "num/constants.cuh"
#include "ptx/float_arithmetic.cuh"
#include "ptx/logic.cuh"
#include "ptx/pair_convert.cuh"
#include "ptx/pair_maximum.cuh"

template <int TYPE>
struct Elements;

template <>
struct Elements<FLOAT16> {
    static constexpr u32 BYTES = 2, WORDS = 8;
    static constexpr u32 INFINITY_BITS = 0x7C00u;
    static __device__ __forceinline__ u32 magnitude(u32 word) { return absolute_f16x2(word); }
    static __device__ __forceinline__ u32 maximum_nan(u32 a, u32 b) { return maximum_nan_f16x2(a, b); }
    static __device__ __forceinline__ u32 maximum(u32 a, u32 b) { return maximum_f16x2(a, b); }
    static __device__ __forceinline__ float low(u32 word) { return float_from_low_f16(word); }
    static __device__ __forceinline__ float high(u32 word) { return float_from_high_f16(word); }
};

template <>
struct Elements<BFLOAT16> {
    static constexpr u32 BYTES = 2, WORDS = 8;
    static constexpr u32 INFINITY_BITS = 0x7F80u;
    static __device__ __forceinline__ u32 magnitude(u32 word) { return absolute_bf16x2(word); }
    static __device__ __forceinline__ u32 maximum_nan(u32 a, u32 b) { return maximum_nan_bf16x2(a, b); }
    static __device__ __forceinline__ u32 maximum(u32 a, u32 b) { return maximum_bf16x2(a, b); }
    static __device__ __forceinline__ float low(u32 word) { return float_from_low_bf16(word); }
    static __device__ __forceinline__ float high(u32 word) { return float_from_high_bf16(word); }
};

template <>
struct Elements<FLOAT32> {
    static constexpr u32 BYTES = 4, WORDS = 16;
};

// Step 1: v = max |x| of the block, widened to fp32; NaN if one of the elements is.
template <int TYPE>
__device__ __forceinline__ float block_maximum(const u32* word) {
    using E = Elements<TYPE>;
    if constexpr (TYPE == FLOAT32) {
        float v = absolute(float_of(word[0]));
#pragma unroll
        for (u32 i = 1; i < E::WORDS; ++i) v = maximum_nan(v, absolute(float_of(word[i])));
        return v;
    } else {
        u32 pair = E::magnitude(word[0]);
#pragma unroll
        for (u32 i = 1; i < E::WORDS; ++i) pair = E::maximum_nan(pair, E::magnitude(word[i]));
        return maximum_nan(E::low(pair), E::high(pair));
    }
}

// Element i, widened.
template <int TYPE>
__device__ __forceinline__ float element(const u32* word, u32 i) {
    using E = Elements<TYPE>;
    if constexpr (TYPE == FLOAT32) {
        return float_of(word[i]);
    } else {
        return i % 2 ? E::high(word[i / 2]) : E::low(word[i / 2]);
    }
}

// A word with the signs of elements 2 j and 2 j + 1 in bits 15 and 31; the other bits are anything.
template <int TYPE>
__device__ __forceinline__ u32 sign_word(const u32* word, u32 j) {
    if constexpr (TYPE == FLOAT32) {
        return permute_bytes(word[2 * j], word[2 * j + 1], 0x7632);
    } else {
        return word[j];
    }
}
