// The arguments of the Hopper kernels: a matrix product with a prepacked weight and activations behind a tensor map.
#pragma once
#include "block/gemm_arguments.cuh"
#include "ptx/bulk_copy.cuh"

struct PrepackedGemmArguments {
    TensorMap activations;  // (m, k) fp16 or bf16; tiles of 64 columns, 128 bytes, swizzled by 128 bytes
    GemmArguments gemm;     // `b` are the tiles; `a` and its layout are read only where A is NVFP4 and has no map
    u32 dependent;          // not 0: launched while the kernel that writes the activations runs
    // gemm_prefill.cu alone: block/prefill_tiles.cuh, block/shared_tiles.cuh
    u32 whole_tiles;        // that one worker has alone
    float* shared_sums;
    u32* arrivals;          // 0 before the launch
    u32 sharers;            // workers that share the other tiles; 0 where there are none
};
