// kernels_src/ptx/other_blocks.cuh on a CPU, where clusters run one after the other: who waits for a later one hangs.
#pragma once
#include "block.h"
#include "num/integers.cuh"

inline void store_for_others(float* to, const float* value) { std::memcpy(to, value, 16); }

inline void add_from_others(float* sum, const float* from) {
    for (int i = 0; i < 4; ++i) sum[i] += from[i];
}

inline u32 count_up(u32* counter) { return (*counter)++; }

inline u32 count_up_in_order(u32* counter) { return (*counter)++; }

inline void announce(u32* counter) { ++*counter; }

inline void announce_bits(u64* word, u64 bits) {
    emulation::maybe_yield();
    *word |= bits;
}

inline u64 look(const u64* word) {
    emulation::yield();
    return *word;
}

inline void wait_for_bits(const u64* word, u64 bits) {
    for (long looks = 0; (look(word) & bits) != bits; ++looks) {
        if (looks == 1 << 24) emulation::fail("waits for what nobody announces");
    }
}

inline void wait_for_announced(const u32* counter, u32 count) {
    if (*counter != count) emulation::fail("waits for a block that has not run");
}
