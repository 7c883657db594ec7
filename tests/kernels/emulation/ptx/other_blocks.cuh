// kernels_src/ptx/other_blocks.cuh on a CPU, where blocks run one after the other: who waits for a later one hangs.
#pragma once
#include "block.h"
#include "num/integers.cuh"

inline void store_for_others(float* to, const float* value) { std::memcpy(to, value, 16); }

inline void add_from_others(float* sum, const float* from) {
    for (int i = 0; i < 4; ++i) sum[i] += from[i];
}

inline u32 count_up(u32* counter) { return (*counter)++; }

inline void announce(u32* counter) { ++*counter; }

inline void wait_for_announced(const u32* counter, u32 count) {
    if (*counter != count) emulation::fail("waits for a block that has not run");
}
