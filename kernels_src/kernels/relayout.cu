// Scale bytes from any layout to any layout; every byte of the destination that belongs to no block becomes 0.
// On entry: nothing but what RelayoutArguments says; any alignment. The padding of the source is not read.
//
// A thread writes four bytes that lie side by side.
#include "kernels/relayout_arguments.cuh"
#include "layout/scale_layout.cuh"
#include "ptx/global_memory.cuh"

#if __CUDA_ARCH__ < 800
#error "relayout.cu is built for sm_80 and newer"
#endif

__device__ __forceinline__ u32 scale_for(const RelayoutArguments& a, u64 to_offset) {
    const ScalePlace at = scale_place(scale_layout(a.to_layout), to_offset, a.to_across, a.to_magic);
    if (at.row >= a.m || at.column >= a.columns) return 0;
    return load_1(a.from + scale_offset(scale_layout(a.from_layout), at.row, at.column, a.from_across));
}

extern "C" __global__ void __launch_bounds__(THREADS) relayout(const __grid_constant__ RelayoutArguments a) {
    constexpr u32 BYTES = 4;
    const u64 step = (u64)gridDim.x * THREADS * BYTES;
    for (u64 offset = ((u64)blockIdx.x * THREADS + threadIdx.x) * BYTES; offset < a.to_bytes; offset += step) {
        const u32 count = a.to_bytes - offset < BYTES ? (u32)(a.to_bytes - offset) : BYTES;
        u32 word = 0;
#pragma unroll
        for (u32 i = 0; i < BYTES; ++i) {
            if (i < count) word |= scale_for(a, offset + i) << 8 * i;
        }
        if (count == BYTES && a.to_aligned) {
            store_4(a.to + offset, word);
        } else {
#pragma unroll
            for (u32 i = 0; i < BYTES; ++i) {
                if (i < count) store_1(a.to + offset + i, word >> 8 * i & 0xFFu);
            }
        }
    }
}
