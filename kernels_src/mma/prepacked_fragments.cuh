// From the words of a prepacked weight to operand fragments of the tensor cores, in registers; exact.
//
// A word of 8 codes becomes the 4 registers of a 16 x 16 fragment. Exponent and mantissa bits of a code, put at the
// border of exponent and mantissa of bf16 (fp16), are its value times 2^-126 (2^-14), subnormal 0.5 included; the e5m3
// byte of a scale, put there too, is the scale times 2^119 under the exponent bits 0x7000 (fp16: times 2^7). One packed
// multiplication a register then gives value * scale * 2^-7.
//
// Each instruction counts, and the bits lie so that there are few: 5 logic + 1 shift + 3 multiply-add for 8 codes in
// bf16, 7 logic + 4 multiply-add in fp16. Left shifts are multiplications, because those run on another pipe; wide
// multiplications, which would also rotate, are far slower.
// Source: fp4rt/prepacked.py for the bit positions.
#pragma once
#include "num/constants.cuh"
#include "ptx/half_pairs.cuh"
#include "ptx/logic.cuh"
#include "ptx/mma_sync.cuh"

// The four scales of one row and chunk: block j is half j / 2 of even (j = 0, 2) or odd (j = 1, 3).
struct ChunkScales {
    u32 even, odd;
};

struct Bf16Weights {
    static constexpr float PRODUCT_INVERSE = 0x1p7f;

    //   register    0                1                 2                            3
    //   from word   s 15, eem 8..6   s 12, eem 5..3    s 14, eem 2..0               s 13, eem 11..9
    //   mixed                                          s down by 5: 9, eem 2..0     s 13, eem down by 5: 6..4
    //   wanted      s 15, eem 8..6
    static __device__ __forceinline__ void decode_codes(u32 word, u32* a) {
        const u32 mixed = bit_select(word >> 5, word, 0x02700270u);
        a[0] = word & MASK;
        a[1] = multiply_shift<3>(word) & MASK;
        a[2] = multiply_shift<6>(mixed) & MASK;
        a[3] = multiply_shift<2>(mixed) & MASK;
    }

    static __device__ __forceinline__ ChunkScales decode_scales(u32 word) {
        return {and_or(word, 0x0FF00FF0u, 0x70007000u), and_or(rotate_left(word, 8), 0x0FF00FF0u, 0x70007000u)};
    }

    static __device__ __forceinline__ u32 multiply(u32 a, u32 b) { return multiply_bf16x2(a, b); }

    static __device__ __forceinline__ void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
        mma_bf16(c, a, b0, b1);
    }

  private:
    static constexpr u32 MASK = 0x81C081C0u;
};

struct Fp16Weights {
    static constexpr float PRODUCT_INVERSE = 0x1p7f;

    //   wanted      s 15, eem 11..9
    //   low         s 15, eem up by 3: 11..9 for register 0;   s 12, eem up by 3: 8..6 for register 1
    //   times 2^9 + 2, register 2's bits make its eem at 11..9 and its s at 15, and others that no sum carries into
    static __device__ __forceinline__ void decode_codes(u32 word, u32* a) {
        const u32 low = bit_select(multiply_shift<3>(word), word, 0x0FC00FC0u);
        a[0] = low & MASK;
        a[1] = multiply_shift<3>(low) & MASK;
        a[2] = multiply_by<0x202>(word & 0x40074007u) & MASK;
        a[3] = bit_select(multiply_shift<2>(word), word, SIGNS) & MASK;
    }

    static __device__ __forceinline__ ChunkScales decode_scales(u32 word) {
        return {multiply_shift<3>(word) & 0x7F807F80u, rotate_left(word, 11) & 0x7F807F80u};
    }

    static __device__ __forceinline__ u32 multiply(u32 a, u32 b) { return multiply_f16x2(a, b); }

    static __device__ __forceinline__ void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
        mma_f16(c, a, b0, b1);
    }

  private:
    static constexpr u32 MASK = 0x8E008E00u, SIGNS = 0x80008000u;
};

template <int TYPE>
struct WeightsOf;
template <>
struct WeightsOf<FLOAT16> {
    using Type = Fp16Weights;
};
template <>
struct WeightsOf<BFLOAT16> {
    using Type = Bf16Weights;
};
template <int TYPE>
using WeightsFor = typename WeightsOf<TYPE>::Type;

// Block j's scale in both halves.
__device__ __forceinline__ u32 broadcast_scale(ChunkScales scales, int j) {
    const u32 pair = j & 1 ? scales.odd : scales.even;
    return j & 2 ? both_high(pair) : both_low(pair);
}

// Word j of a chunk to a scaled fragment: `low` are the scales of row g, `high` those of row g + 8.
template <class Weights>
__device__ __forceinline__ void decode_fragment(u32 word, ChunkScales low, ChunkScales high, int j, u32* a) {
    const u32 row_g = broadcast_scale(low, j), row_g8 = broadcast_scale(high, j);
    Weights::decode_codes(word, a);
    a[0] = Weights::multiply(a[0], row_g);
    a[1] = Weights::multiply(a[1], row_g8);
    a[2] = Weights::multiply(a[2], row_g);
    a[3] = Weights::multiply(a[3], row_g8);
}
