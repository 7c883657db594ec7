// The second half of a product whose k was split among blocks: adds the parts in their order, then alpha, bias, and
// rounds.
//
// On entry: partial (splits, m, n) fp32 holds true sums of parts of k once the kernel ahead is over. A block of threads is
// BLOCK_COLUMNS columns of one token, ceil(n / BLOCK_COLUMNS) * m of them.
// Source of the finish: block/gemm_epilogue.cuh.
#include "block/gemm_epilogue.cuh"
#include "ptx/blocks.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#error "gemm_finish.cu is built for sm_80 and newer"
#endif

constexpr u32 THREADS = 256;
constexpr u32 COLUMNS = 4;  // of a thread, THREADS apart, so that a warp reads and writes neighbours
constexpr i32 LOADED = 3;  // parts under way at a time, beside the first
constexpr u32 BLOCK_COLUMNS = THREADS * COLUMNS;

// The parts in their order. They are loaded LOADED at a time: one after the other would wait for memory each time.
__device__ __forceinline__ float sum_of_parts(const float* part, i32 splits, i64 elements) {
    float sum = *part;
    for (i32 first = 1; first < splits; first += LOADED) {
        float loaded[LOADED];
#pragma unroll
        for (i32 i = 0; i < LOADED; ++i) {
            if (first + i < splits) loaded[i] = part[(first + i) * elements];
        }
#pragma unroll
        for (i32 i = 0; i < LOADED; ++i) {
            if (first + i < splits) sum = sum + loaded[i];
        }
    }
    return sum;
}

extern "C" __global__ void __launch_bounds__(THREADS) gemm_finish(const __grid_constant__ GemmArguments args) {
    __shared__ Alpha shared_alpha;
    wait_for_prerequisites();
    if (threadIdx.x == 0) shared_alpha = alpha_factors(args, gemm_alpha(args));
    __syncthreads();
    const Alpha alpha = shared_alpha;

    const u32 blocks_a_row = (u32)((args.n + BLOCK_COLUMNS - 1) / BLOCK_COLUMNS);
    const i64 token = blockIdx.x / blocks_a_row, elements = args.m * args.n;
    const i64 first = (i64)(blockIdx.x % blocks_a_row) * BLOCK_COLUMNS + threadIdx.x;

    float sums[COLUMNS];
#pragma unroll
    for (u32 i = 0; i < COLUMNS; ++i) {
        const i64 column = first + i * THREADS;
        if (column < args.n) sums[i] = sum_of_parts(args.partial + token * args.n + column, args.splits, elements);
    }
#pragma unroll
    for (u32 i = 0; i < COLUMNS; ++i) {
        const i64 column = first + i * THREADS;
        if (column < args.n) store_result(args, token, column, sums[i], alpha);
    }
}
