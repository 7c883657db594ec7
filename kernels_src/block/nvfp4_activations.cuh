// NVFP4 activations through shared memory to fragments: few rows, decoded by every warp that uses them.
//
// A stage holds units of 8 rows x 128 columns, as the weights do: [token tile][piece of the stage] of 512 bytes of codes
// (lane 4g + t: the 16 bytes t of row g) and 64 bytes of scales ([column group of 4][row] 4 bytes). The words decode to
// pairs in the very order of the weights' pairs, so nothing is rearranged. k is even.
// Codes past k and blocks past k become 0; rows past m are not copied.
#pragma once
#include "block/guarded_copy.cuh"
#include "block/scale_rows.cuh"
#include "block/gemm_arguments.cuh"
#include "mma/nvfp4_pairs.cuh"

template <typename Tile, i32 ALIGN, i32 SCALE_ALIGN>
struct Nvfp4Activations {
    static constexpr i32 UNIT_BYTES = 512, SCALE_BYTES = 64;
    static constexpr i32 STAGE_PIECES = Tile::pieces * Tile::warps_k;
    static constexpr i32 UNITS = Tile::block_m / 8 * STAGE_PIECES;
    static constexpr i32 CODE_STAGE_BYTES = UNITS * UNIT_BYTES;
    static constexpr i32 STAGE_BYTES = CODE_STAGE_BYTES + UNITS * SCALE_BYTES;
    static constexpr i32 ROUNDS = (UNITS + Tile::warps - 1) / Tile::warps;

    struct Piece {
        Words4 codes[Tile::token_tiles];
        u32 scales[Tile::token_tiles];
    };

    const u8* codes;
    i64 first_row, rows, row_bytes;
    i32 k_bytes, blocks, k0;  // k0: the first column of the next stage to load
    ScaleRows scales;
    u32 from, scales_from;

    __device__ __forceinline__ Nvfp4Activations(const GemmArguments& args, const Tile& at, i64 first, i32 column)
        : codes(args.a), first_row(first), rows(args.m), k0(column), scales(args.a_scales, args.a_layout, args.a_columns) {
        const i32 g = at.lane / 4, t = at.lane % 4;
        row_bytes = (i64)args.a_columns * 8;
        k_bytes = (args.k + 1) / 2;
        blocks = (args.k + 15) / 16;
        const i32 unit = at.warp_k * Tile::pieces;
        from = unit * UNIT_BYTES + at.lane * 16;
        scales_from = CODE_STAGE_BYTES + unit * SCALE_BYTES + (t / 2) * 32 + g * 4 + (t % 2) * 2;
    }

    template <bool FULL>
    __device__ __forceinline__ void load(u32 stage, const Tile& at) {
#pragma unroll
        for (i32 round = 0; round < ROUNDS; ++round) {
            const i32 unit = at.warp + round * Tile::warps;
            if (unit >= UNITS) break;
            const i32 column = k0 + unit % STAGE_PIECES * 128, tile = unit / STAGE_PIECES;
            const i64 row = first_row + tile * 8 + at.lane / 4;
            if (row < rows) {
                const i32 byte = column / 2 + at.lane % 4 * 16;
                copy_16<ALIGN>(stage + unit * UNIT_BYTES + at.lane * 16, codes + row * row_bytes + byte,
                               FULL ? 16 : clamp_bytes(k_bytes - byte, 16));
            }
            const i64 scale_row = first_row + tile * 8 + at.lane % 8;
            if (at.lane < 16 && scale_row < rows) {
                const i32 group = column / 64 + at.lane / 8;
                const u8* source = scales.row(scale_row) + scales.group(group);
                copy_4<SCALE_ALIGN>(stage + CODE_STAGE_BYTES + unit * SCALE_BYTES + at.lane * 4, source,
                                    FULL ? 4 : clamp_bytes(blocks - group * 4, 4));
            }
        }
        k0 += Tile::block_k;
    }

    __device__ __forceinline__ Piece read(u32 stage, i32 piece) const {
        Piece found;
#pragma unroll
        for (i32 tile = 0; tile < Tile::token_tiles; ++tile) {
            const i32 unit = tile * STAGE_PIECES + piece;
            found.codes[tile] = load_shared_16(stage + from + unit * UNIT_BYTES);
            found.scales[tile] = Float16Pairs::scales(load_shared_2(stage + scales_from + unit * SCALE_BYTES));
        }
        return found;
    }

    __device__ __forceinline__ void fragments(const Piece& piece, i32 i, u32 (&b)[Tile::token_tiles][4]) const {
#pragma unroll
        for (i32 tile = 0; tile < Tile::token_tiles; ++tile) {
            u32 pair[4];
            Float16Pairs::decode(piece.codes[tile].word[i], pair);
            const u32 scale = i < 2 ? both_low(piece.scales[tile]) : both_high(piece.scales[tile]);
#pragma unroll
            for (i32 j = 0; j < 4; ++j) b[tile][j] = Float16Pairs::multiply(pair[j], scale);
        }
    }
};
