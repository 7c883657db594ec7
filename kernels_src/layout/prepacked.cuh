// Where a prepacked weight lies: data[k / 256][n / 16][2304], drawn and explained in fp4rt/prepacked.py.
//
//   tile     4 chunks of 64 columns x 32 lanes x 16 bytes of codes, then 256 bytes of scales
//   codes    lane 4 g + t of a chunk has 4 words; word j: rows g and g + 8, columns 16 j + {2t, 2t+1, 2t+8, 2t+9}
//            of these, register q = row half + 2 * column half takes two, at the same bits of the two half-words
//   scales   one word per row and chunk: the e5m3 bytes of its four blocks
#pragma once
#include "num/integers.cuh"

constexpr u32 TILE_ROWS = 16;
constexpr u32 GROUP_COLUMNS = 256;  // a column group: the columns of one tile
constexpr u32 CHUNK_COLUMNS = 64;
constexpr u32 GROUP_CHUNKS = GROUP_COLUMNS / CHUNK_COLUMNS;
constexpr u32 CHUNK_CODE_BYTES = TILE_ROWS * CHUNK_COLUMNS / 2;
constexpr u32 TILE_CODE_BYTES = GROUP_CHUNKS * CHUNK_CODE_BYTES;
constexpr u32 TILE_BYTES = TILE_CODE_BYTES + TILE_ROWS * GROUP_COLUMNS / 16;

__device__ __forceinline__ u64 prepacked_tile_offset(u32 group, u32 tile, u32 row_tiles) {
    return ((u64)group * row_tiles + tile) * TILE_BYTES;
}

// In a tile: the 16 bytes of codes that a lane has in a chunk.
__device__ __forceinline__ u32 prepacked_codes_offset(u32 chunk, u32 lane) {
    return chunk * CHUNK_CODE_BYTES + lane * 16;
}

// In a tile: the scale words of rows g and g + 8 (8 bytes) in a chunk, and of row g + 8 * high alone.
//
//   chunk   0            1                   2            3
//   byte    16 g + 0..7  16 g + 8..15        128 + 16 g   128 + 16 g + 8        e.g. g = 3, chunk 3: 2048 + 184
__device__ __forceinline__ u32 prepacked_scales_offset(u32 chunk, u32 g, u32 high = 0) {
    return TILE_CODE_BYTES + (chunk >> 1) * 128 + g * 16 + (chunk & 1) * 8 + high * 4;
}

// In a half-word: the lowest of the three exponent and mantissa bits of register q's code, and its sign.
__device__ __forceinline__ u32 prepacked_code_bit(u32 q) { return 0x9036u >> 4 * q & 15; }

__device__ __forceinline__ u32 prepacked_sign_bit(u32 q) { return 0xDECFu >> 4 * q & 15; }
