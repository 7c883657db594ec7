// kernels_src/ptx/half_pairs.cuh on a CPU. A product of halves is exact in fp64, and so are the sums taken here.
#pragma once
#include "num/integers.cuh"
#include "ptx/half_convert.cuh"

template <typename Widen, typename Narrow>
inline u32 emulate_fma(u32 a, u32 b, u32 c, Widen widen, Narrow narrow) {
    u32 result = 0;
    for (int shift = 0; shift < 32; shift += 16) {
        const double product = (double)widen((u16)(a >> shift)) * (double)widen((u16)(b >> shift));
        result |= (u32)narrow((float)(product + (double)widen((u16)(c >> shift)))) << shift;
    }
    return result;
}

inline u32 fma_f16x2(u32 a, u32 b, u32 c) { return emulate_fma(a, b, c, float_from_f16, f16_from_float); }
inline u32 fma_bf16x2(u32 a, u32 b, u32 c) { return emulate_fma(a, b, c, float_from_bf16, bf16_from_float); }
inline u32 multiply_f16x2(u32 a, u32 b) { return fma_f16x2(a, b, 0x80008000u); }
inline u32 multiply_bf16x2(u32 a, u32 b) { return fma_bf16x2(a, b, 0x80008000u); }
inline u32 both_low(u32 pair) { return pair & 0xFFFF | pair << 16; }
inline u32 both_high(u32 pair) { return pair >> 16 | pair & 0xFFFF0000u; }
