// kernels/gemm_finish.cu as a function of the host: runs its blocks one after the other.
#include "block.h"
#undef __shared__
#define __shared__ static  // fibers share it, and blocks run one at a time
#include "kernels/gemm_finish.cu"

extern "C" void run(u32 blocks, const GemmArguments* args) {
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
        emulation::run_block(THREADS, [args] { gemm_finish(*args); });
    }
}
