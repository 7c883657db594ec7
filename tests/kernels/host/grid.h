// A whole kernel on the host: its threads one after the other, in two rounds where they meet at a barrier.
//
// In the first round a thread ends at the barrier; in the second it runs from its start to its end. That is right for
// kernels with one barrier whose threads write the same again, and read shared memory after the barrier only.
#pragma once
#include "num/integers.cuh"

#define __global__
#define __shared__ static
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)
#define __grid_constant__

struct Index {
    u32 x, y, z;
};
static Index blockIdx, threadIdx, gridDim;

struct Barrier {};
static bool first_round;

inline void __syncthreads() {
    if (first_round) throw Barrier();
}

template <class Kernel, class Arguments>
bool run_block(Kernel kernel, const Arguments& arguments, u32 threads, bool first) {
    bool met = false;
    first_round = first;
    for (u32 t = 0; t < threads; ++t) {
        threadIdx = {t, 0, 0};
        try {
            kernel(arguments);
        } catch (Barrier) {
            met = true;
        }
    }
    return met;
}

template <class Kernel, class Arguments>
void run_grid(Kernel kernel, const Arguments& arguments, Index blocks, u32 threads) {
    gridDim = blocks;
    for (u32 z = 0; z < blocks.z; ++z) {
        for (u32 y = 0; y < blocks.y; ++y) {
            for (u32 x = 0; x < blocks.x; ++x) {
                blockIdx = {x, y, z};
                if (run_block(kernel, arguments, threads, true)) run_block(kernel, arguments, threads, false);
            }
        }
    }
}
