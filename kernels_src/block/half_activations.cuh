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
#include "kernels/gemm.cuh"
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

    const u8* first;
    i64 row_stride, column_stride;
    i32 rows, k;
    u32 from;         // this lane's row and k group, offset in a stage
    u32 chunk_of[4];  // byte in a piece of the chunk that this lane reads in step i

    __device__ __forceinline__ HalfActivations(const GemmArguments& args, const Tile& at, i64 first_row) {
        const i32 g = at.lane / 4, t = at.lane % 4;
        first = args.a + first_row * args.a_row_stride;
        row_stride = args.a_row_stride;
        column_stride = args.a_column_stride;
        const i64 left = args.m - first_row;
        rows = left < Tile::block_m ? (i32)left : Tile::block_m;
        k = args.k;
        const i32 row = NATURAL ? at.lane % 8 : g;
        from = (at.warp_m * Tile::token_tiles * 8 + row) * ROW_BYTES + at.warp_k * Tile::pieces * 256;
#pragma unroll
        for (i32 i = 0; i < 4; ++i) chunk_of[i] = swizzle(row, NATURAL ? 4 * i + at.lane / 8 : 4 * t + i) * 16;
    }

    static __device__ __forceinline__ u32 swizzle(u32 row, u32 chunk) { return chunk ^ (row % 8) ^ (chunk / 8 % 2 * 2); }

    template <bool FULL>
    __device__ __forceinline__ void load(u32 stage, i32 k0, const Tile& at) const {
#pragma unroll
        for (i32 round = 0; round < ROUNDS; ++round) {
            const i32 index = at.thread + round * Tile::threads;
            const i32 row = index / CHUNKS, chunk = index % CHUNKS;
            if (row >= rows) break;
            const u32 to = stage + row * ROW_BYTES + swizzle(row, chunk) * 16;
            const i32 column = k0 + chunk * 8;
            if constexpr (ALIGN == 16) {
                const u8* source = first + row * row_stride + (i64)column * 2;
                if constexpr (FULL) {
                    cp_async_16(to, source);
                } else {
                    cp_async_16(to, source, (u32)clamp_bytes((k - column) * 2, 16));
                }
            } else {
                const u8* source = first + row * row_stride + column * column_stride;
#pragma unroll
                for (i32 i = 0; i < 4; ++i) {
                    const u32 low = column + 2 * i < k ? *(const u16*)(source + 2 * i * column_stride) : 0;
                    const u32 high = column + 2 * i + 1 < k ? *(const u16*)(source + (2 * i + 1) * column_stride) : 0;
                    store_shared_4(to + 4 * i, low | high << 16);
                }
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
