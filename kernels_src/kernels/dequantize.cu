// Dequantize: code * fp32(scale / global_scale), rounded once to fp16, bf16 or fp32 (OUTPUT). A NaN scale gives NaN.
// On entry: data, scales and y are dense, at any alignment. Reads any layout, no padding; writes n columns of m rows.
// The rule is that of fp4rt/format.py.
//
// A thread takes half a block, 16 bytes of fp16, at a time, HALVES_PER_THREAD of them along a row.
#include "block/dequantize_block.cuh"
#include "kernels/dequantize_arguments.cuh"
#include "layout/scale_layout.cuh"
#include "ptx/fp8_convert.cuh"
#include "ptx/global_memory.cuh"

#if __CUDA_ARCH__ < 800
#error "dequantize.cu is built for sm_80 and newer"
#endif

constexpr u32 OUTPUT_BYTES = OUTPUT == FLOAT32 ? 4 : 2;
constexpr u32 OUTPUT_WORDS = HALF_BLOCK * OUTPUT_BYTES / 4;

__device__ __forceinline__ u32 load_codes(const u8* from, bool aligned) {
    if (aligned) return load_4(from);
    return load_1(from) | load_1(from + 1) << 8 | load_1(from + 2) << 16 | load_1(from + 3) << 24;
}

template <u32 BYTES>
__device__ __forceinline__ void store_dense(u8* to, const u32* word) {
#pragma unroll
    for (u32 i = 0; i < OUTPUT_WORDS; i += BYTES < 4 ? 1 : BYTES / 4) {
        if constexpr (BYTES == 16) store_16(to + 4 * i, word + i);
        if constexpr (BYTES == 8) store_8(to + 4 * i, word[i], word[i + 1]);
        if constexpr (BYTES == 4) store_4(to + 4 * i, word[i]);
        if constexpr (BYTES == 2) {
            store_2(to + 4 * i, word[i] & 0xFFFFu);
            store_2(to + 4 * i + 2, word[i] >> 16);
        }
    }
}

// The first `count` of eight numbers.
__device__ __forceinline__ void store_numbers(u8* to, const u32* word, u64 count, u32 access_bytes) {
    if (count >= HALF_BLOCK) {
        if (access_bytes == 16) {
            store_dense<16>(to, word);
        } else if (access_bytes == 8) {
            store_dense<8>(to, word);
        } else if (access_bytes == 4) {
            store_dense<4>(to, word);
        } else if (OUTPUT_BYTES == 2) {
            store_dense<2>(to, word);
        }
        return;
    }
#pragma unroll
    for (u32 i = 0; i < HALF_BLOCK; ++i) {
        if (i >= count) break;
        if (OUTPUT_BYTES == 4) {
            store_4(to + 4 * i, word[i]);
        } else {
            store_2(to + 2 * i, word[i / 2] >> 16 * (i % 2) & 0xFFFFu);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) dequantize(const __grid_constant__ DequantizeArguments a) {
    const ScaleLayout layout = scale_layout(a.layout);
    const u32 threads = 1u << a.threads_log2, rows = THREADS >> a.threads_log2;
    const u32 row_group = divide(blockIdx.x, a.chunks_magic), chunk = blockIdx.x - row_group * a.chunks;
    const u64 row = (u64)row_group * rows + (threadIdx.x >> a.threads_log2);
    const u64 first = (u64)chunk * threads * HALVES_PER_THREAD + (threadIdx.x & (threads - 1));
    if (row >= a.m) return;

    const u8* data = a.data + row * a.data_stride + first * (HALF_BLOCK / CODES_PER_BYTE);
    const u8* scales = a.scales + row_offset(layout, row, a.across);
    u32 codes[HALVES_PER_THREAD], scale_byte[HALVES_PER_THREAD];
#pragma unroll
    for (u32 k = 0; k < HALVES_PER_THREAD; ++k) {
        const u64 half = first + k * threads;
        codes[k] = scale_byte[k] = 0;
        if (half * HALF_BLOCK < a.n) {
            codes[k] = load_codes(data + k * threads * (HALF_BLOCK / CODES_PER_BYTE), a.data_aligned);
            scale_byte[k] = load_1(scales + column_offset(layout, half / 2));
        }
    }
    const float global_scale = *a.global_scale;
    u8* y = a.y + (row * a.n + first * HALF_BLOCK) * OUTPUT_BYTES;
#pragma unroll
    for (u32 k = 0; k < HALVES_PER_THREAD; ++k) {
        const u64 column = (first + k * threads) * HALF_BLOCK;
        u32 word[OUTPUT_WORDS];
        dequantize_half_block<OUTPUT>(codes[k], float_from_e4m3(scale_byte[k]) / global_scale, word);
        if (column < a.n) store_numbers(y + k * threads * (HALF_BLOCK * OUTPUT_BYTES), word, a.n - column, a.access_bytes);
    }
}
