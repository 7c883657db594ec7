// The warpgroup-wide product of fp16 or bf16 fragments, and what its asynchrony asks of the code around it.
#pragma once
#include "num/constants.cuh"
#include "ptx/wgmma.cuh"

template <int TYPE, int COLUMNS>
__device__ __forceinline__ void warpgroup_product(float* sums, const u32* a, u64 tile) {
    if constexpr (TYPE == FLOAT16) {
        wgmma_f16<COLUMNS>(sums, a, tile);
    } else {
        wgmma_bf16<COLUMNS>(sums, a, tile);
    }
}

// Sums may be read after this, once wgmma_wait has returned.
template <u32 BLOCKS, u32 COUNT>
__device__ __forceinline__ void settle(float (&sums)[BLOCKS][COUNT]) {
#pragma unroll
    for (u32 b = 0; b < BLOCKS; ++b) {
#pragma unroll
        for (u32 i = 0; i < COUNT; ++i) wgmma_settle(sums[b][i]);
    }
}
