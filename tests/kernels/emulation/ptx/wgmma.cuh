// kernels_src/ptx/wgmma.cuh on a CPU: each warp of the group computes its 16 rows at once.
#pragma once
#include "block.h"
#include "num/integers.cuh"
#include "ptx/half_convert.cuh"

constexpr u32 WGMMA_K_STEP = 32 >> 4;

inline u32 wgmma_tile_low(u32 shared_address) { return shared_address >> 4 | 1u << 16; }
inline u64 wgmma_tile(u32 low) { return low; }
inline void wgmma_fence() {}
inline void wgmma_commit() {}
template <int PENDING>
inline void wgmma_wait() {}
inline void wgmma_settle(float&) {}

template <int N, typename Widen>
inline void emulate_wgmma(float* sums, const u32* a, u64 tile, Widen widen) {
    const auto* lanes = emulation::exchange(a, 4);
    const int lane = emulation::current % 32, g = lane / 4, t = lane % 4;
    const u32 first = (u32)(tile & 0x3FFF) << 4;
    if (lane == 0) emulation::check_shown(first, N * 128);
    for (int i = 0; i < N / 2; ++i) {
        const u32 token = i / 4 * 8 + 2 * t + i % 2;
        double sum = sums[i];
        for (int k = 0; k < 16; ++k) {
            const u32 row = lanes[4 * g + k % 8 / 2][i % 4 / 2 + 2 * (k / 8)], plain = first + token * 128 + 2 * k;
            u16 x;
            std::memcpy(&x, emulation::own_memory() + (plain ^ (plain >> 7 & 7) << 4), 2);
            sum += (double)widen((u16)(row >> k % 2 * 16)) * (double)widen(x);
        }
        sums[i] = (float)sum;
    }
    emulation::sync_group();  // no warp of the group is ahead of a product
}

template <int N>
inline void wgmma_f16(float* sums, const u32* a, u64 tile) {
    emulate_wgmma<N>(sums, a, tile, float_from_f16);
}
template <int N>
inline void wgmma_bf16(float* sums, const u32* a, u64 tile) {
    emulate_wgmma<N>(sums, a, tile, float_from_bf16);
}
