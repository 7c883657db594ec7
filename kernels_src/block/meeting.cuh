// Sums of parts of k meet in the shared memory of a cluster's first block (of the block, where it is alone).
//
// A cluster meets without its producers: a block of a cluster has one piece of work, and they have returned or will.
#pragma once
#include "ptx/blocks.cuh"
#include "ptx/shared_memory.cuh"

template <u32 CLUSTER_BLOCKS>
__device__ __forceinline__ void meet(u32 barrier, u32 threads) {
    if constexpr (CLUSTER_BLOCKS > 1) {
        cluster_sync();
    } else {
        named_barrier_sync(barrier, threads);
    }
}

template <u32 CLUSTER_BLOCKS>
__device__ __forceinline__ void store_in_first_block(u32 address, const float* value) {
    if constexpr (CLUSTER_BLOCKS > 1) {
        store_cluster_floats(address_in_block(address, 0), value);
    } else {
        store_shared_floats(address, value);
    }
}
