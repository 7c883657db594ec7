// kernels_src/ptx/blocks.cuh on a CPU: one block at a time, no clusters.
#pragma once
#include "block.h"
#include "num/integers.cuh"

namespace emulation {
inline long arrived[16];
}

inline u32 uniform(u32 value) { return value; }

inline void named_barrier_arrive(u32 id, u32) { ++emulation::arrived[id]; }

inline void named_barrier_sync(u32 id, u32 threads) {
    const long wanted = (emulation::arrived[id]++ / threads + 1) * threads;
    while (emulation::arrived[id] < wanted) emulation::yield();
}

template <int REGISTERS>
inline void raise_registers() {}

template <int REGISTERS>
inline void lower_registers() {}

inline u32 cluster_rank() { return 0; }
inline u32 address_in_block(u32 address, u32) { return address; }
inline void cluster_sync() { emulation::fail("no clusters here"); }
inline void cluster_meet() { emulation::fail("no clusters here"); }
inline void start_dependents() {}
inline void wait_for_prerequisites() {}
