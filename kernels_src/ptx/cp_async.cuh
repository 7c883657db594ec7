// Copies from global to shared memory that run beside the arithmetic (cp.async, sm_80).
// On entry: both addresses are multiples of the bytes copied; `valid` bytes are read, the rest of the destination
// becomes zero. Addresses in shared memory are 32-bit. No function here takes a cache policy: ptxas up to 13.3 can leave
// its register unset (L2::cache_hint), an illegal instruction at run time, seen on an H200.
// Source: PTX ISA, "Data Movement and Conversion Instructions: cp.async".
#pragma once
#include "num/integers.cuh"

__device__ __forceinline__ void cp_async_16(u32 to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// The same, and the whole line of 128 bytes comes to L2: for rows of which the next bytes are read soon.
__device__ __forceinline__ void cp_async_16_line(u32 to, const void* from) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

__device__ __forceinline__ void cp_async_16(u32 to, const void* from, u32 valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid) : "memory");
}

__device__ __forceinline__ void cp_async_8(u32 to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(from) : "memory");
}

__device__ __forceinline__ void cp_async_8(u32 to, const void* from, u32 valid) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(from), "r"(valid) : "memory");
}

__device__ __forceinline__ void cp_async_4(u32 to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

__device__ __forceinline__ void cp_async_4(u32 to, const void* from, u32 valid) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(valid) : "memory");
}

__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Wait until at most PENDING of this thread's groups are still under way.
template <int PENDING>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
