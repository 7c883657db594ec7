// fp16 and bf16 in plain C++: what cvt does.
#pragma once
#include "num/bits.cuh"

inline float float_of_f16(u32 bits) {
    const u32 sign = (bits & 0x8000u) << 16, exponent = bits >> 10 & 0x1Fu, mantissa = bits & 0x3FFu;
    if (exponent == 0x1Fu) return float_of(sign | 0x7F800000u | mantissa << 13);
    return float_of(sign | (exponent << 23 | mantissa << 13)) * float_of((127u + 112u) << 23);  // * 2^112, exact
}

inline u32 f16_of_float(float value) {
    const u32 bits = bits_of(value), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7FFFFFFFu;
    if (magnitude > 0x7F800000u) return 0x7FFFu;
    if (magnitude >= 0x477FF000u) return sign | 0x7C00u;  // 65520 and more round to infinity
    if (magnitude < 0x38800000u) {                        // below 2^-14: neighbours are 2^-24 apart
        return sign | (bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f));
    }
    return sign | (((magnitude + 0xFFFu + (magnitude >> 13 & 1u)) >> 13) - (112u << 10));
}

inline u32 bf16_of_float(float value) {
    const u32 bits = bits_of(value);
    if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return 0x7FFFu;
    return (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16;
}
