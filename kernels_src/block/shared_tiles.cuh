// Tiles of which several workers have pieces of k: all but the last one to come write their sums, that one adds all and
// finishes.
//
// The last waits only for those that have come before it, and these are writing: none waits for a worker that may not
// run. Two sums are the same in either order; more are added in the order of the workers, whichever came last: the
// result is always the same. A warpgroup meets only the same warpgroup of other workers.
//
//   sums      [worker][2: piece it begins with, piece it ends with][block of the cluster][warpgroup][COUNT / 4][128] x 16
//   arrivals  [shared tile][block of the cluster][warpgroup][2: come, written], 0 before the launch
#pragma once
#include "block/prefill_tiles.cuh"
#include "block/prepacked_arguments.cuh"
#include "ptx/blocks.cuh"
#include "ptx/other_blocks.cuh"
#include "ptx/shared_memory.cuh"

template <u32 GROUPS, u32 CLUSTER_BLOCKS, u32 COUNT>
struct SharedTiles {
    static constexpr u32 THREADS = 128;
    const PrepackedGemmArguments& args;
    u32 rank, group, thread;  // in the cluster, in the block, in the warpgroup
    u32 barrier, word;        // of the warpgroup: a barrier, and 4 bytes of shared memory

    template <class Tiles>
    __device__ __forceinline__ float* sums_of(const Tiles& tiles, u32 worker, u32 number) const {
        const u32 piece = worker * 2 + (tiles.first_tile_of(worker) != number);
        return args.shared_sums + (((u64)piece * CLUSTER_BLOCKS + rank) * GROUPS + group) * COUNT * THREADS + thread * 4;
    }

    // Whether this warpgroup came last and now has the sums of all pieces.
    template <class Tiles>
    __device__ __forceinline__ bool add(const Tiles& tiles, u32 number, float* sums) const {
        const u32 first = tiles.worker_of(number * tiles.groups);
        const u32 others = tiles.worker_of((number + 1) * tiles.groups - 1) - first;
        u32* const come = args.arrivals + ((number * CLUSTER_BLOCKS + rank) * GROUPS + group) * 2;
        u32* const written = come + 1;
        named_barrier_sync(barrier, THREADS);  // all have read the word of the tile before
        if (thread == 0) store_shared_4(word, count_up(come));
        named_barrier_sync(barrier, THREADS);
        const bool is_last = load_shared_4(word) == others;
        if (!is_last || others > 1) {
            float* const own = sums_of(tiles, tiles.worker, number);
#pragma unroll
            for (u32 i = 0; i < COUNT; i += 4) store_for_others(own + i * THREADS, sums + i);
        }
        if (!is_last) {
            named_barrier_sync(barrier, THREADS);
            if (thread == 0) announce(written);
            return false;
        }
        if (thread == 0) wait_for_announced(written, others);
        named_barrier_sync(barrier, THREADS);
        if (others > 1) {
#pragma unroll
            for (u32 i = 0; i < COUNT; ++i) sums[i] = 0.0f;
        }
#pragma unroll 1
        for (u32 worker = first; worker <= first + others; ++worker) {
            if (others == 1 && worker == tiles.worker) continue;
            const float* const part = sums_of(tiles, worker, number);
#pragma unroll
            for (u32 i = 0; i < COUNT; i += 4) add_from_others(sums + i, part + i * THREADS);
        }
        return true;
    }
};
