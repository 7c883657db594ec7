// Weights as the library keeps them (rows of codes, block scales in any layout) through shared memory to fragments.
//
// A warp takes ROW_TILES tiles of 16 rows, and of each stage PIECES pieces of 128 columns. Lane 4g + t takes from row g
// (and g + 8) of a tile the 16 bytes t of a piece's 64: 32 codes in two blocks, four words. So bytes go to fragments as
// they lie, at the price of another order of k: step i of a piece multiplies, in lane t, columns 32t + 8i .. + 7, and
// the activations come in the same order.
//
//   codes in a stage    [warp row][k group][row tile][piece][row g or g + 8][lane] 16 bytes: each lane reads what it wrote
//   scales              [warp row][k group][row tile][piece][column group of 4][row] 4 bytes
//
// Rows past n read row n - 1 again: they make only sums that nobody stores. Blocks past k become 0.
#pragma once
#include "block/guarded_copy.cuh"
#include "block/scale_rows.cuh"
#include "block/gemm_arguments.cuh"
#include "mma/nvfp4_pairs.cuh"

template <typename Tile, i32 TYPE, i32 ALIGN, i32 SCALE_ALIGN>
struct StandardWeights {
    using Pairs = PairsFor<TYPE>;
    static constexpr bool NATURAL_ORDER = false;
    static constexpr i32 HALF_BYTES = 512, SCALE_BYTES = 128;  // of 8 rows x 128 columns; of 16 rows x 8 block columns
    static constexpr i32 CODE_STAGE_BYTES = Tile::block_n * Tile::block_k / 2;
    static constexpr i32 STAGE_BYTES = CODE_STAGE_BYTES + Tile::block_n * Tile::block_k / 16;
    static constexpr i32 HALVES = 2 * Tile::row_tiles;  // of 8 rows

    struct Piece {
        Words4 codes[Tile::row_tiles][2];
        u32 scales[Tile::row_tiles][2];
    };

    const u8* code_row[HALVES];       // this lane's 16 bytes in the next stage to load
    const u8* scale_row[Tile::row_tiles];  // this lane's column group there
    i32 first_column;                  // of this lane's k group in that stage
    i32 k_bytes, blocks;
    u64 two_groups, stage_groups;  // distance of column groups that are one piece, one stage apart
    u32 codes_at, scales_to, scales_from;  // offsets in a stage

    __device__ __forceinline__ StandardWeights(const GemmArguments& args, const Tile& at, i64 first_row, i32 k0) {
        const i32 g = at.lane / 4, t = at.lane % 4;
        const ScaleRows scales(args.b_scales, args.b_layout, args.b_columns);
        k_bytes = (args.k + 15) / 16 * 8;
        blocks = (args.k + 15) / 16;
        two_groups = scales.group(2);
        stage_groups = scales.group(Tile::block_k / 64);
        first_column = k0 + at.warp_k * Tile::pieces * 128;
        const i64 last_row = args.n - 1;
#pragma unroll
        for (i32 half = 0; half < HALVES; ++half) {
            const i64 row = min(first_row + at.warp_n * Tile::warp_rows + half * 8 + g, last_row);
            code_row[half] = args.b + row * args.b_columns * 8 + first_column / 2 + t * 16;
        }
#pragma unroll
        for (i32 row_tile = 0; row_tile < Tile::row_tiles; ++row_tile) {
            const i64 row = min(first_row + at.warp_n * Tile::warp_rows + row_tile * 16 + at.lane % 16, last_row);
            scale_row[row_tile] = scales.row(row) + scales.group(first_column / 64 + at.lane / 16);
        }
        const i32 unit = (at.warp_n * Tile::warps_k + at.warp_k) * Tile::row_tiles * Tile::pieces;
        codes_at = unit * 2 * HALF_BYTES + at.lane * 16;
        scales_from = CODE_STAGE_BYTES + unit * SCALE_BYTES + (t / 2) * 64 + g * 4 + (t % 2) * 2;
        scales_to = CODE_STAGE_BYTES + unit * SCALE_BYTES + at.lane * 4;
    }

    // Start the copies of the next stage. FULL: all of its columns exist.
    template <bool FULL>
    __device__ __forceinline__ void load(u32 stage, const Tile& at) {
#pragma unroll
        for (i32 piece = 0; piece < Tile::pieces; ++piece) {
            const i32 column = first_column + piece * 128;
            const i32 valid = FULL ? 16 : clamp_bytes(k_bytes - column / 2 - at.lane % 4 * 16, 16);
            const i32 valid_scales = FULL ? 4 : clamp_bytes(blocks - (column / 64 + at.lane / 16) * 4, 4);
#pragma unroll
            for (i32 half = 0; half < HALVES; ++half) {
                const u32 to = stage + codes_at + ((half / 2 * Tile::pieces + piece) * 2 + half % 2) * HALF_BYTES;
                const u8* from = code_row[half] + piece * 64;
                if constexpr (FULL && ALIGN == 16) {
                    cp_async_16_line(to, from);
                } else {
                    copy_16<ALIGN>(to, from, valid);
                }
            }
#pragma unroll
            for (i32 row_tile = 0; row_tile < Tile::row_tiles; ++row_tile) {
                const u32 to = stage + scales_to + (row_tile * Tile::pieces + piece) * SCALE_BYTES;
                const u8* from = scale_row[row_tile] + piece * two_groups;
                if constexpr (FULL && SCALE_ALIGN == 4) {
                    cp_async_4(to, from);
                } else {
                    copy_4<SCALE_ALIGN>(to, from, valid_scales);
                }
            }
        }
        first_column += Tile::block_k;
#pragma unroll
        for (i32 half = 0; half < HALVES; ++half) code_row[half] += Tile::block_k / 2;
#pragma unroll
        for (i32 row_tile = 0; row_tile < Tile::row_tiles; ++row_tile) scale_row[row_tile] += stage_groups;
    }

    __device__ __forceinline__ Piece read(u32 stage, i32 piece, const Tile&) const {
        Piece found;
#pragma unroll
        for (i32 row_tile = 0; row_tile < Tile::row_tiles; ++row_tile) {
            const i32 unit = row_tile * Tile::pieces + piece;
#pragma unroll
            for (i32 half = 0; half < 2; ++half) {
                found.codes[row_tile][half] = load_shared_16(stage + codes_at + (unit * 2 + half) * HALF_BYTES);
                const u32 bytes = load_shared_2(stage + scales_from + unit * SCALE_BYTES + half * 32);
                found.scales[row_tile][half] = Pairs::scales(bytes);
            }
        }
        return found;
    }

    // The two 16 x 16 operands of step `i` of a piece.
    static __device__ __forceinline__ void fragments(const Piece& from, i32 row_tile, i32 i, u32 (&a)[2][4]) {
#pragma unroll
        for (i32 half = 0; half < 2; ++half) {
            u32 pair[4];
            Pairs::decode(from.codes[row_tile][half].word[i], pair);
            const u32 scales = from.scales[row_tile][half];
            const u32 scale = i < 2 ? both_low(scales) : both_high(scales);
#pragma unroll
            for (i32 j = 0; j < 4; ++j) a[j / 2][j % 2 * 2 + half] = Pairs::multiply(pair[j], scale);
        }
    }
};
