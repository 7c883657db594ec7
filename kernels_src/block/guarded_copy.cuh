// Global to shared memory, a fixed number of bytes of which only the first `valid` exist; the others become zero.
// On entry: `from` is a multiple of ALIGN, `to` of the size. With ALIGN = 1 the copy is byte by byte and has happened
// on return; otherwise it belongs to the thread's current cp.async group.
#pragma once
#include "ptx/cp_async.cuh"
#include "ptx/shared_memory.cuh"

__device__ __forceinline__ i32 clamp_bytes(i32 value, i32 limit) { return value < 0 ? 0 : value > limit ? limit : value; }

// Four bytes, built from as many as are valid.
__device__ __forceinline__ u32 load_bytes(const u8* from, i32 valid) {
    u32 word = 0;
#pragma unroll
    for (i32 i = 0; i < 4; ++i) {
        if (i < valid) word |= (u32)from[i] << (8 * i);
    }
    return word;
}

template <i32 ALIGN>
__device__ __forceinline__ void copy_16(u32 to, const u8* from, i32 valid) {
    if constexpr (ALIGN == 16) {
        cp_async_16(to, from, (u32)valid);
    } else if constexpr (ALIGN == 8) {
        cp_async_8(to, from, (u32)clamp_bytes(valid, 8));
        cp_async_8(to + 8, valid > 8 ? from + 8 : from, (u32)clamp_bytes(valid - 8, 8));
    } else {
        for (i32 i = 0; i < 16; i += 4) store_shared_4(to + i, load_bytes(from + i, valid - i));
    }
}

template <i32 ALIGN>
__device__ __forceinline__ void copy_4(u32 to, const u8* from, i32 valid) {
    if constexpr (ALIGN == 4) {
        cp_async_4(to, from, (u32)valid);
    } else {
        store_shared_4(to, load_bytes(from, valid));
    }
}
