// Codes to numbers: code * fp32(scale / global_scale), then one rounding. A piece is 16 bytes of results.
#pragma once
#include "block/elements.cuh"
#include "block/global_scale.cuh"
#include "mma/nvfp4_pairs.cuh"
#include "block/e2m1.cuh"
#include "ptx/fp8_convert.cuh"
#include "ptx/reciprocal.cuh"

template <int TYPE>
struct Piece {
    static constexpr u32 BYTES = 16, WORDS = 4;
    static constexpr u32 ELEMENT_BYTES = TYPE == FLOAT32 ? 4 : 2;
    static constexpr u32 ELEMENTS = BYTES / ELEMENT_BYTES;  // 8 or 4
    static constexpr u32 CODE_BYTES = ELEMENTS / CODES_PER_BYTE;
};

// scale / global_scale without a division, for an ordinary global scale.
//
// q = RN(scale * RN(1 / global_scale)) is off by at most an ulp; the excess q * global_scale - scale is exact, and
// taking off its quotient rounds correctly, -0 included. The tests do it for every mantissa of both.
struct OrdinaryDivider {
    float divisor, inverse;

    __device__ __forceinline__ explicit OrdinaryDivider(float divisor)
        : divisor(divisor), inverse(reciprocal_of_normal(divisor)) {}

    __device__ __forceinline__ float quotient(float scale) const {
        const float q = scale * inverse;
        return fused_multiply_add(-fused_multiply_add(q, divisor, -scale), inverse, q);
    }
};

// The codes of a piece, the first one lowest, as fp16 numbers times UNIT: pair j has numbers j and j + ELEMENTS / 2.
template <int TYPE>
__device__ __forceinline__ void pairs_of_units(u32 codes, u32 (&pair)[4]) {
    if (Piece<TYPE>::ELEMENTS == 4) codes = (codes & 0xFFu) | (codes << 8 & 0xFF0000u);  // decode pairs codes j, j + 4
    Float16Pairs::decode(codes, pair);
}

// Numbers to words in memory order.
template <int TYPE, u32 COUNT>
__device__ __forceinline__ void round_numbers(const float (&value)[COUNT], u32* word) {
#pragma unroll
    for (u32 i = 0; i < COUNT; ++i) {
        if (TYPE == FLOAT32) word[i] = bits_of(value[i]);
        if (TYPE == FLOAT16 && i % 2) word[i / 2] = f16x2_from_floats(value[i - 1], value[i]);
        if (TYPE == BFLOAT16 && i % 2) word[i / 2] = bf16x2_from_floats(value[i - 1], value[i]);
    }
}

// Pairs of fp16 numbers times `factor`, rounded to fp32 and then to the type: words in memory order.
template <int TYPE>
__device__ __forceinline__ void scale_pairs(const u32 (&pair)[4], float factor, u32* word) {
    constexpr u32 ELEMENTS = Piece<TYPE>::ELEMENTS;
    float value[ELEMENTS];
#pragma unroll
    for (u32 j = 0; j < ELEMENTS / 2; ++j) {
        value[j] = float_from_low_f16(pair[j]) * factor;
        value[j + ELEMENTS / 2] = float_from_high_f16(pair[j]) * factor;
    }
    round_numbers<TYPE>(value, word);
}

// A piece for an ordinary global scale. The divider divides by global_scale * UNIT: a power of two, taken out exactly.
template <int TYPE>
__device__ __forceinline__ void dequantize_ordinary(u32 codes, float scale, const OrdinaryDivider& units, u32* word) {
    u32 pair[4];
    pairs_of_units<TYPE>(codes, pair);
    scale_pairs<TYPE>(pair, units.quotient(scale), word);
}

constexpr u32 ONE_OVER_UNIT = 0x74007400u;  // 2^14, as a pair of fp16

// A piece for any global scale: the quotient may lie at fp32's ends, so the power of two goes to the codes.
template <int TYPE>
__device__ __forceinline__ void dequantize_extreme(u32 codes, float scale, float global_scale, u32* word) {
    u32 pair[4];
    pairs_of_units<TYPE>(codes, pair);
#pragma unroll
    for (u32 j = 0; j < 4; ++j) pair[j] = multiply_f16x2(pair[j], ONE_OVER_UNIT);
    scale_pairs<TYPE>(pair, scale / global_scale, word);
}
