// A float as its bits and back.
#pragma once
#include "num/integers.cuh"

__device__ __forceinline__ u32 bits_of(float value) { return __float_as_uint(value); }
__device__ __forceinline__ float float_of(u32 bits) { return __uint_as_float(bits); }
