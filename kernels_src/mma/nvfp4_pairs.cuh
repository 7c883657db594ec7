// NVFP4 codes and block scales as pairs of fp16 or bf16 numbers: what mma.sync takes. Exact, product included.
//
// A word holds eight codes, code j in bits 4j..4j+3. Pair j of the four that it becomes is (code j, code j+4): codes
// 16 bits apart become the two halves of a register without being moved against each other. So a pair is not two
// neighbours in k; the other operand of the product takes the same order (see natural_to_paired).
//
// e2m1 is a small float in a larger one: its exponent and mantissa bits e e m at the border between the exponent and
// the mantissa of the wide format give its value times a power of two, subnormal 0.5 included. So does e4m3. Only the
// NaN byte 0x7F would pass for 480; a product that overflows for 480 and not for 448 finds it.
//
//            codes (value *)   scales (value *)   product, i.e. weight (value *)
//   fp16     2^-14             2^7                2^-7
//   bf16     2^-126            2^118              2^-8
//
// Source: OCP Microscaling Formats v1.0 (e2m1), OCP 8-bit floating point (e4m3).
#pragma once
#include "num/constants.cuh"
#include "ptx/half_pairs.cuh"
#include "ptx/logic.cuh"
#include "ptx/mma_sync.cuh"

struct Float16Pairs {
    static constexpr float PRODUCT_INVERSE = 128.0f;  // times this, a product of weight and activation is true

    //   code j        s e e m at bits 4j+3 .. 4j;  wanted: s at 15, e e m at 11 .. 9, and the same 16 bits higher
    //   even j        s moved up by 3 leaves both in one word:      . s' . .  . e e m   (bits 4j+6 and 4j+2 .. 4j)
    //   odd j         e e m moved down by 3 does:                   s . . .  e e m .    (bits 4j+3 and 4j-1 .. 4j-3)
    static __device__ __forceinline__ void decode(u32 word, u32 (&pair)[4]) {
        const u32 even = bit_select(multiply_shift<3>(word), word, 0x40404040u);
        const u32 odd = bit_select(word, word >> 3, 0x80808080u);
        pair[0] = multiply_shift<9>(even) & MASK;
        pair[1] = multiply_shift<8>(odd) & MASK;
        pair[2] = multiply_shift<1>(even) & MASK;
        pair[3] = odd & MASK;
    }

    // Two e4m3 bytes (the lower one in bits 7..0) to a pair of scales.
    static __device__ __forceinline__ u32 scales(u32 two_bytes) {
        const u32 high = permute_bytes(two_bytes, 0, 0x1404);            // each byte at the top of its half
        const u32 raw = and_or(high >> 1, 0x3F803F80u, high & SIGNS);    // scale * 2^-8; 480 * 2^-8 for NaN
        const u32 overflow = multiply_f16x2(raw, 0x78807880u);           // * 1.125 * 2^15: infinite for 480 only
        return fma_f16x2(overflow, 0, multiply_f16x2(raw, 0x78007800u));  // + 0, or + NaN
    }

    static __device__ __forceinline__ u32 multiply(u32 a, u32 b) { return multiply_f16x2(a, b); }
    static __device__ __forceinline__ void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
        mma_f16(c, a, b0, b1);
    }

  private:
    static constexpr u32 MASK = 0x8E008E00u, SIGNS = 0x80008000u;
};

struct BFloat16Pairs {
    static constexpr float PRODUCT_INVERSE = 256.0f;

    //   wanted: s at 15, e e m at 8 .. 6, and the same 16 bits higher
    //   j = 0, 1      s moved up by 6:     bits 4j+9 and 4j+2 .. 4j
    //   j = 2, 3      e e m moved down:    bits 4j+3 and 4j-4 .. 4j-6
    static __device__ __forceinline__ void decode(u32 word, u32 (&pair)[4]) {
        const u32 lower = bit_select(multiply_shift<6>(word), word, 0x22002200u);
        const u32 upper = bit_select(word, word >> 6, 0x88008800u);
        pair[0] = multiply_shift<6>(lower) & MASK;
        pair[1] = multiply_shift<2>(lower) & MASK;
        pair[2] = multiply_shift<4>(upper) & MASK;
        pair[3] = upper & MASK;
    }

    static __device__ __forceinline__ u32 scales(u32 two_bytes) {
        const u32 high = permute_bytes(two_bytes, 0, 0x1404);
        const u32 raw = and_or(high >> 4, 0x07F007F0u, high & SIGNS);    // scale * 2^-120
        const u32 half_way = multiply_bf16x2(raw, 0x7B007B00u);          // * 2^119: 2^238 is no bf16 number
        const u32 overflow = multiply_bf16x2(half_way, 0x7B907B90u);     // * 1.125 * 2^120: infinite for 480 only
        return fma_bf16x2(overflow, 0, multiply_bf16x2(half_way, 0x7B007B00u));
    }

    static __device__ __forceinline__ u32 multiply(u32 a, u32 b) { return multiply_bf16x2(a, b); }
    static __device__ __forceinline__ void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
        mma_bf16(c, a, b0, b1);
    }

  private:
    static constexpr u32 MASK = 0x81C081C0u, SIGNS = 0x80008000u;
};

template <i32 TYPE>
struct PairsOf;
template <>
struct PairsOf<FLOAT16> {
    using Type = Float16Pairs;
};
template <>
struct PairsOf<BFLOAT16> {
    using Type = BFloat16Pairs;
};
template <i32 TYPE>
using PairsFor = typename PairsOf<TYPE>::Type;

// Eight neighbours along k (two a register) in the order of decode: (0, 4), (1, 5), (2, 6), (3, 7).
__device__ __forceinline__ void natural_to_paired(const u32 (&natural)[4], u32 (&paired)[4]) {
    paired[0] = permute_bytes(natural[0], natural[2], 0x5410);
    paired[1] = permute_bytes(natural[0], natural[2], 0x7632);
    paired[2] = permute_bytes(natural[1], natural[3], 0x5410);
    paired[3] = permute_bytes(natural[1], natural[3], 0x7632);
}

// And back.
__device__ __forceinline__ void paired_to_natural(const u32 (&paired)[4], u32 (&natural)[4]) {
    natural[0] = permute_bytes(paired[0], paired[1], 0x5410);
    natural[1] = permute_bytes(paired[2], paired[3], 0x5410);
    natural[2] = permute_bytes(paired[0], paired[1], 0x7632);
    natural[3] = permute_bytes(paired[2], paired[3], 0x7632);
}

// Eight codes times a scale, of BFloat16Pairs::scales and in both halves, as bf16 in natural order; true, no power beside.
__device__ __forceinline__ void decode_values(u32 word, u32 scale, u32 (&values)[4]) {
    u32 pair[4];
    BFloat16Pairs::decode(word, pair);
#pragma unroll
    for (u32 j = 0; j < 4; ++j) pair[j] = multiply_bf16x2(multiply_bf16x2(pair[j], scale), 0x43804380u);  // * 2^8
    paired_to_natural(pair, values);
}
