// Which part of a matrix product a block computes: decode and small, whose tile holds all tokens.
//
// The rows of the weight are cut into row blocks of ROW_TILES tiles of 16, and k into `splits` parts of whole units (a
// unit is what a stage holds). Row blocks come first in the order, so that blocks that run at the same time read
// neighbouring tiles. The blocks of a cluster, which the hardware runs together, halve a part of k again and add their
// sums themselves. Every sum is made in a fixed order; `partial` sums of several parts are added by a second kernel, so
// no block ever waits for one that may not run.
//
// Defined by the kernel: ROW_TILES, STAGE_GROUPS, K_CLUSTER.
#pragma once
#include "block/gemm_arguments.cuh"
#include "layout/prepacked.cuh"

struct PrepackedWork {
    u32 first_tile, tiles;  // row tiles; fewer than ROW_TILES in the last row block
    u32 first_unit, last_unit;
    u32 split;
};

// Walks over a block's pieces of work, and in each over its units.
struct PrepackedWalk {
    u32 row_tiles, groups, units, row_blocks, splits;  // of the whole product
    u32 item, unit;
    PrepackedWork work;

    __device__ __forceinline__ explicit PrepackedWalk(const GemmArguments& args)
        : row_tiles((u32)((args.n + TILE_ROWS - 1) / TILE_ROWS)),
          groups((args.k + GROUP_COLUMNS - 1) / GROUP_COLUMNS),
          units((groups + STAGE_GROUPS - 1) / STAGE_GROUPS),
          row_blocks((row_tiles + ROW_TILES - 1) / ROW_TILES),
          splits(args.splits),
          item(blockIdx.x / K_CLUSTER) {
        begin();
    }

    __device__ __forceinline__ bool done() const { return item >= row_blocks * splits; }

    __device__ __forceinline__ void next_item() {
        item += gridDim.x / K_CLUSTER;
        if (!done()) begin();
    }

    __device__ __forceinline__ void next_unit() {
        if (++unit == work.last_unit) next_item();
    }

  private:
    __device__ __forceinline__ void begin() {
        const u32 split = splits == 1 ? 0 : item / row_blocks;  // a division takes longer than all else here
        const u32 first_tile = (item - split * row_blocks) * ROW_TILES;
        work = {first_tile, min((u32)ROW_TILES, row_tiles - first_tile), 0, units, split};
        if (K_CLUSTER * splits > 1) {
            const u32 part = split * K_CLUSTER + blockIdx.x % K_CLUSTER, parts = splits * K_CLUSTER;
            work.first_unit = units * part / parts, work.last_unit = units * (part + 1) / parts;
        }
        unit = work.first_unit;
    }
};
