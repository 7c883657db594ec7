// The tiles of a large product in the order in which a persistent grid takes them.
//
// RASTER_TOKENS token tiles are swept together over all row blocks, so that tiles under way at the same time share both
// their weights and their tokens in L2. The blocks of a cluster take neighbouring row blocks of the same tokens
// (CLUSTER_ROWS) or parts of k of the same tile (CLUSTER_KS).
//
//   RASTER_TOKENS = 2, tokens to the right, row blocks down:      0  1 | 14 15
//                                                                 2  3 | 12 13
//                                                                 4  5 | 10 11
//                                                                 6  7 |  8  9
//
// What the tiles before have left in L2 comes first: every second sweep goes up again, and every second tile of a worker
// goes through k backwards.
//
// The first `whole` tiles go round among the workers (a block, or a cluster). The k of all the others, laid end to end,
// is cut into pieces of `piece_groups` column groups, the first of them with one more, for the first `sharers` workers,
// so that all end together. A tile that several workers have pieces of is shared: see block/shared_tiles.cuh.
//
//   5 sharers, 3 tiles after the whole ones, of 10 column groups each:
//     |  tile 0  |  tile 1  |  tile 2  |
//     | 0   | 1   | 2   | 3   | 4      |     worker 1: groups 6 to 9 of tile 0, then 0 and 1 of tile 1
//
// A division takes as long as all else here, one of 64 bits several times as long, and nothing is on its way yet.
#pragma once
#include "block/gemm_arguments.cuh"
#include "layout/prepacked.cuh"

constexpr u32 NOT_SHARED = ~0u;

struct PrefillTile {
    u32 first_token;
    u32 first_row_tile, row_tiles;  // row_tiles may be 0 in the last cluster
    u32 first_group, last_group;    // column groups of 256
    u32 shared;                     // number among the tiles after the whole ones, or NOT_SHARED
    bool backwards;                 // whether the last group comes first

    // The group whose turn is `turn`, from first_group on.
    __device__ __forceinline__ u32 group_at(u32 turn) const {
        return backwards ? first_group + last_group - 1 - turn : turn;
    }

    // The same of chunks; those of a group keep their order.
    __device__ __forceinline__ u32 chunk_at(u32 turn) const {
        return group_at(turn / GROUP_CHUNKS) * GROUP_CHUNKS + turn % GROUP_CHUNKS;
    }
};

template <u32 BLOCK_TILES, u32 BLOCK_TOKENS, u32 CLUSTER_ROWS, u32 CLUSTER_KS, u32 RASTER>
struct PrefillTiles {
    static constexpr bool SHARES = CLUSTER_KS == 1;  // tiles, among workers
    u32 all_row_tiles, groups, token_tiles, row_clusters, whole;
    u32 worker, workers, sharers;
    u32 piece_groups;
    u32 longer;     // pieces that have one group more
    u32 own_whole;  // of this worker

    __device__ __forceinline__ PrefillTiles(const GemmArguments& args, u32 whole_tiles, u32 all_sharers, u32 groups_each)
        : all_row_tiles(((u32)args.n + TILE_ROWS - 1) / TILE_ROWS),
          groups(((u32)args.k + GROUP_COLUMNS - 1) / GROUP_COLUMNS),
          token_tiles(((u32)args.m + BLOCK_TOKENS - 1) / BLOCK_TOKENS),
          row_clusters((all_row_tiles + BLOCK_TILES * CLUSTER_ROWS - 1) / (BLOCK_TILES * CLUSTER_ROWS)),
          whole(whole_tiles),
          worker(blockIdx.x / (CLUSTER_ROWS * CLUSTER_KS)),
          workers(gridDim.x / (CLUSTER_ROWS * CLUSTER_KS)),
          sharers(all_sharers),
          piece_groups(groups_each),
          longer((token_tiles * row_clusters - whole_tiles) * groups - all_sharers * groups_each),
          own_whole(whole_tiles > worker ? 1 : 0) {
        if (whole_tiles > workers && own_whole != 0) own_whole = (whole_tiles - worker - 1) / workers + 1;
    }

    __device__ __forceinline__ bool has_any() const { return own_whole != 0 || worker < sharers; }

    // Of this worker, its whole tiles among them.
    __device__ __forceinline__ u32 pieces() const {
        if (worker >= sharers) return own_whole;
        return own_whole + (first_of(worker + 1) - 1) / groups - first_tile_of(worker) + 1;
    }

    // Where a sharer's piece of the groups laid end to end begins; there are at least as many groups as sharers.
    __device__ __forceinline__ u32 first_of(u32 of_worker) const {
        return of_worker * piece_groups + min(of_worker, longer);
    }

