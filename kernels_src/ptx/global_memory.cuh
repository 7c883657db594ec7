// Global memory in one access of 16, 8, 4, 2 or 1 bytes. On entry: the address is a multiple of the bytes.
// Loads go through the read-only path: nothing that the same launch writes may be read with them.
// Source: PTX ISA, "Data Movement and Conversion Instructions: ld.global.nc, st".
#pragma once
#include "num/integers.cuh"

__device__ __forceinline__ void load_16(const u8* from, u32* word) {
    asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
                 : "l"(from));
}

// `policy`: ptx/cache_policy.cuh.
__device__ __forceinline__ void load_16_policy(const u8* from, u32* word, u64 policy) {
    asm volatile("ld.global.nc.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                 : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
                 : "l"(from), "l"(policy));
}

__device__ __forceinline__ void load_8(const u8* from, u32* word) {
    asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2];" : "=r"(word[0]), "=r"(word[1]) : "l"(from));
}

__device__ __forceinline__ u32 load_4(const u8* from) {
    u32 word;
    asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(word) : "l"(from));
    return word;
}

__device__ __forceinline__ u32 load_2(const u8* from) {
    u16 half;
    asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(half) : "l"(from));
    return half;
}

__device__ __forceinline__ u32 load_1(const u8* from) {
    u32 byte;
    asm volatile("ld.global.nc.u8 %0, [%1];" : "=r"(byte) : "l"(from));
    return byte;
}

// Brings the line of an address into L2.
__device__ __forceinline__ void prefetch_line(const u8* address) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

__device__ __forceinline__ void store_16(u8* to, const u32* word) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(word[0]), "r"(word[1]), "r"(word[2]),
                 "r"(word[3])
                 : "memory");
}

__device__ __forceinline__ void store_8(u8* to, u32 low, u32 high) {
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(low), "r"(high) : "memory");
}

__device__ __forceinline__ void store_4(u8* to, u32 word) {
    asm volatile("st.global.u32 [%0], %1;" ::"l"(to), "r"(word) : "memory");
}

__device__ __forceinline__ void store_2(u8* to, u32 half) {
    asm volatile("st.global.u16 [%0], %1;" ::"l"(to), "h"((u16)half) : "memory");
}

__device__ __forceinline__ void store_1(u8* to, u32 byte) {
    asm volatile("st.global.u8 [%0], %1;" ::"l"(to), "r"(byte) : "memory");
}
