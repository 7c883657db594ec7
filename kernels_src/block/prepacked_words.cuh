// Words of a prepacked weight and of its records, at any address: 16 bytes' alignment is for those that multiply.
#pragma once
#include "ptx/global_memory.cuh"

__device__ __forceinline__ u32 load_word(const u8* from) {
    if ((u64)from % 4 == 0) return load_4(from);
    return load_1(from) | load_1(from + 1) << 8 | load_1(from + 2) << 16 | load_1(from + 3) << 24;
}
