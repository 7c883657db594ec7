// The arguments of quantize.cu.
#pragma once
#include "num/integers.cuh"

struct QuantizeArguments {
    const u8* x;                // (m, n), 16-byte aligned rows
    u8* data;                   // (m, C * 8) bytes, 8-byte aligned
    u8* scales;                 // the layout's shape, 16-byte aligned unless linear
    const float* global_scale;  // null: the value below
    float* kept_global_scale;   // where the result keeps it; null: nowhere
    i64 row_stride;             // of x, bytes
    u32 m;
    u32 input_columns;  // n / 16: n is a multiple of 16
    u32 columns;        // C
    u32 across;         // tiles in a row of tiles
    u32 strips;         // rows of CTAs
    u32 backwards;      // from the end of x to its start: what was read last is still in L2
    u32 read_once;      // x is larger than L2 anyway: let it evict itself
    float global_scale_value;
};
