// kernels_src/ptx/blocks.cuh on a CPU. In a cluster, an address says in its highest byte whose block it is in.
#pragma once
#include "block.h"
#include "num/integers.cuh"

namespace emulation {
inline long arrived[MOST_BLOCKS][16];
constexpr u32 BLOCK_SHIFT = 24;
}

inline u32 uniform(u32 value) { return value; }

inline void named_barrier_sync(u32 id, u32 threads) {
    long& arrived = emulation::arrived[emulation::block_of_cluster()][id];
    const long wanted = (arrived++ / threads + 1) * threads;
    while (arrived < wanted) emulation::yield();
}

inline void named_barrier_arrive(u32 id, u32) { ++emulation::arrived[emulation::block_of_cluster()][id]; }

template <int REGISTERS>
inline void raise_registers() {}

template <int REGISTERS>
inline void lower_registers() {}

inline u32 cluster_rank() { return emulation::block_of_cluster(); }
inline u32 address_in_block(u32 address, u32 block) { return address | block << emulation::BLOCK_SHIFT; }
inline void cluster_meet() { emulation::sync_cluster(); }
inline void start_dependents() {}
inline void wait_for_prerequisites() {}
