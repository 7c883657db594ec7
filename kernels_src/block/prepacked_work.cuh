// Which part of a matrix product a block computes, and where its sums go.
//
// The rows of the weight are cut into row blocks of ROW_TILES tiles of 16, and k into `splits` parts of whole units (a
// unit is what one stage of a pipeline holds). Row blocks come first in the order, so that blocks that run at the same
// time read neighbouring tiles. Every part is summed by one block in a fixed order; `partial` sums of several parts
// are added by a second kernel, so no block ever waits for another.
#pragma once
#include "layout/prepacked.cuh"

struct PrepackedWork {
    u32 first_tile, tiles;  // row tiles; fewer than ROW_TILES in the last row block
    u32 first_unit, last_unit;
    u32 split;
};

template <u32 BLOCK_TILES>
__device__ __forceinline__ PrepackedWork prepacked_work(u32 item, u32 row_tiles, u32 units, u32 splits) {
    const u32 row_blocks = (row_tiles + BLOCK_TILES - 1) / BLOCK_TILES;
    const u32 split = item / row_blocks;
    const u32 first_tile = (item - split * row_blocks) * BLOCK_TILES;
    return {first_tile, min(BLOCK_TILES, row_tiles - first_tile), units * split / splits, units * (split + 1) / splits,
            split};
}

template <u32 BLOCK_TILES>
__device__ __forceinline__ u32 prepacked_work_items(u32 row_tiles, u32 splits) {
    return (row_tiles + BLOCK_TILES - 1) / BLOCK_TILES * splits;
}
