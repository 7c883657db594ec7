// Quantize any matrix: strides of any sign, any alignment, a partial last block, any layout, more than 2^32 blocks.
// On entry: nothing but what QuantizeAnyArguments says. Few rows come here too: a lane has one block, so a small
// matrix spreads over the whole device.
// Reads fp16, bf16 or fp32 (INPUT); writes data row-major and scales in any layout, every byte of both.
// The rules are those of fp4rt/format.py.
//
// Lanes follow the scale bytes as they lie in memory, padding included; a byte's place says which block to quantize.
#include "block/global_scale.cuh"
#include "block/load_block.cuh"
#include "block/quantize_block.cuh"
#include "kernels/quantize_any_arguments.cuh"
#include "layout/scale_layout.cuh"

#if __CUDA_ARCH__ < 800
#error "quantize_any.cu is built for sm_80 and newer"
#endif

__device__ __forceinline__ void store_codes(u8* to, Codes codes, bool aligned) {
    if (aligned) {
        store_8(to, codes.low, codes.high);
        return;
    }
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
        store_1(to + i, codes.low >> 8 * i & 0xFFu);
        store_1(to + 4 + i, codes.high >> 8 * i & 0xFFu);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) quantize_any(const __grid_constant__ QuantizeAnyArguments a) {
    const ScaleLayout layout = scale_layout(a.layout);
    const float global_scale = read_global_scale(a.global_scale, a.global_scale_value);
    const bool ordinary = is_ordinary(global_scale);
    const float inverse = inverse_for_factors(global_scale);
    keep_global_scale(a.kept_global_scale, global_scale, blockIdx.x == 0 && threadIdx.x == 0);

    const u64 step = (u64)gridDim.x * THREADS;
    for (u64 index = (u64)blockIdx.x * THREADS + threadIdx.x; index < a.scale_count; index += step) {
        const u64 offset = a.backwards ? a.scale_count - 1 - index : index;
        const ScalePlace at = scale_place(layout, offset, a.across, a.across_magic);
        const u64 first = at.column * BLOCK;
        u32 scale_byte = 0;
        Codes codes = {0u, 0u};
        if (at.row < a.m && first < a.n) {
            const u32 count = a.n - first < BLOCK ? (u32)(a.n - first) : BLOCK;
            const u8* from = a.x + (i64)at.row * a.row_stride + (i64)first * a.column_stride;
            u32 word[Elements<INPUT>::WORDS];
            load_block<INPUT>(from, a.column_stride, count, a.access_bytes, word);
            const float t = scaled_maximum<INPUT>(word, global_scale);  // 1, 2
            if (ordinary) {
                scale_byte = e4m3x2_from_floats(t, 0.0f) & 0xFFu;               // 3
                codes = quantize_ordinary<INPUT>(word, scale_byte, inverse);  // 4, 5
            } else {
                scale_byte = quantize_extreme<INPUT>(word, t, global_scale, codes);
            }
        }
        store_1(a.scales + offset, scale_byte);
        if (at.row < a.m && at.column < a.columns) {
            store_codes(a.data + (at.row * a.columns + at.column) * (BLOCK / CODES_PER_BYTE), codes, a.data_aligned);
        }
    }
}
