// The second half of a product whose k was split among blocks: adds the parts in their order, then alpha, bias, rounding.
//
// On entry: partial (splits, m, n) fp32 holds true sums of parts of k. One thread an element.
// Source of the finish: block/gemm_epilogue.cuh.
#include "block/gemm_epilogue.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#error "gemm_finish.cu is built for sm_80 and newer"
#endif

constexpr u32 THREADS = 256;

extern "C" __global__ void __launch_bounds__(THREADS) gemm_finish(const __grid_constant__ GemmArguments args) {
    const u64 element = (u64)blockIdx.x * THREADS + threadIdx.x, elements = (u64)args.m * args.n;
    if (element >= elements) return;
    const float* part = args.partial + element;
    float sum = *part;
    for (i32 split = 1; split < args.splits; ++split) sum = sum + part[split * elements];
    store_result(args, element / (u64)args.n, element % (u64)args.n, sum, gemm_alpha(args));
}
