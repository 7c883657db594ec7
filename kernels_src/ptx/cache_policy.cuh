// Which lines of L2 make room first, for loads and bulk copies that take a policy.
// Source: PTX ISA, "Data Movement and Conversion Instructions: createpolicy".
#pragma once
#include "num/integers.cuh"

// For data that is read once: first out of L2, so that it evicts nothing that is used again.
__device__ __forceinline__ u64 evict_first_policy() {
    u64 policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
