// kernels_src/ptx/mbarrier.cuh on a CPU. A copy lands when somebody waits for its barrier; until then its destination
// holds NaN, so that both a stage used too early and a stage filled too early show.
#pragma once
#include <map>

#include "block.h"
#include "num/integers.cuh"

constexpr u32 MBARRIER_BYTES = 8;

namespace emulation {

struct LateCopy {
    std::function<void()> land;
    u32 bytes;
};

struct Barrier {
    long arrivals = 0, missing = 0, bytes = 0;
    u32 phase = 0;
    std::vector<LateCopy> copies;

    void check() {
        if (missing == 0 && bytes == 0) phase ^= 1, missing = arrivals;
    }
};

inline std::map<u32, Barrier> barriers[MOST_BLOCKS];

inline Barrier& barrier_at(u32 address, int block = block_of_cluster()) {
    if (address % 8 != 0 || !barriers[block].count(address)) fail("no barrier was initialized there");
    return barriers[block][address];
}

// To a block of the cluster; its barrier lies where the own one does.
inline void add_copy(u32 barrier, u32 to, u32 bytes, std::function<void()> land, int block = block_of_cluster()) {
    if (to + bytes > SHARED_MEMORY_BYTES) fail("copies outside of shared memory");
    if (is_over(block)) fail("copies to a block that is over");
    std::memset(memory_of(block) + to, 0xFF, bytes);
    barrier_at(barrier, block).copies.push_back({land, bytes});
}

// To be called by each thread at its end.
inline void check_end_of_block() {
    const Thread& thread = threads[current];
    if (!thread.store_groups.empty() || !thread.open_stores.empty()) fail("ends before copies have read its memory");
    if (!is_over(block_of_cluster(), current)) return;
    for (const auto& [address, barrier] : barriers[block_of_cluster()]) {
        if (!barrier.copies.empty()) fail("the block ends with copies on their way to it");
    }
}

inline void arrive(u32 barrier, int block) {
    maybe_yield();
    if (is_over(block)) fail("arrives at a block that is over");
    Barrier& b = barrier_at(barrier, block);
    if (--b.missing < 0) fail("more arrivals than the barrier counts");
    b.check();
}

}  // namespace emulation

inline void mbarrier_init(u32 barrier, u32 arrivals) {
    emulation::Barrier& b = emulation::barriers[emulation::block_of_cluster()][barrier];
    b = {};
    b.arrivals = b.missing = arrivals;
}

inline void mbarrier_fence_init() {}

inline void mbarrier_arrive(u32 barrier) { emulation::arrive(barrier, emulation::block_of_cluster()); }

inline void mbarrier_arrive_expect(u32 barrier, u32 bytes) {
    emulation::barrier_at(barrier).bytes += bytes;
    mbarrier_arrive(barrier);
}

inline void mbarrier_arrive_remote(u32 barrier, u32 rank) { emulation::arrive(barrier, (int)rank); }

inline void mbarrier_wait(u32 barrier, u32 parity) {
    for (emulation::Barrier& b = emulation::barrier_at(barrier); b.phase == parity; emulation::yield()) {
        for (const emulation::LateCopy& copy : b.copies) copy.land(), b.bytes -= copy.bytes;
        if (!b.copies.empty()) b.copies.clear(), b.check();
        if (b.phase != parity) break;
    }
}
