// fp16 or bf16 activations through shared memory to fragments.
//
// A stage holds BLOCK_M rows of BLOCK_K elements. The 16-byte chunk c of row r lies at chunk
//
//   c ^ (r % 8) ^ (c / 8 % 2 * 2)        within the row,
//
// so that the eight lanes that read together, whether two rows at chunks 4t + i (t = 0 .. 3) or eight rows at one
// chunk, find eight different groups of banks.
// Step i of a piece of 128 columns gets columns 32i .. 32i + 31 as they follow each other (NATURAL, by ldmatrix), or in
// lane t columns 32t + 8i .. + 7 in the order of decoded codes (mma/nvfp4_pairs.cuh): the order of the weights.
// Elements past k become 0; rows past m are not copied: they make only sums that nobody stores.
#pragma once
#include "block/guarded_copy.cuh"
#include "block/gemm_arguments.cuh"
#include "mma/nvfp4_pairs.cuh"

template <typename Tile, i32 ALIGN, bool NATURAL>
struct HalfActivations {
    static constexpr i32 CHUNKS = Tile::block_k / 8;  // a row
    static constexpr i32 ROW_BYTES = CHUNKS * 16;
    static constexpr i32 STAGE_BYTES = Tile::block_m * ROW_BYTES;
    static constexpr i32 ROUNDS = (Tile::block_m * CHUNKS + Tile::threads - 1) / Tile::threads;

    struct Piece {
        u32 row;  // address of the piece in this lane's row of the first token tile
    };

    // Round r of a stage copies, with this thread, chunk `chunk` of row `row + r * ROW_STEP`, or, where a row has more
    // chunks than the block has threads, chunk `chunk + r * threads % CHUNKS` of row `r * threads / CHUNKS`.
    static constexpr bool LONG_ROWS = CHUNKS > Tile::threads;
    static constexpr i32 ROW_STEP = Tile::threads / CHUNKS;
    static_assert(LONG_ROWS ? CHUNKS % Tile::threads == 0 : Tile::threads % CHUNKS == 0, "whole rows a round");

    const u8* next;  // this thread's chunk in the next stage to load
    i64 row_stride, column_stride;
    i32 rows, k, row, chunk, column;
    u32 to, from;     // offsets in a stage: where this thread writes, and its lane's row and k group
    u32 chunk_of[4];  // byte in a piece of the chunk that this lane reads in step i

    __device__ __forceinline__ HalfActivations(const GemmArguments& args, const Tile& at, i64 first_row, i32 k0) {
        const i32 g = at.lane / 4, t = at.lane % 4;
        row_stride = args.a_row_stride;
        column_stride = ALIGN == 16 ? 2 : args.a_column_stride;
        rows = (i32)min(args.m - first_row, (i64)Tile::block_m);
        k = args.k;
        row = at.thread / CHUNKS;
        chunk = at.thread % CHUNKS;
        column = k0 + chunk * 8;
        next = args.a + (first_row + row) * row_stride + column * column_stride;
        to = row * ROW_BYTES;
        const i32 read_row = NATURAL ? at.lane % 8 : g;
        from = read_row * ROW_BYTES + at.warp_k * Tile::pieces * 256;
#pragma unroll
        for (i32 i = 0; i < 4; ++i) chunk_of[i] = swizzle(read_row, NATURAL ? 4 * i + at.lane / 8 : 4 * t + i) * 16;
    }

    static __device__ __forceinline__ u32 swizzle(u32 row, u32 chunk) { return chunk ^ (row % 8) ^ (chunk / 8 % 2 * 2); }

    template <bool FULL>
    __device__ __forceinline__ void load(u32 stage, const Tile& at) {
#pragma unroll
        for (i32 round = 0; round < ROUNDS; ++round) {
            const i32 row_step = LONG_ROWS ? round * Tile::threads / CHUNKS : round * ROW_STEP;
            const i32 chunk_step = LONG_ROWS ? round * Tile::threads % CHUNKS : 0;
            if (row + row_step >= rows) break;
            const u32 target = stage + to + row_step * ROW_BYTES + swizzle(row + row_step, chunk + chunk_step) * 16;
            copy_chunk<FULL>(target, next + row_step * row_stride + chunk_step * 8 * column_stride, column + chunk_step * 8);
        }
        column += Tile::block_k;
        next += Tile::block_k * column_stride;
    }

    // Eight elements from `source`, which is column `first` of a row.
    template <bool FULL>
    __device__ __forceinline__ void copy_chunk(u32 target, const u8* source, i32 first) const {
        if constexpr (ALIGN == 16 && FULL) {
            cp_async_16(target, source);
        } else if constexpr (ALIGN == 16) {
            cp_async_16(target, source, (u32)clamp_bytes((k - first) * 2, 16));
        } else {
#pragma unroll
            for (i32 i = 0; i < 8; i += 2) {
                const u32 low = first + i < k ? *(const u16*)(source + i * column_stride) : 0;
                const u32 high = first + i + 1 < k ? *(const u16*)(source + (i + 1) * column_stride) : 0;
                store_shared_4(target + 2 * i, low | high << 16);
            }
        }
    }

    __device__ __forceinline__ Piece read(u32 stage, i32 piece) const { return {stage + from + piece * 256}; }

    __device__ __forceinline__ void fragments(const Piece& piece, i32 i, u32 (&b)[Tile::token_tiles][4]) const {
#pragma unroll
        for (i32 tile = 0; tile < Tile::token_tiles; ++tile) {
            const u32 address = piece.row + tile * 8 * ROW_BYTES + chunk_of[i];
            if constexpr (NATURAL) {
                const Words4 words = load_matrix_x4(address);
#pragma unroll
                for (i32 j = 0; j < 4; ++j) b[tile][j] = words.word[j];
            } else {
                natural_to_paired(load_shared_16(address).word, b[tile]);
            }
        }
    }
};
