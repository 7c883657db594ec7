// Which part of a matrix product a block computes: decode and small, whose tile holds all tokens.
//
// The rows of the weight are cut into row blocks of ROW_TILES tiles of 16; blocks that run at the same time read
// neighbouring ones. The blocks of a cluster, which the hardware runs together, share k and add their sums themselves, in
// a fixed order: no block ever waits for one that may not run. With ONE_PIECE the grid has a block, or a cluster, for each
// row block.
//
// With OWN_TILES, a block of a cluster has so many of its row tiles alone, for all of k; only the others are the
// cluster's, and each block takes every second unit of them. So a block can have the work of three and a half groups of
// rows, where four would leave multiprocessors idle:
//
//   row tiles of a cluster, OWN_TILES = 12, ROW_TILES = 16:   [12 of block 0][12 of block 1][4 of both]
//
// Defined by the kernel: ROW_TILES, OWN_TILES, STAGE_GROUPS, K_CLUSTER, ONE_PIECE.
#pragma once
#include "block/gemm_arguments.cuh"
#include "layout/prepacked.cuh"

constexpr u32 CLUSTER_TILES = K_CLUSTER * OWN_TILES + (ROW_TILES - OWN_TILES);  // row tiles of a row block
static_assert(OWN_TILES == 0 || K_CLUSTER > 1, "without a cluster all row tiles are the block's own");

struct PrepackedWork {
    u32 first_tile, tiles;          // row tiles; fewer than there is room for in the last row block
    u32 own_first_tile, own_tiles;  // those that the block has alone
    u32 first_unit, last_unit;
};

// Walks over a block's pieces of work, and in each over its units.
struct PrepackedWalk {
    u32 row_tiles, groups, units, row_blocks;  // of the whole product
    u32 item, unit;
    PrepackedWork work;

    __device__ __forceinline__ explicit PrepackedWalk(const GemmArguments& args)
        : row_tiles((u32)((args.n + TILE_ROWS - 1) / TILE_ROWS)),
          groups((args.k + GROUP_COLUMNS - 1) / GROUP_COLUMNS),
          units((groups + STAGE_GROUPS - 1) / STAGE_GROUPS),
          row_blocks((row_tiles + CLUSTER_TILES - 1) / CLUSTER_TILES),
          item(blockIdx.x / K_CLUSTER),
          over(false) {
        begin();
    }

    __device__ __forceinline__ bool done() const { return ONE_PIECE ? over : item >= row_blocks; }
    __device__ __forceinline__ bool is_first() const { return ONE_PIECE || item == blockIdx.x / K_CLUSTER; }

    __device__ __forceinline__ void next_item() {
        over = true;
        item += gridDim.x / K_CLUSTER;
        if (!done()) begin();
    }

    // Whether the block multiplies a unit of the row tiles that it does not have alone.
    __device__ __forceinline__ bool takes(u32 of_unit) const {
        return OWN_TILES == 0 || of_unit % K_CLUSTER == blockIdx.x % K_CLUSTER;
    }

    __device__ __forceinline__ void next_unit() {
        if (++unit == work.last_unit) next_item();
    }

  private:
    bool over;

    // How many of `most` row tiles from `first` on there are.
    __device__ __forceinline__ u32 up_to(u32 most, u32 first) const {
        return first < row_tiles ? min(most, row_tiles - first) : 0;
    }

    __device__ __forceinline__ void begin() {
        const u32 cluster_tile = item * CLUSTER_TILES;
        const u32 own_first_tile = cluster_tile + blockIdx.x % K_CLUSTER * OWN_TILES;
        const u32 first_tile = cluster_tile + K_CLUSTER * OWN_TILES;
        constexpr u32 PARTS_OF_K = OWN_TILES == 0 ? K_CLUSTER : 1;
        const u32 part = blockIdx.x % PARTS_OF_K;
        work = {first_tile, up_to(ROW_TILES - OWN_TILES, first_tile), own_first_tile, up_to(OWN_TILES, own_first_tile),
                units * part / PARTS_OF_K, units * (part + 1) / PARTS_OF_K};
        unit = work.first_unit;
    }
};
