// The arguments of dequantize.cu.
#pragma once
#include "num/integers.cuh"

struct DequantizeArguments {
    const u8* data;             // (m, C * 8) bytes
    const u8* scales;           // the layout's shape
    const float* global_scale;  // one element
    u8* y;                      // (m, n), dense
    u64 m;
    u64 n;
    u64 data_stride;   // bytes of a row of data
    u64 across;        // tiles in a row of tiles
    u64 chunks_magic;  // divider of `chunks`
    u32 pieces;        // of a row, the last one perhaps in part
    u32 chunks;        // CTAs side by side along a row
    u32 threads_log2;  // threads side by side along a row
    u32 layout;        // 0 linear, 1 128x4, 2 8x4
    u32 access_bytes;  // widest store that every piece of y allows: 16, 8, 4, 2
    u32 whole_pieces;  // what dequantize_whole asks for
};
