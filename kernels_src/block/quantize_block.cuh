// Steps 1 to 5 of fp4rt/format.py for one block of 16 elements: scale byte and two words of codes.
//
// Two ways, chosen by the global scale, the same for a whole launch: where it is ordinary, the factors of step 5 are
// finite, normal, and exact when multiplied by UNIT; elsewhere nothing is assumed.
#pragma once
#include "block/elements.cuh"
#include "block/global_scale.cuh"
#include "block/e2m1.cuh"
#include "num/e4m3.cuh"
#include "ptx/fp4_convert.cuh"
#include "ptx/fp8_convert.cuh"
#include "ptx/reciprocal.cuh"

struct Codes {
    u32 low, high;  // elements 0..7 and 8..15, the even element in the low nibble of each byte
};

// Steps 1 and 2.
template <int TYPE>
__device__ __forceinline__ float scaled_maximum(const u32* word, float global_scale) {
    const float v = block_maximum<TYPE>(word);  // 1
    return global_scale * (v * R6);             // 2
}

__device__ __forceinline__ bool has_codes(u32 scale_byte) {
    return scale_byte - 1u < E4M3_MAX_BYTE;  // neither 0 nor NaN
}

#if HARDWARE_E2M1
constexpr float ENCODE_UNIT = 1.0f;  // the hardware takes x * factor as it is

// Step 5; `factor` in units of ENCODE_UNIT.
template <int TYPE>
__device__ __forceinline__ Codes encode_ordinary(const u32* word, float factor) {
    float product[BLOCK];
#pragma unroll
    for (u32 i = 0; i < BLOCK; ++i) product[i] = element<TYPE>(word, i) * factor;
    return {e2m1x8_from_floats(product), e2m1x8_from_floats(product + 8)};
}
#else
constexpr float ENCODE_UNIT = UNIT;

// Step 5; `factor` in units of ENCODE_UNIT.
template <int TYPE>
__device__ __forceinline__ Codes encode_ordinary(const u32* word, float factor) {
    u32 pair[BLOCK / 2];
#pragma unroll
    for (u32 j = 0; j < BLOCK / 2; ++j) {
        const float even = round_to_e2m1(multiply_saturate(absolute(element<TYPE>(word, 2 * j)), factor));
        const float odd = round_to_e2m1(multiply_saturate(absolute(element<TYPE>(word, 2 * j + 1)), factor));
        pair[j] = pair_of_codes(even, odd, sign_word<TYPE>(word, j));
    }
    return {gather_codes(pair), gather_codes(pair + 4)};
}
#endif

// 1 / global_scale in the unit that encode_factor takes.
__device__ __forceinline__ float inverse_for_factors(float global_scale) {
    return reciprocal_of_normal(global_scale) * (1.0f / ENCODE_UNIT);
}

// Steps 4 and 5 for an ordinary global scale. A power of two in the inverse is one in the factor, exactly.
template <int TYPE>
__device__ __forceinline__ Codes quantize_ordinary(const u32* word, u32 scale_byte, float inverse) {
    const float factor = reciprocal_of_normal(float_from_e4m3(scale_byte) * inverse);  // 4
    const Codes codes = encode_ordinary<TYPE>(word, factor);                            // 5
    return has_codes(scale_byte) ? codes : Codes{0u, 0u};
}

// Step 5 for any factor. UNIT goes to x where the factor may be too small for it, to the factor where x may be.
// 0 * inf is 0, every other NaN saturates.
template <int TYPE>
__device__ __forceinline__ Codes encode_extreme(const u32* word, float factor, bool small_factor) {
    const float x_unit = small_factor ? UNIT : 1.0f;
    factor *= small_factor ? 1.0f : UNIT;
    u32 pair[BLOCK / 2];
#pragma unroll
    for (u32 j = 0; j < BLOCK / 2; ++j) {
        float y[2];
#pragma unroll
        for (u32 i = 0; i < 2; ++i) {
            const float x = absolute(element<TYPE>(word, 2 * j + i)), product = (x * x_unit) * factor;
            y[i] = round_to_e2m1(x == 0.0f ? 0.0f : product < 1.0f ? product : 1.0f);
        }
        pair[j] = pair_of_codes(y[0], y[1], sign_word<TYPE>(word, j));
    }
    return {gather_codes(pair), gather_codes(pair + 4)};
}

// Step 3 where the global scale may be anything: only a NaN in the block makes the scale NaN.
template <int TYPE>
__device__ __forceinline__ u32 extreme_scale_byte(const u32* word, float t) {
    if (t > 0.0f) return e4m3_from_float_portable(t);
    const float v = block_maximum<TYPE>(word);
    if (v != v) return E4M3_NAN_BYTE;
    return t != t ? E4M3_MAX_BYTE : 0u;
}

// Steps 3 to 5 where the global scale may be anything. Returns the scale byte.
template <int TYPE>
__device__ __forceinline__ u32 quantize_extreme(const u32* word, float t, float global_scale, Codes& codes) {
    const u32 scale_byte = extreme_scale_byte<TYPE>(word, t);
    codes = {0u, 0u};
    if (has_codes(scale_byte)) {
        const float factor = 1.0f / (float_from_e4m3(scale_byte) * (1.0f / global_scale));  // 4
        codes = encode_extreme<TYPE>(word, factor, global_scale < 1.0f);                    // 5
    }
    return scale_byte;
}
