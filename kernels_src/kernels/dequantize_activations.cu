// NVFP4 activations to bf16, exactly: code * scale without the global scale, which alpha carries. For products whose
// kernel takes half-precision activations.
//
// On entry: m >= 1; `out` rows are 16 * ceil(k / 16) elements, 16-byte aligned. A thread takes PIECES pieces of 8 columns,
// so that the results of neighbouring threads lie side by side.
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

// Defined by the launcher: PIECES; ALIGN, the bytes that `codes` is a multiple of: 4 or 1.

__device__ __forceinline__ u32 load_word(const u8* from) {
    if constexpr (ALIGN == 4) return load_4(from);
    return load_1(from) | load_1(from + 1) << 8 | load_1(from + 2) << 16 | load_1(from + 3) << 24;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    dequantize_activations(const __grid_constant__ DequantizeActivationsArguments args) {
    start_dependents();
    const u32 row_pieces = 2 * args.blocks;
    const i64 row = blockIdx.x;
    const u32 first = blockIdx.y * (PIECES * THREADS) + threadIdx.x;

    const ScaleRows scales(args.scales, args.layout, args.columns);
    const u8* const codes = args.codes + row * args.columns * 8;
    const u8* const row_scales = scales.row(row);
    u8* const to = (u8*)(args.out + row * args.blocks * 16);
    u32 word[PIECES], scale[PIECES];
#pragma unroll
    for (u32 i = 0; i < PIECES; ++i) {
        const u32 piece = first + i * THREADS, block = piece / 2;
        if (piece >= row_pieces) break;
        word[i] = load_word(codes + piece * 4);
        scale[i] = load_1(row_scales + scales.group(block / 4) + block % 4);
    }
#pragma unroll
    for (u32 i = 0; i < PIECES; ++i) {
        const u32 piece = first + i * THREADS;
        if (piece >= row_pieces) break;
        u32 values[4];
        decode_values(word[i], both_low(BFloat16Pairs::scales(scale[i])), values);
        store_16(to + piece * 16, values);
    }
}
