// kernels_src/ptx/cache_policy.cuh on a CPU, which has no such cache.
#pragma once
#include "num/integers.cuh"

inline u64 evict_first_policy() { return 0; }
