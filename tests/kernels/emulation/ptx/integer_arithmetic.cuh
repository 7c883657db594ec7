// kernels_src/ptx/integer_arithmetic.cuh on a CPU: what the emulated kernels use of it.
#pragma once
#include "num/integers.cuh"

inline u64 multiply_high(u64 a, u64 b) { return (u64)((unsigned __int128)a * b >> 64); }
inline u32 lowest_bit(u64 value) { return (u32)__builtin_ctzll(value); }
