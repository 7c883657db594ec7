// A whole kernel on the host: the threads of a block one after the other, in rounds.
//
// In all rounds but the last a thread ends at the barrier; in each it runs from its start. That is right for kernels
// with one barrier whose threads write the same again. The first round shows a warp's lanes each other's values, the
// second writes shared memory before the barrier, the last reads it behind.
#pragma once
#include <vector>

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
static bool last_round;
static std::vector<u32> shown;  // by each thread to its warp

inline void __syncthreads() {
    if (!last_round) throw Barrier();
}

inline u32 warp_maximum(u32 value) {
    shown[threadIdx.x] = value;
    u32 largest = 0;
    for (u32 lane = 0; lane < 32; ++lane) {
        const u32 other = shown[threadIdx.x / 32 * 32 + lane];
        largest = other > largest ? other : largest;
    }
    return largest;
}

// One thread at a time: every operation is atomic.
inline u32 atomicMax(u32* at, u32 value) {
    const u32 before = *at;
    *at = before > value ? before : value;
    return before;
}

inline u32 atomicAdd(u32* at, u32 value) {
    const u32 before = *at;
    *at += value;
    return before;
}

inline u32 atomicExch(u32* at, u32 value) {
    const u32 before = *at;
    *at = value;
    return before;
}

inline void __threadfence() {}

// Whether a thread met a barrier.
template <class Kernel, class Arguments>
bool run_round(Kernel kernel, const Arguments& arguments, u32 threads, bool last) {
    bool met = false;
    last_round = last;
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
                shown.assign(threads, 0);
                if (!run_round(kernel, arguments, threads, false)) continue;
                run_round(kernel, arguments, threads, false);
                run_round(kernel, arguments, threads, true);
            }
        }
    }
}
