// The arguments of quantize_any.cu.
#pragma once
#include "num/integers.cuh"

struct QuantizeAnyArguments {
    const u8* x;                // element (0, 0) of (m, n)
    u8* data;                   // (m, C * 8) bytes
    u8* scales;                 // the layout's shape
    const float* global_scale;  // null: the value below
    float* kept_global_scale;   // where the result keeps it; null: nowhere
    i64 row_stride;             // of x, bytes, any sign
    i64 column_stride;          // of x, bytes, any sign
    u64 m;
    u64 n;
    u64 columns;       // C
    u64 across;        // tiles in a row of tiles
    u64 across_magic;  // divider of `across`
    u64 scale_count;   // scale bytes, padding included
    u32 layout;        // 0 linear, 1 128x4, 2 8x4
    u32 access_bytes;  // widest load that every block of x allows: 16, 8, 4, 2; 0 where columns are not neighbours
    u32 data_aligned;  // data is aligned to 8 bytes
    u32 backwards;     // from the end of x to its start
    float global_scale_value;
};
