// Sums of parts of k meet in the shared memory of a cluster's first block (of the block, where it is alone).
//
// A cluster meets without its producers: a block of a cluster has one piece of work, and they have returned, as their last
// copies have landed. (Seen on an H200: who arrives at a cluster's barrier before another warp of the block exits without
// arriving waits for ever.) Its sums arrive like copies, on a barrier of the first block.
#pragma once
#include "ptx/blocks.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared_memory.cuh"

template <u32 CLUSTER_BLOCKS>
struct Meeting {
    u32 arrivals;     // an mbarrier, for clusters
    u32 id, threads;  // a named barrier, for a block alone

    // One thread of those that meet, before they do so first; all parts but the first send `bytes` together.
    __device__ __forceinline__ void init(u32 bytes) const {
        if constexpr (CLUSTER_BLOCKS > 1) {
            mbarrier_init(arrivals, 1);
            mbarrier_fence_init();
            mbarrier_arrive_expect(arrivals, bytes);
        }
    }

    // Before sums are stored: what lies there, stages or the sums of another piece, is read.
    __device__ __forceinline__ void open(bool first_piece) const {
        if constexpr (CLUSTER_BLOCKS > 1) {
            cluster_meet();
        } else if (!first_piece) {
            named_barrier_sync(id, threads);
        }
    }

    __device__ __forceinline__ void store(u32 address, const float* value) const {
        if constexpr (CLUSTER_BLOCKS > 1) {
            send_floats(address_in_block(address, 0), value, address_in_block(arrivals, 0));
        } else {
            store_shared_floats(address, value);
        }
    }

    // Before the first part adds the others to its own.
    __device__ __forceinline__ void close(bool adds) const {
        if constexpr (CLUSTER_BLOCKS > 1) {
            if (adds) mbarrier_wait(arrivals, 0);
        } else {
            named_barrier_sync(id, threads);
        }
    }
};
