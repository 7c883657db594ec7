// A ring of stages in shared memory: where a producer or a consumer stands in it, and the barriers of its stages.
#pragma once
#include "ptx/mbarrier.cuh"

// Barriers of COUNT stages lie one after the other: "full" of each, then "empty" of each.
template <u32 COUNT>
struct RingBarriers {
    static constexpr u32 BYTES = 2 * COUNT * MBARRIER_BYTES;
    u32 first;

    __device__ __forceinline__ u32 full(u32 stage) const { return first + stage * MBARRIER_BYTES; }
    __device__ __forceinline__ u32 empty(u32 stage) const { return first + (COUNT + stage) * MBARRIER_BYTES; }

    // `producers` arrivals fill a stage (bytes are counted beside), `consumers` arrivals empty it.
    __device__ __forceinline__ void init(u32 consumers, u32 producers = 1) const {
        for (u32 i = 0; i < COUNT; ++i) {
            mbarrier_init(full(i), producers);
            mbarrier_init(empty(i), consumers);
        }
    }
};

// A stage and the parity to wait for: a consumer begins at parity 0, a producer at 1, for every stage is empty.
template <u32 COUNT>
struct RingPlace {
    u32 stage, parity;

    __device__ __forceinline__ void advance() {
        if (++stage == COUNT) stage = 0, parity ^= 1;
    }
};
