// Weights in the prepacked layout through shared memory to fragments; the same part as block/standard_weights.cuh.
//
// A piece is half a tile: 2 chunks of 64 columns, each 512 bytes of codes in the order of the lanes, and 128 bytes of
// scales. Step i of a piece multiplies columns 32i .. 32i + 31 in their natural order.
//
//   codes in a stage    [warp row][k group][row tile][piece][chunk][lane] 16 bytes
//   scales              [warp row][k group][row tile][piece] 128 bytes as they lie
//
// Tiles are whole, so only pieces past the last tile need zeros. Row tiles past n read the last one again.
#pragma once
#include "block/guarded_copy.cuh"
#include "layout/prepacked.cuh"
#include "mma/prepacked_fragments.cuh"

template <typename Tile, i32 TYPE, i32 ALIGN>
struct PrepackedWeights {
    using Pairs = WeightsFor<TYPE>;
    static constexpr bool NATURAL_ORDER = true;
    static constexpr i32 SCALE_BYTES = 128, PIECE_CHUNKS = 2;
    static constexpr i32 CODE_STAGE_BYTES = Tile::block_n * Tile::block_k / 2;
    static constexpr i32 STAGE_BYTES = CODE_STAGE_BYTES + Tile::block_n * Tile::block_k / 16;

    struct Piece {
        Words4 codes[Tile::row_tiles][PIECE_CHUNKS];
        ChunkScales scales[Tile::row_tiles][PIECE_CHUNKS][2];
    };

    const u8* tiles;
    u32 row_tiles, first_tile, columns, first_column;
    u32 codes_at, scales_at;

    __device__ __forceinline__ PrepackedWeights(const GemmArguments& args, const Tile& at, i64 first_row, i32 k0)
        : tiles(args.b) {
        row_tiles = (u32)((args.n + TILE_ROWS - 1) / TILE_ROWS);
        first_tile = (u32)(first_row / TILE_ROWS) + at.warp_n * Tile::row_tiles;
        columns = (args.k + GROUP_COLUMNS - 1) / GROUP_COLUMNS * GROUP_COLUMNS;
        first_column = k0 + at.warp_k * Tile::pieces * 128;
        const i32 unit = (at.warp_n * Tile::warps_k + at.warp_k) * Tile::row_tiles * Tile::pieces;
        codes_at = unit * PIECE_CHUNKS * CHUNK_CODE_BYTES + at.lane * 16;
        scales_at = CODE_STAGE_BYTES + unit * SCALE_BYTES;
    }

    template <bool FULL>
    __device__ __forceinline__ void load(u32 stage, const Tile& at) {
#pragma unroll
        for (i32 piece = 0; piece < Tile::pieces; ++piece) {
            const u32 column = first_column + piece * 128;
            const i32 valid = FULL || column < columns ? 16 : 0;
            const u32 chunk = column / CHUNK_COLUMNS % GROUP_CHUNKS;
#pragma unroll
            for (i32 row_tile = 0; row_tile < Tile::row_tiles; ++row_tile) {
                const u32 unit = row_tile * Tile::pieces + piece;
                const u32 row = min(first_tile + row_tile, row_tiles - 1);
                const u8* tile = tiles + prepacked_tile_offset(column / GROUP_COLUMNS, row, row_tiles);
#pragma unroll
                for (u32 c = 0; c < PIECE_CHUNKS; ++c) {
                    const u32 to = stage + codes_at + (unit * PIECE_CHUNKS + c) * CHUNK_CODE_BYTES;
                    copy<FULL>(to, tile + prepacked_codes_offset(chunk + c, at.lane), valid);
                }
                if (at.lane < SCALE_BYTES / 16)
                    copy<FULL>(stage + scales_at + unit * SCALE_BYTES + at.lane * 16,
                               tile + prepacked_scales_offset(chunk, at.lane), valid);
            }
        }
        first_column += Tile::block_k;
    }

    template <bool FULL>
    __device__ __forceinline__ void copy(u32 to, const u8* from, i32 valid) const {
        if constexpr (FULL && ALIGN == 16) {
            cp_async_16(to, from);
        } else {
            copy_16<ALIGN>(to, from, valid);
        }
    }

    __device__ __forceinline__ Piece read(u32 stage, i32 piece, const Tile& at) const {
        Piece found;
#pragma unroll
        for (i32 row_tile = 0; row_tile < Tile::row_tiles; ++row_tile) {
            const i32 unit = row_tile * Tile::pieces + piece;
            // Scale words of row g: chunk 0 rows g and g + 8, chunk 1 rows g and g + 8.
            const Words4 scales = load_shared_16(stage + scales_at + unit * SCALE_BYTES + at.lane / 4 * 16);
#pragma unroll
            for (i32 c = 0; c < PIECE_CHUNKS; ++c) {
                found.codes[row_tile][c] = load_shared_16(stage + codes_at + (unit * PIECE_CHUNKS + c) * CHUNK_CODE_BYTES);
                found.scales[row_tile][c][0] = Pairs::decode_scales(scales.word[2 * c]);
                found.scales[row_tile][c][1] = Pairs::decode_scales(scales.word[2 * c + 1]);
            }
        }
        return found;
    }

    // The two 16 x 16 operands of step `i` of a piece.
    static __device__ __forceinline__ void fragments(const Piece& from, i32 row_tile, i32 i, u32 (&a)[2][4]) {
        const ChunkScales(&scales)[2] = from.scales[row_tile][i / 2];
#pragma unroll
        for (i32 step = 0; step < 2; ++step) {
            const i32 j = i % 2 * 2 + step;
            decode_fragment<Pairs>(from.codes[row_tile][i / 2].word[j], scales[0], scales[1], j, a[step]);
        }
    }
};
