// The arguments of the Hopper kernels: a matrix product with a prepacked weight and activations behind a tensor map.
//
// Maps have box rows of 64 columns, 128 bytes, swizzled by 128 bytes. That of activations is one of
//
//   whole_chunks != 0    (64 columns, m tokens, k / 64 chunks)    a box has all chunks of a stage
//   whole_chunks == 0    (k columns, m tokens, 1)                 a box has one; what lies past k arrives as zeros
#pragma once
#include "block/gemm_arguments.cuh"
#include "ptx/blocks.cuh"
#include "ptx/bulk_copy.cuh"

struct PrepackedGemmArguments {
    TensorMap activations;  // (m, k) fp16 or bf16
    TensorMap results;      // (m, n), boxes of one; gemm_prefill.cu alone, and where results leave transposed
    GemmArguments gemm;     // `b` are the tiles; `a` and its layout are read only where A is NVFP4 and is decoded here
    u32 whole_chunks;       // which map: a copy costs its warp some 80 cycles, however little it brings
    u32 dependent;          // not 0: launched while the kernel that writes the activations runs
    // gemm_prefill.cu alone: block/prefill_tiles.cuh, block/shared_tiles.cuh
    u32 whole_tiles;        // that one worker has alone
    float* shared_sums;
    u32* arrivals;          // 0 before the launch
    u32 sharers;            // workers that share the other tiles; 0 where there are none
    u32 piece_groups;       // column groups that each of these has, or one fewer
    // block/shared_decoding.cuh
    u8* decoded;            // (m, k) bf16, rows of 16 * ceil(k / 16) elements, what the map describes
    u32 slot;
};

// Line `line` of the arguments is fetched. They are in constant memory, and those who start a product would wait for one
// line after the other.
__device__ __forceinline__ void fetch_arguments(const PrepackedGemmArguments& args, u32 line) {
    constexpr u32 LINE_BYTES = 64;
    if (line * LINE_BYTES < sizeof args) keep_read(((const u32*)&args)[line * (LINE_BYTES / 4)]);
}
