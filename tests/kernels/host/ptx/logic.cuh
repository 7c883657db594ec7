#pragma once
#include "num/integers.cuh"

inline u32 bit_select(u32 ones, u32 zeros, u32 mask) { return (ones & mask) | (zeros & ~mask); }
inline u32 and_or(u32 a, u32 mask, u32 b) { return (a & mask) | b; }

inline u32 permute_bytes(u32 low, u32 high, u32 selector) {
    const u64 bytes = (u64)high << 32 | low;
    u32 result = 0;
    for (u32 i = 0; i < 4; ++i) result |= (u32)(bytes >> 8 * (selector >> 4 * i & 7u) & 0xFFu) << 8 * i;
    return result;
}

inline u32 rotate_left(u32 value, u32 bits) { return bits ? value << bits | value >> (32 - bits) : value; }

template <u32 FACTOR>
u32 multiply_by(u32 value) {
    return value * FACTOR;
}

template <int BITS>
u32 multiply_shift(u32 value) {
    return value << BITS;
}
