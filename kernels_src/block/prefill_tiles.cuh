// The tiles of a large product in the order in which a persistent grid takes them.
//
// RASTER_TOKENS token tiles are swept together over all row blocks, so that tiles under way at the same time share both
// their weights and their tokens in L2. The blocks of a cluster take neighbouring row blocks of the same tokens
// (CLUSTER_ROWS) or parts of k of the same tile (CLUSTER_KS). With k split, all tiles of the first part come before
// those of the second.
//
//   RASTER_TOKENS = 2, tokens to the right, row blocks down:      0  1 | 8  9
//                                                                 2  3 | 10 11
//                                                                 4  5 | 12 13
//                                                                 6  7 | 14 15
#pragma once
#include "block/gemm_arguments.cuh"
#include "layout/prepacked.cuh"

struct PrefillTile {
    u32 first_token;
    u32 first_row_tile, row_tiles;  // row_tiles may be 0 in the last cluster
    u32 first_group, last_group;    // column groups of 256
    u32 split;
};

template <u32 BLOCK_TILES, u32 BLOCK_TOKENS, u32 CLUSTER_ROWS, u32 CLUSTER_KS, u32 RASTER>
struct PrefillTiles {
    u32 all_row_tiles, groups, token_tiles, row_clusters, splits, count;

    __device__ __forceinline__ explicit PrefillTiles(const GemmArguments& args)
        : all_row_tiles((u32)((args.n + TILE_ROWS - 1) / TILE_ROWS)),
          groups((args.k + GROUP_COLUMNS - 1) / GROUP_COLUMNS),
          token_tiles((u32)((args.m + BLOCK_TOKENS - 1) / BLOCK_TOKENS)),
          row_clusters((all_row_tiles + BLOCK_TILES * CLUSTER_ROWS - 1) / (BLOCK_TILES * CLUSTER_ROWS)),
          splits(args.splits),
          count(token_tiles * row_clusters * splits) {}

    __device__ __forceinline__ PrefillTile at(u32 item, u32 rank) const {
        const u32 split = item / (token_tiles * row_clusters);
        const u32 in_split = item - split * token_tiles * row_clusters;
        const u32 sweep = in_split / (RASTER * row_clusters);
        const u32 in_sweep = in_split - sweep * RASTER * row_clusters;
        const u32 width = min(RASTER, token_tiles - sweep * RASTER);
        const u32 first_row_tile = (in_sweep / width * CLUSTER_ROWS + (CLUSTER_ROWS > 1 ? rank : 0)) * BLOCK_TILES;
        const u32 part = split * CLUSTER_KS + (CLUSTER_KS > 1 ? rank : 0), parts = splits * CLUSTER_KS;
        return {(sweep * RASTER + in_sweep % width) * BLOCK_TOKENS,
                first_row_tile,
                first_row_tile < all_row_tiles ? min(BLOCK_TILES, all_row_tiles - first_row_tile) : 0,
                groups * part / parts,
                groups * (part + 1) / parts,
                split};
    }
};
