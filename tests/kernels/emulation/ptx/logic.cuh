// kernels_src/ptx/logic.cuh on a CPU.
#pragma once
#include "num/integers.cuh"

inline u32 bit_select(u32 ones, u32 zeros, u32 mask) { return (ones & mask) | (zeros & ~mask); }
inline u32 and_or(u32 a, u32 mask, u32 b) { return (a & mask) | b; }
inline u32 rotate_left(u32 value, u32 bits) { return bits % 32 ? value << bits % 32 | value >> (32 - bits % 32) : value; }

inline u32 permute_bytes(u32 low, u32 high, u32 selector) {
    const u64 bytes = (u64)high << 32 | low;
    u32 result = 0;
    for (int i = 0; i < 4; ++i) result |= (u32)(bytes >> 8 * (selector >> 4 * i & 7) & 0xFF) << 8 * i;
    return result;
}

template <u32 FACTOR>
inline u32 multiply_by(u32 value) {
    return value * FACTOR;
}

template <int BITS>
inline u32 multiply_shift(u32 value) {
    return value << BITS;
}
