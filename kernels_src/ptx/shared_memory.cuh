// Shared memory through 32-bit addresses: an address is one register, and constant offsets cost nothing.
// Source: PTX ISA, "Data Movement and Conversion Instructions: ld, st, ldmatrix".
#pragma once
#include "num/integers.cuh"

struct Words2 {
    u32 word[2];
};

struct Words4 {
    u32 word[4];
};

__device__ __forceinline__ u32 shared_address(const void* pointer) { return (u32)__cvta_generic_to_shared(pointer); }

__device__ __forceinline__ Words4 load_shared_16(u32 address) {
    Words4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
                 : "r"(address));
    return v;
}

__device__ __forceinline__ Words2 load_shared_8(u32 address) {
    Words2 v;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.word[0]), "=r"(v.word[1]) : "r"(address));
    return v;
}

__device__ __forceinline__ u32 load_shared_4(u32 address) {
    u32 v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address));
    return v;
}

__device__ __forceinline__ u32 load_shared_2(u32 address) {
    u16 v;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(address));
    return v;
}

__device__ __forceinline__ float load_shared_float(u32 address) {
    float v;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(address));
    return v;
}

__device__ __forceinline__ void store_shared_4(u32 address, u32 value) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

__device__ __forceinline__ void store_shared_16(u32 address, const u32* word) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(word[0]), "r"(word[1]), "r"(word[2]),
                 "r"(word[3])
                 : "memory");
}

// Four floats.
__device__ __forceinline__ void store_shared_floats(u32 address, const float* value) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(value[0]), "f"(value[1]), "f"(value[2]),
                 "f"(value[3])
                 : "memory");
}

// Four floats to a block of the cluster, where they complete on an mbarrier like a copy (sm_90): nobody waits for a fence.
// Both addresses from address_in_block.
__device__ __forceinline__ void send_floats(u32 address, const float* value, u32 barrier) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                     address),
                 "f"(value[0]), "f"(value[1]), "f"(value[2]), "f"(value[3]), "r"(barrier)
                 : "memory");
}

__device__ __forceinline__ void add_shared_floats(float* sum, u32 address) {
    const Words4 v = load_shared_16(address);
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[i] += __uint_as_float(v.word[i]);
}

__device__ __forceinline__ void store_shared_float(u32 address, float value) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}

// Four 8x8 matrices of two-byte elements; lane l gives the address of a 16-byte row: row l%8 of matrix l/8.
__device__ __forceinline__ Words4 load_matrix_x4(u32 address) {
    Words4 v;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
                 : "r"(address));
    return v;
}
