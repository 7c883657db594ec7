// The arguments of relayout.cu.
#pragma once
#include "num/integers.cuh"

struct RelayoutArguments {
    const u8* from;    // scales in from_layout
    u8* to;            // scales in to_layout
    u64 m;
    u64 columns;       // that hold a block of the n columns: ceil(n / 16)
    u64 from_across;   // tiles in a row of tiles
    u64 to_across;
    u64 to_magic;      // divider of `to_across`
    u64 to_bytes;      // of the destination, padding included
    u32 from_layout;   // 0 linear, 1 128x4, 2 8x4
    u32 to_layout;
    u32 to_aligned;    // the destination is aligned to 4 bytes
};
