// NVFP4 activations to bf16, exactly: code * scale without the global scale, which alpha carries. For products whose
// kernel takes half-precision activations.
//
// On entry: m >= 1; `out` rows are 16 * ceil(k / 16) elements, 16-byte aligned. One thread a block of 16.
// Reads any scale layout; values past k come from the partial block's padding and are not for reading.
#include "block/scale_rows.cuh"
#include "mma/nvfp4_pairs.cuh"
#include "ptx/blocks.cuh"
#include "ptx/global_memory.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#error "dequantize_activations.cu is built for sm_80 and newer"
#endif

struct DequantizeActivationsArguments {
    const u8* codes;      // (m, 8 * columns) bytes
    const u8* scales;     // in `layout`
    u16* out;             // (m, 16 * blocks) bf16
    i64 m;
    i32 blocks;           // of 16 columns that hold something
    i32 columns;          // block columns in memory, padding included
    i32 layout;
};

constexpr u32 THREADS = 128;

// Defined by the launcher: ALIGN, the bytes that `codes` is a multiple of: 4 or 1.

__device__ __forceinline__ u32 load_word(const u8* from) {
    if constexpr (ALIGN == 4) return load_4(from);
    return load_1(from) | load_1(from + 1) << 8 | load_1(from + 2) << 16 | load_1(from + 3) << 24;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    dequantize_activations(const __grid_constant__ DequantizeActivationsArguments args) {
    start_dependents();
    const u32 spans = (args.blocks + THREADS - 1) / THREADS;  // blocks of threads a row
    const i64 row = blockIdx.x / spans;
    const u32 column = blockIdx.x % spans * THREADS + threadIdx.x;
    if (column >= (u32)args.blocks) return;

    const ScaleRows scales(args.scales, args.layout, args.columns);
    const u8* codes = args.codes + (row * args.columns + column) * 8;
    const u32 word[2] = {load_word(codes), load_word(codes + 4)};
    const u32 scale = both_low(BFloat16Pairs::scales(load_1(scales.row(row) + scales.group(column / 4) + column % 4)));

    u8* to = (u8*)(args.out + (row * args.blocks + column) * 16);
#pragma unroll
    for (u32 i = 0; i < 2; ++i) {
        u32 pair[4], natural[4];
        BFloat16Pairs::decode(word[i], pair);
#pragma unroll
        for (u32 j = 0; j < 4; ++j) pair[j] = multiply_bf16x2(multiply_bf16x2(pair[j], scale), 0x43804380u);  // * 2^8
        paired_to_natural(pair, natural);
        store_16(to + 16 * i, natural);
    }
}