    // The tile in which it begins.
    __device__ __forceinline__ u32 first_tile_of(u32 of_worker) const { return first_of(of_worker) / groups; }

    // Whose piece holds a group.
    __device__ __forceinline__ u32 worker_of(u32 group) const {
        const u32 in_longer = longer * (piece_groups + 1);
        const bool is_longer = group < in_longer;
        return (is_longer ? 0 : longer) + (is_longer ? group : group - in_longer) / (piece_groups + (is_longer ? 1 : 0));
    }

    __device__ __forceinline__ PrefillTile at(u32 piece, u32 rank) const {
        if (piece < own_whole) {
            const u32 part = CLUSTER_KS > 1 ? rank : 0;
            return tile(worker + piece * workers, rank, groups * part / CLUSTER_KS, groups * (part + 1) / CLUSTER_KS,
                        NOT_SHARED, piece);
        }
        const u32 begin = first_of(worker), end = first_of(worker + 1);
        const u32 number = begin / groups + piece - own_whole, tile_begin = number * groups;
        const u32 first = begin > tile_begin ? begin - tile_begin : 0;
        const u32 last = end < tile_begin + groups ? end - tile_begin : groups;
        return tile(whole + number, rank, first, last, last - first == groups ? NOT_SHARED : number, piece);
    }

  private:
    __device__ __forceinline__ PrefillTile tile(u32 item, u32 rank, u32 first_group, u32 last_group, u32 shared,
                                            u32 piece) const {
        const u32 sweep = item < RASTER * row_clusters ? 0 : item / (RASTER * row_clusters);
        const u32 in_sweep = item - sweep * RASTER * row_clusters;
        const u32 width = min(RASTER, token_tiles - sweep * RASTER);
        const u32 in_row = width == RASTER ? in_sweep / RASTER : in_sweep / width;
        const u32 row = sweep % 2 != 0 ? row_clusters - 1 - in_row : in_row;
        const u32 first_row_tile = (row * CLUSTER_ROWS + (CLUSTER_ROWS > 1 ? rank : 0)) * BLOCK_TILES;
        return {(sweep * RASTER + in_sweep - in_row * width) * BLOCK_TOKENS,
                first_row_tile,
                first_row_tile < all_row_tiles ? min(BLOCK_TILES, all_row_tiles - first_row_tile) : 0,
                first_group,
                last_group,
                shared,
                piece % 2 != 0};
    }
};

// One tile for each block, or cluster: the row block is its place in x in the grid, the token tile that in y.
template <u32 BLOCK_TILES, u32 BLOCK_TOKENS, u32 CLUSTER_KS>
struct GridTile {
    static constexpr bool SHARES = false;
    u32 all_row_tiles, groups;

    __device__ __forceinline__ GridTile(const GemmArguments& args, u32, u32, u32)
        : all_row_tiles(((u32)args.n + TILE_ROWS - 1) / TILE_ROWS),
          groups(((u32)args.k + GROUP_COLUMNS - 1) / GROUP_COLUMNS) {}

    __device__ __forceinline__ bool has_any() const { return true; }
    __device__ __forceinline__ u32 pieces() const { return 1; }

    __device__ __forceinline__ PrefillTile at(u32, u32 rank) const {
        const u32 first_row_tile = blockIdx.x / CLUSTER_KS * BLOCK_TILES, part = CLUSTER_KS > 1 ? rank : 0;
        return {blockIdx.y * BLOCK_TOKENS,
                first_row_tile,
                first_row_tile < all_row_tiles ? min(BLOCK_TILES, all_row_tiles - first_row_tile) : 0,
                groups * part / CLUSTER_KS,
                groups * (part + 1) / CLUSTER_KS,
                NOT_SHARED,
                false};
    }
};

template <bool ONE_PIECE_EACH, u32 BLOCK_TILES, u32 BLOCK_TOKENS, u32 CLUSTER_ROWS, u32 CLUSTER_KS, u32 RASTER>
struct SelectTiles {
    using Type = PrefillTiles<BLOCK_TILES, BLOCK_TOKENS, CLUSTER_ROWS, CLUSTER_KS, RASTER>;
};
template <u32 BLOCK_TILES, u32 BLOCK_TOKENS, u32 CLUSTER_ROWS, u32 CLUSTER_KS, u32 RASTER>
struct SelectTiles<true, BLOCK_TILES, BLOCK_TOKENS, CLUSTER_ROWS, CLUSTER_KS, RASTER> {
    using Type = GridTile<BLOCK_TILES, BLOCK_TOKENS, CLUSTER_KS>;
};
