// The arguments of prepacked_values.cu.
#pragma once
#include "num/integers.cuh"

struct PrepackedValuesArguments {
    const u8* tiles;            // data[k / 256][n / 16][2304]
    const u8* records;          // (count, 16)
    const float* global_scale;  // one element
    u8* y;                      // (n, k), dense
    u64 n;
    u32 k;
    u32 record_count;
    u32 access_bytes;           // widest store that every piece of y allows: 16, 8, 4, 2
};
