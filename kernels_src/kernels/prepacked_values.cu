// The values of a prepacked weight: those that dequantize.cu gives for the tensor it was made from, to the bit.
// On entry: n, k >= 1; tiles and records at any address, y at any of its elements. Writes k columns of n rows.
//
//   prepacked_values     a block of threads is one tile: 16 rows x 256 columns
//   restored_values      a thread is one record: a block of 16 columns that the tile cannot give back exactly
//
// A thread makes the same piece, 16 bytes of results, of rows g and g + 8. The codes of a row's piece are at the same
// place of a word that several lanes (layout/prepacked.cuh) have, two codes a lane. Threads beside each other make
// pieces that lie beside each other.
//
// Defined by the launcher: OUTPUT.
#include "block/prepacked_words.cuh"
#include "block/store_piece.cuh"
#include "kernels/prepacked_values_arguments.cuh"
#include "layout/prepacked.cuh"
#include "mma/prepacked_fragments.cuh"

#if __CUDA_ARCH__ < 800
#error "prepacked_values.cu is built for sm_80 and newer"
#endif

using Result = Piece<OUTPUT>;
constexpr u32 ELEMENTS = Result::ELEMENTS, PAIRS = ELEMENTS / 2;
constexpr u32 CHUNK_PIECES = CHUNK_COLUMNS / ELEMENTS;  // of a row
constexpr u32 TILE_THREADS = GROUP_CHUNKS * TILE_ROWS / 2 * CHUNK_PIECES;
constexpr u32 RECORD_THREADS = 128;

// A piece from its codes as pairs of neighbours, fp16 numbers times UNIT; nothing, where the weight has no such place:
// past its last rows and columns, or as a file's records say that lie.
__device__ __forceinline__ void make_piece(const PrepackedValuesArguments& args, float global_scale, u64 row,
                                           u32 column, const u32* neighbours, float scale) {
    if (row >= args.n || column >= args.k) return;
    const bool ordinary = is_ordinary(global_scale);
    const float factor =
        ordinary ? OrdinaryDivider(global_scale * UNIT).quotient(scale) : scale / global_scale;  // dequantize_extreme's
    float value[ELEMENTS];
#pragma unroll
    for (u32 t = 0; t < PAIRS; ++t) {
        const u32 pair = ordinary ? neighbours[t] : multiply_f16x2(neighbours[t], ONE_OVER_UNIT);
        value[2 * t] = float_from_low_f16(pair) * factor;
        value[2 * t + 1] = float_from_high_f16(pair) * factor;
    }
    u32 word[Result::WORDS];
    round_numbers<OUTPUT>(value, word);
    u8* const to = args.y + (row * args.k + column) * Result::ELEMENT_BYTES;
    store_numbers<OUTPUT>(to, word, args.k - column, args.access_bytes);
}

extern "C" __global__ void __launch_bounds__(TILE_THREADS)
    prepacked_values(const __grid_constant__ PrepackedValuesArguments args) {
    const u32 row_tiles = (u32)((args.n + TILE_ROWS - 1) / TILE_ROWS);
    const u32 groups = (args.k + GROUP_COLUMNS - 1) / GROUP_COLUMNS;
    const u32 group = blockIdx.x % groups, row_tile = blockIdx.x / groups;  // along y's rows
    const u32 piece = threadIdx.x % CHUNK_PIECES, g = threadIdx.x / CHUNK_PIECES % 8;
    const u32 chunk = threadIdx.x / CHUNK_PIECES / 8;
    const u32 j = piece * ELEMENTS / 16, kk = piece * ELEMENTS / 8 % 2, first_t = piece * ELEMENTS % 8 / 2;
    const u8* const tile = args.tiles + prepacked_tile_offset(group, row_tile, row_tiles);
    u32 words[PAIRS], scale_words[2];
#pragma unroll
    for (u32 t = 0; t < PAIRS; ++t) {
        words[t] = load_word(tile + prepacked_codes_offset(chunk, 4 * g + first_t + t) + 4 * j);
    }
#pragma unroll
    for (u32 rr = 0; rr < 2; ++rr) scale_words[rr] = load_word(tile + prepacked_scales_offset(chunk, g, rr));
    const float global_scale = *args.global_scale;

    u32 neighbours[2][PAIRS];
#pragma unroll
    for (u32 t = 0; t < PAIRS; ++t) {
        u32 fragment[4];  // register rr + 2 kk
        Fp16Weights::decode_codes(words[t], fragment);
        neighbours[0][t] = kk ? fragment[2] : fragment[0];
        neighbours[1][t] = kk ? fragment[3] : fragment[1];
    }
    const u32 column = group * GROUP_COLUMNS + chunk * CHUNK_COLUMNS + piece * ELEMENTS;
#pragma unroll
    for (u32 rr = 0; rr < 2; ++rr) {
        const u32 turned = j % 2 ? rotate_left(scale_words[rr], 8) : scale_words[rr];
        const u32 e5m3 = turned >> (j / 2 ? 20 : 4) & 0xFFu;
        const float scale = float_from_low_f16(e5m3 << 7) * 0x1p-7f;
        const u64 row = (u64)row_tile * TILE_ROWS + g + 8 * rr;
        make_piece(args, global_scale, row, column, neighbours[rr], scale);
    }
}

extern "C" __global__ void __launch_bounds__(RECORD_THREADS)
    restored_values(const __grid_constant__ PrepackedValuesArguments args) {
    const u64 i = (u64)blockIdx.x * RECORD_THREADS + threadIdx.x;
    if (i >= args.record_count) return;
    const u8* const record = args.records + i * 16;
    const u32 row = load_word(record), column_and_scale = load_word(record + 4), column = column_and_scale >> 8;
    const float scale = float_from_e4m3(column_and_scale & 0xFFu);
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
        u32 pairs[4], neighbours[4];
        Float16Pairs::decode(load_word(record + 8 + 4 * half), pairs);
        paired_to_natural(pairs, neighbours);
#pragma unroll
        for (u32 t = 0; t < 4; t += PAIRS) {
            make_piece(args, *args.global_scale, row, column * BLOCK + half * 8 + 2 * t, neighbours + t, scale);
        }
    }
}
