// The pieces that the workers of gemm_prefill.cu take, as rows of eight numbers.
#include "num/integers.cuh"

struct Index {
    u32 x, y;
};
static Index blockIdx, gridDim;

template <typename T>
T min(T a, T b) {
    return b < a ? b : a;
}

#include "block/prefill_tiles.cuh"

template <u32 CLUSTER>
u64 pieces_of(const GemmArguments& args, u32 whole, u32 sharers, u32 piece_groups, u32* row, u64 most) {
    u64 count = 0;
    for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) {
        const PrefillTiles<8, 256, CLUSTER, 1, 4> tiles(args, whole, sharers, piece_groups);
        for (u32 piece = 0; piece < tiles.pieces(); ++piece) {
            const PrefillTile tile = tiles.at(piece, blockIdx.x % CLUSTER);
            const bool shared = tile.shared != NOT_SHARED;
            const u32 begin = tile.shared * tiles.groups;
            const u32 values[8] = {tiles.worker,
                                   tile.first_token,
                                   tile.first_row_tile,
                                   tile.row_tiles,
                                   tile.first_group,
                                   tile.last_group,
                                   shared ? tiles.worker_of(begin) : tiles.worker,
                                   shared ? tiles.worker_of(begin + tiles.groups - 1) : tiles.worker};
            if (count == most) return 0;
            for (u32 i = 0; i < 8; ++i) row[8 * count + i] = values[i];
            ++count;
        }
    }
    return count;
}

extern "C" u64 prefill_pieces(i64 m, i64 n, i32 k, u32 cluster, u32 blocks, u32 whole, u32 sharers,
                              u32 piece_groups, u32* row, u64 most) {
    GemmArguments args = {};
    args.m = m, args.n = n, args.k = k;
    gridDim.x = blocks;
    return cluster == 1 ? pieces_of<1>(args, whole, sharers, piece_groups, row, most)
                        : pieces_of<2>(args, whole, sharers, piece_groups, row, most);
}
