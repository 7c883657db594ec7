// kernels_src/ptx/blocks.cuh on a CPU. In a cluster, an address says in its highest byte whose block it is in.
#pragma once
#include "block.h"
#include "num/integers.cuh"

namespace emulation {
struct NamedBarrier {
    long arrived;
    u32 threads;  // as the first to come says; the others must agree
};
inline NamedBarrier named_barriers[MOST_BLOCKS][16];

inline long& arrive(u32 id, u32 threads) {
    NamedBarrier& barrier = named_barriers[block_of_cluster()][id];
    if (barrier.arrived == 0) barrier.threads = threads;
    if (barrier.threads != threads) fail("a barrier of as many threads as others do not expect");
    return ++barrier.arrived;
}
constexpr u32 BLOCK_SHIFT = 24;

struct Target {
    int block;
    u32 at, barrier;  // in it
};

// Where something is sent in the cluster; it must complete in the same block.
inline Target target_of(u32 address, u32 barrier) {
    const u32 block = address >> BLOCK_SHIFT, within = (1u << BLOCK_SHIFT) - 1;
    if (barrier >> BLOCK_SHIFT != block) fail("sends to one block and tells another");
    return {(int)block, address & within, barrier & within};
}
}

inline u32 uniform(u32 value) { return value; }

inline u64 first_lane(u64 value) {
    const u32 words[2] = {(u32)value, (u32)(value >> 32)};
    const auto* lanes = emulation::exchange(words, 2);
    const u64 first = lanes[0][0] | (u64)lanes[0][1] << 32;
    emulation::sync_warp();
    return first;
}

inline void named_barrier_sync(u32 id, u32 threads) {
    const long& arrived = emulation::arrive(id, threads);
    const long wanted = ((arrived - 1) / threads + 1) * threads;
    while (arrived < wanted) emulation::yield();
}

inline void named_barrier_arrive(u32 id, u32 threads) { emulation::arrive(id, threads); }

inline void keep_read(u32) {}

template <int REGISTERS>
inline void raise_registers() {}

template <int REGISTERS>
inline void lower_registers() {}

inline u32 cluster_rank() { return emulation::block_of_cluster(); }
inline u32 address_in_block(u32 address, u32 block) { return address | block << emulation::BLOCK_SHIFT; }
inline void cluster_meet() { emulation::sync_cluster(); }
inline void start_dependents() {}
inline void wait_for_prerequisites() {}
