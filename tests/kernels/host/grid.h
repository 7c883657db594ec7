// A whole kernel on the host: its threads one after the other. For kernels whose threads never wait for each other.
#pragma once
#include "num/integers.cuh"

#define __global__
#define __shared__ static
#define __launch_bounds__(...)
#define __grid_constant__

struct Index {
    u32 x, y, z;
};
static Index blockIdx, threadIdx, gridDim;

template <class Kernel, class Arguments>
void run_grid(Kernel kernel, const Arguments& arguments, u32 blocks, u32 threads) {
    gridDim = {blocks, 1, 1};
    for (u32 b = 0; b < blocks; ++b) {
        for (u32 t = 0; t < threads; ++t) {
            blockIdx = {b, 0, 0};
            threadIdx = {t, 0, 0};
            kernel(arguments);
        }
    }
}
