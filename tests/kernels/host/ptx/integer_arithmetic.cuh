#pragma once
#include "num/integers.cuh"

inline u64 multiply_high(u64 a, u64 b) { return (u64)((unsigned __int128)a * b >> 64); }
