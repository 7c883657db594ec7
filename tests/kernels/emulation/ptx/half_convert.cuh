// kernels_src/ptx/half_convert.cuh on a CPU.
#pragma once
#include "block.h"
#include "num/integers.cuh"

inline u16 f16_from_float(float value) {
    const _Float16 half = (_Float16)value;
    u16 bits;
    std::memcpy(&bits, &half, 2);
    return bits;
}

inline float float_from_f16(u16 bits) {
    _Float16 half;
    std::memcpy(&half, &bits, 2);
    return (float)half;
}

inline u16 bf16_from_float(float value) {
    const u32 bits = __float_as_uint(value);
    if (value != value) return 0x7FFF;
    return (u16)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

inline float float_from_bf16(u16 bits) { return __uint_as_float((u32)bits << 16); }
