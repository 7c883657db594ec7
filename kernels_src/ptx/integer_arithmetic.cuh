// Integer arithmetic that C++ has no operator for.
// Source: PTX ISA, "Integer Arithmetic Instructions: mul.hi" and "max", "redux.sync".
#pragma once
#include "num/integers.cuh"

__device__ __forceinline__ u64 multiply_high(u64 a, u64 b) { return __umul64hi(a, b); }

// The largest of the warp's values, in every lane (redux.sync, sm_80).
__device__ __forceinline__ u32 warp_maximum(u32 value) { return __reduce_max_sync(0xFFFFFFFFu, value); }
