// Exact division of an index by a number that the host knows: one high product instead of a division.
//
// magic = ceil(2^64 / divisor); index * magic / 2^64 is off by less than index * divisor / 2^64 < 1 / divisor for a
// 32-bit index and divisor, so its floor is the quotient. divisor = 1 has magic 2^64, kept as 0.
#pragma once
#include "num/integers.cuh"
#include "ptx/integer_arithmetic.cuh"

__device__ __forceinline__ u32 divide(u32 index, u64 magic) { return magic ? (u32)multiply_high(index, magic) : index; }

// Any 64-bit index: the fast way wherever it is exact.
__device__ __forceinline__ u64 divide(u64 index, u64 magic, u64 divisor) {
    return (index | divisor) >> 32 ? index / divisor : divide((u32)index, magic);
}
