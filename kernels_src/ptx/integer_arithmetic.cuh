// Integer arithmetic that C++ has no operator for.
// Source: PTX ISA, "Integer Arithmetic Instructions: mul.hi" and "max", "redux.sync", "bfind".
#pragma once
#include "num/integers.cuh"

__device__ __forceinline__ u64 multiply_high(u64 a, u64 b) { return __umul64hi(a, b); }

// The number of the lowest bit that is set, of which there is one.
__device__ __forceinline__ u32 lowest_bit(u64 value) { return __ffsll((long long)value) - 1; }

// The largest of the warp's values, in every lane (redux.sync, sm_80).
__device__ __forceinline__ u32 warp_maximum(u32 value) { return __reduce_max_sync(0xFFFFFFFFu, value); }
