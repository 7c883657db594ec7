// NVFP4 activations to bf16, exactly: code * scale without the global scale, which alpha carries. For products whose
// kernel takes half-precision activations.
//
// On entry: m >= 1; `out` rows are 16 * ceil(k / 16) elements, 16-byte aligned. A thread takes PIECES pieces of 8 columns,
// so that the results of neighbouring threads lie side by side.
// Values past k come from the partial block's padding and are not for reading.
// The product waits for all of it, and what comes ahead of the loads counts: the compiler knows the layout, and that
// pieces are a constant apart.
#include "block/scale_rows.cuh"
#include "mma/nvfp4_pairs.cuh"
#include "ptx/blocks.cuh"
#include "ptx/global_memory.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#error "dequantize_activations.cu is built for sm_80 and newer"
#endif

struct DequantizeActivationsArguments {
    const u8* codes;      // (m, 8 * columns) bytes
    const u8* scales;     // in the layout of number LAYOUT
    u16* out;             // (m, 16 * blocks) bf16
    i32 blocks;           // of 16 columns that hold something
    i32 columns;          // block columns in memory, padding included
};

constexpr u32 THREADS = 128;

// Defined by the launcher: LAYOUT; PIECES; ALIGN, the bytes that `codes` is a multiple of: 4 or 1.

__device__ __forceinline__ u32 load_word(const u8* from) {
    if constexpr (ALIGN == 4) return load_4(from);
    return load_1(from) | load_1(from + 1) << 8 | load_1(from + 2) << 16 | load_1(from + 3) << 24;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    dequantize_activations(const __grid_constant__ DequantizeActivationsArguments args) {
    start_dependents();
    const u32 row = blockIdx.x, first = blockIdx.y * (PIECES * THREADS) + threadIdx.x;
    const u32 row_pieces = 2 * args.blocks, columns = args.columns;
    static_assert(THREADS % 8 == 0, "pieces are whole groups of four blocks apart");
    const ScaleRows rows(args.scales, LAYOUT, columns);
    const u8* const codes = args.codes + (u64)row * columns * 8 + first * 4;
    const u8* const scales = rows.row(row) + rows.group(first / 8) + first / 2 % 4;
    u8* const to = (u8*)args.out + ((u64)row * row_pieces + first) * 16;
    u32 word[PIECES], scale[PIECES];
#pragma unroll
    for (u32 i = 0; i < PIECES; ++i) {
        if (first + i * THREADS >= row_pieces) break;
        word[i] = load_word(codes + i * THREADS * 4);
        scale[i] = load_1(scales + rows.group(i * THREADS / 8));
    }
#pragma unroll
    for (u32 i = 0; i < PIECES; ++i) {
        if (first + i * THREADS >= row_pieces) break;
        u32 values[4];
        decode_values(word[i], both_low(BFloat16Pairs::scales(scale[i])), values);
        store_16(to + i * THREADS * 16, values);
    }
}
