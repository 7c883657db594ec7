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

inline void add_copy(u32 barrier, u32 to, u32 bytes, std::function<void()> land) {
    if (to + bytes > SHARED_MEMORY_BYTES) fail("copies outside of shared memory");
    std::memset(own_memory() + to, 0xFF, bytes);
    barrier_at(barrier).copies.push_back({land, bytes});
}

}  // namespace emulation

inline void mbarrier_init(u32 barrier, u32 arrivals) {
    emulation::Barrier& b = emulation::barriers[emulation::block_of_cluster()][barrier];
    b = {};
    b.arrivals = b.missing = arrivals;
}

inline void mbarrier_fence_init() {}

inline void mbarrier_arrive(u32 barrier) {
    emulation::maybe_yield();
    emulation::Barrier& b = emulation::barrier_at(barrier);
    if (--b.missing < 0) emulation::fail("more arrivals than the barrier counts");
    b.check();
}

inline void mbarrier_arrive_expect(u32 barrier, u32 bytes) {
    emulation::barrier_at(barrier).bytes += bytes;
    mbarrier_arrive(barrier);
}

inline void mbarrier_arrive_remote(u32, u32) { emulation::fail("clusters that share activations are not emulated"); }

inline void mbarrier_wait(u32 barrier, u32 parity) {
    for (emulation::Barrier& b = emulation::barrier_at(barrier); b.phase == parity; emulation::yield()) {
        for (const emulation::LateCopy& copy : b.copies) copy.land(), b.bytes -= copy.bytes;
        if (!b.copies.empty()) b.copies.clear(), b.check();
        if (b.phase != parity) break;
    }
}
