// kernels_src/ptx/mma_sync.cuh on a CPU: the lanes of a warp hand in their registers, each computes its own sums.
#pragma once
#include "block.h"
#include "num/integers.cuh"
#include "ptx/half_convert.cuh"

template <typename Widen>
inline void emulate_mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, Widen widen) {
    const u32 words[6] = {a[0], a[1], a[2], a[3], b0, b1};
    const auto* lanes = emulation::exchange(words, 6);
    const int lane = emulation::current % 32, g = lane / 4, t = lane % 4;
    double sums[4];
    for (int i = 0; i < 4; ++i) {
        double sum = c[i];
        for (int k = 0; k < 16; ++k) {
            const int owner = k % 8 / 2, high = k / 8, shift = k % 2 * 16;
            const u32 row = lanes[4 * g + owner][i / 2 + 2 * high], column = lanes[4 * (2 * t + i % 2) + owner][4 + high];
            sum += (double)widen((u16)(row >> shift)) * (double)widen((u16)(column >> shift));
        }
        sums[i] = sum;
    }
    emulation::sync_warp();
    for (int i = 0; i < 4; ++i) c[i] = (float)sums[i];
}

inline void mma_f16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) { emulate_mma(c, a, b0, b1, float_from_f16); }
inline void mma_bf16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) { emulate_mma(c, a, b0, b1, float_from_bf16); }
