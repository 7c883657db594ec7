// Global memory that blocks of one launch hand to each other: past L1, which does not see what others write.
// Source: PTX ISA, "Memory Consistency Model"; "ld", "st", "atom", "fence".
#pragma once
#include "num/integers.cuh"

// Four floats.
__device__ __forceinline__ void store_for_others(float* to, const float* value) {
    asm volatile("st.global.cg.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(value[0]), "f"(value[1]), "f"(value[2]),
                 "f"(value[3])
                 : "memory");
}

__device__ __forceinline__ void add_from_others(float* sum, const float* from) {
    float v[4];
    asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3])
                 : "l"(from)
                 : "memory");
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[i] += v[i];
}

// Adds one, gives what was there before. Orders nothing.
__device__ __forceinline__ u32 count_up(u32* counter) {
    u32 before;
    asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
    return before;
}

// The same, behind all that this thread has done, and ahead of all that the one does that counts last.
__device__ __forceinline__ u32 count_up_in_order(u32* counter) {
    u32 before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
    return before;
}

// Counts up, behind all that this thread has written, and all that it has met others at a barrier after they wrote it.
__device__ __forceinline__ void announce(u32* counter) {
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
    count_up(counter);
}

// Sets bits of a word, behind all that this thread has written, and all that it has met others at a barrier after they
// wrote it.
__device__ __forceinline__ void announce_bits(u64* word, u64 bits) {
    asm volatile("red.release.gpu.global.or.b64 [%0], %1;" ::"l"(word), "l"(bits) : "memory");
}

// The bits that are set; what was written before may then be read.
__device__ __forceinline__ u64 look(const u64* word) {
    u64 value;
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    return value;
}

__device__ __forceinline__ void wait_for_bits(const u64* word, u64 bits) {
    while ((look(word) & bits) != bits) {
    }
}

// Waits until `count` were announced; what those wrote before may then be read, also by who meets this thread after.
__device__ __forceinline__ void wait_for_announced(const u32* counter, u32 count) {
    u32 value;
    do {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
    } while (value != count);
}
