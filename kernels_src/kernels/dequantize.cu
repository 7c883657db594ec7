// Dequantize: code * fp32(scale / global_scale), rounded once to fp16, bf16 or fp32 (OUTPUT). A NaN scale gives NaN.
// On entry: data, scales and y are dense, at any alignment. Reads any layout, no padding; writes n columns of m rows.
// The rule is that of fp4rt/format.py.
//
// A thread makes PIECES_PER_THREAD pieces of a row, 16 bytes each. Rows are taken in the order in which their scales
// lie in memory, so that a CTA reads whole sectors of them.
#include "block/store_piece.cuh"
#include "kernels/dequantize_arguments.cuh"
#include "layout/scale_layout.cuh"

#if __CUDA_ARCH__ < 800
#error "dequantize.cu is built for sm_80 and newer"
#endif

using Result = Piece<OUTPUT>;
constexpr u32 PIECES_PER_BLOCK_LOG2 = BLOCK / Result::ELEMENTS == 4 ? 2 : 1;

__device__ __forceinline__ u32 load_codes(const u8* from) {
    return Result::CODE_BYTES == 4 ? load_4(from) : load_2(from);
}

__device__ __forceinline__ u32 load_codes_by_bytes(const u8* from) {
    u32 codes = 0;
#pragma unroll
    for (u32 i = 0; i < Result::CODE_BYTES; ++i) codes |= load_1(from + i) << 8 * i;
    return codes;
}

// The row whose scales lie at position `index` of all rows.
__device__ __forceinline__ u64 row_in_memory_order(ScaleLayout layout, u64 index) {
    const u32 in_tile = row_in_tile(layout, index);
    return index - in_tile + row_of_byte(layout, in_tile << layout.tile_columns_log2);
}

// A thread's pieces of a row: `first`, and every `threads`-th one from there.
struct Place {
    u64 row;
    u32 first, threads;
};

// Aligned codes, whole pieces, an ordinary global scale; false, with nothing written, where it is not one.
// On entry: `threads` pieces are whole tiles, so the offsets of a thread's scales are equally far apart.
__device__ __forceinline__ bool dequantize_whole(const DequantizeArguments& a, const Place& at) {
    const ScaleLayout layout = scale_layout(a.layout);
    const u8* data = a.data + at.row * a.data_stride + (u64)at.first * Result::CODE_BYTES;
    const u8* scales = a.scales + row_offset(layout, at.row, a.across);
    const u32 scale_at = (u32)column_offset(layout, at.first >> PIECES_PER_BLOCK_LOG2);
    const u32 scale_step = (u32)column_offset(layout, at.threads >> PIECES_PER_BLOCK_LOG2);
    u32 codes[PIECES_PER_THREAD], scale_byte[PIECES_PER_THREAD];
#pragma unroll
    for (u32 k = 0; k < PIECES_PER_THREAD; ++k) {
        codes[k] = scale_byte[k] = 0;
        if (at.first + k * at.threads < a.pieces) {
            codes[k] = load_codes(data + k * at.threads * Result::CODE_BYTES);
            scale_byte[k] = load_1(scales + (scale_at + k * scale_step));
        }
    }
    const float global_scale = *a.global_scale;
    if (!is_ordinary(global_scale)) return false;
    const OrdinaryDivider units(global_scale * UNIT);
    u8* y = a.y + at.row * a.n * Result::ELEMENT_BYTES + (u64)at.first * Result::BYTES;
#pragma unroll
    for (u32 k = 0; k < PIECES_PER_THREAD; ++k) {
        u32 word[Result::WORDS];
        dequantize_ordinary<OUTPUT>(codes[k], float_from_e4m3(scale_byte[k]), units, word);
        if (at.first + k * at.threads < a.pieces) store_16(y + k * at.threads * Result::BYTES, word);
    }
    return true;
}

__device__ __forceinline__ void dequantize_any(const DequantizeArguments& a, const Place& at) {
    const ScaleLayout layout = scale_layout(a.layout);
    const u8* data = a.data + at.row * a.data_stride;
    const u8* scales = a.scales + row_offset(layout, at.row, a.across);
    const float global_scale = *a.global_scale;
    u8* y = a.y + at.row * a.n * Result::ELEMENT_BYTES;
#pragma unroll 1
    for (u32 k = 0; k < PIECES_PER_THREAD; ++k) {
        const u64 piece = at.first + k * at.threads;
        if (piece >= a.pieces) break;
        const u32 codes = load_codes_by_bytes(data + piece * Result::CODE_BYTES);
        const float scale = float_from_e4m3(load_1(scales + column_offset(layout, piece >> PIECES_PER_BLOCK_LOG2)));
        u32 word[Result::WORDS];
        dequantize_extreme<OUTPUT>(codes, scale, global_scale, word);
        store_numbers<OUTPUT>(y + piece * Result::BYTES, word, a.n - piece * Result::ELEMENTS, a.access_bytes);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) dequantize(const __grid_constant__ DequantizeArguments a) {
    const u32 threads = 1u << a.threads_log2, rows = THREADS >> a.threads_log2;
    const u32 row_group = divide(blockIdx.x, a.chunks_magic), chunk = blockIdx.x - row_group * a.chunks;
    const u64 index = (u64)row_group * rows + (threadIdx.x >> a.threads_log2);
    const Place at = {row_in_memory_order(scale_layout(a.layout), index),
                      chunk * threads * PIECES_PER_THREAD + (threadIdx.x & (threads - 1)), threads};
    if (at.row >= a.m) return;
    if (a.whole_pieces && dequantize_whole(a, at)) return;
    dequantize_any(a, at);
}
