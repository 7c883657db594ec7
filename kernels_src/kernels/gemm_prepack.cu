// A weight from the standard layout to the prepacked one and back, byte for byte as fp4rt/prepacked.py does it.
// On entry: any scale layout, any alignment; tiles are written whole, padding included. Unpacking writes the n rows and
// the blocks of k columns; the caller clears the padding before.
//
//   gemm_pack, gemm_unpack       a block of threads is one tile: 16 rows x 256 columns
//   gemm_write_records           a warp is one row: the blocks that a tile cannot give back exactly, in column order
//   gemm_restore_records         a thread is one record
#include "block/prepacked_words.cuh"
#include "kernels/gemm_prepack.cuh"
#include "layout/prepacked.cuh"
#include "layout/scale_layout.cuh"
#include "num/constants.cuh"

constexpr u32 THREADS = 128;  // 4 chunks x 32 lanes
constexpr u32 TILE_BLOCKS = GROUP_COLUMNS / BLOCK;
constexpr u32 ROW_CODE_BYTES = GROUP_COLUMNS / 2;
constexpr u32 SIGN_BIT = 0x80, SIGN_BITS_OF_CODES = 0x88888888u;
constexpr i32 E5M3_BIAS = 22;
constexpr u32 E5M3_NAN = 0xFC;

// 16 codes of a row as two little-endian words.
struct BlockCodes {
    u32 word[2];
};

struct PackedBlock {
    BlockCodes codes;
    u32 scale;     // e4m3
    bool changed;  // the tile will hold something else than these bytes
};

__device__ u32 e5m3_of_e4m3(u32 magnitude) {
    if (magnitude == E4M3_NAN_BYTE) return E5M3_NAN;
    if (magnitude >= 8) return magnitude + (E5M3_BIAS - E4M3_BIAS) * 8;
    if (magnitude == 0) return 0;
    const u32 position = 31 - __clz(magnitude);  // of a subnormal's leading bit
    return (position + E5M3_BIAS - E4M3_BIAS - 2) << 3 | (magnitude << (3 - position) & 7);
}

__device__ u32 e4m3_of_e5m3(u32 byte) {
    if (byte == E5M3_NAN) return E4M3_NAN_BYTE;
    const u32 exponent = byte >> 3;
    if (exponent > E5M3_BIAS - E4M3_BIAS) return byte - (E5M3_BIAS - E4M3_BIAS) * 8;
    return exponent == 0 ? 0 : (8 | (byte & 7)) >> (E5M3_BIAS - E4M3_BIAS + 1 - exponent);
}

__device__ ScaleLayout layout_of(const PrepackArguments& args, u64& across) {
    const ScaleLayout layout = scale_layout(args.layout);
    across = ((u32)args.columns + (1u << layout.tile_columns_log2) - 1) >> layout.tile_columns_log2;
    return layout;
}

__device__ BlockCodes load_codes(const PrepackArguments& args, i64 row, u32 column) {
    const u8* from = args.data + row * args.row_bytes + column * (BLOCK / 2);
    BlockCodes codes = {};
    if (((u64)args.data | (u64)args.row_bytes) % 8 == 0) {
        codes.word[0] = ((const u32*)from)[0];
        codes.word[1] = ((const u32*)from)[1];
    } else {
        for (u32 i = 0; i < BLOCK / 2; ++i) codes.word[i / 4] |= (u32)from[i] << i % 4 * 8;
    }
    const i32 valid = args.k - (i32)(column * BLOCK);  // codes that belong to the matrix
    if (valid < 16) codes.word[1] &= valid <= 8 ? 0 : (1u << (valid - 8) * 4) - 1;
    if (valid < 8) codes.word[0] &= (1u << valid * 4) - 1;
    return codes;
}

__device__ PackedBlock load_block(const PrepackArguments& args, ScaleLayout layout, u64 across, i64 row, u32 column) {
    if (row >= args.n || (i32)(column * BLOCK) >= args.k) return {};
    const BlockCodes codes = load_codes(args, row, column);
    const u32 scale = args.scales[scale_offset(layout, row, column, across)];
    const bool zero = (scale & 0x7F) == 0;
    return {codes, scale, scale >= SIGN_BIT || (zero && (codes.word[0] | codes.word[1]) != 0)};
}

// Two codes, h = 0 in the low nibble, at their bits of a word for fragment register q.
__device__ u32 place_codes(u32 byte, u32 q) {
    const u32 eem = prepacked_code_bit(q), sign = prepacked_sign_bit(q);
    return (byte & 0x07) << eem | (byte & 0x08) << (sign - 3) | (byte & 0x70) << (eem + 12) | (byte & 0x80) << (sign + 9);
}

__device__ u32 take_codes(u32 word, u32 q) {
    const u32 eem = prepacked_code_bit(q), sign = prepacked_sign_bit(q);
    return (word >> eem & 0x07) | (word >> (sign - 3) & 0x08) | (word >> (eem + 12) & 0x70) | (word >> (sign + 9) & 0x80);
}

// Thread 32 chunk + lane: its byte for word j, fragment register q, in 16 rows of 128 bytes.
__device__ u32 code_byte_place(u32 j, u32 q) {
    const u32 chunk = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    return (g + 8 * (q & 1)) * ROW_CODE_BYTES + chunk * (CHUNK_COLUMNS / 2) + j * (BLOCK / 2) + (q >> 1) * 4 + t;
}

// Thread i < 64 writes scale word i: where it lies, and the first of its four blocks in 16 rows of 16 scales.
struct ScaleWordPlace {
    u32 offset, first_scale;
};

__device__ ScaleWordPlace scale_word_place() {
    const u32 chunk = threadIdx.x / 16, row = threadIdx.x % 16;
    return {prepacked_scales_offset(chunk, row % 8, row / 8), row * TILE_BLOCKS + chunk * (CHUNK_COLUMNS / BLOCK)};
}

extern "C" __global__ void __launch_bounds__(THREADS) gemm_pack(PrepackArguments args) {
    __shared__ __align__(8) u8 codes[TILE_ROWS * ROW_CODE_BYTES];
    __shared__ u8 scales[TILE_ROWS * TILE_BLOCKS];
    const u32 row_tiles = (u32)((args.n + TILE_ROWS - 1) / TILE_ROWS);
    const u32 group = blockIdx.x / row_tiles, row_tile = blockIdx.x % row_tiles;
    u64 across;
    const ScaleLayout layout = layout_of(args, across);

    for (u32 i = threadIdx.x; i < TILE_ROWS * TILE_BLOCKS; i += THREADS) {
        const i64 row = (i64)row_tile * TILE_ROWS + i / TILE_BLOCKS;
        PackedBlock block = load_block(args, layout, across, row, group * TILE_BLOCKS + i % TILE_BLOCKS);
        const u32 magnitude = block.scale & 0x7F;
        for (u32 half = 0; half < 2; ++half) {
            const u32 signs = block.scale >= SIGN_BIT ? SIGN_BITS_OF_CODES : 0;  // codes carry the scale's sign
            ((u32*)codes)[i * 2 + half] = magnitude == 0 ? 0 : block.codes.word[half] ^ signs;
        }
        scales[i] = e5m3_of_e4m3(magnitude);
        if (block.changed && args.counts != nullptr) atomicAdd(args.counts + row, 1u);
    }
    __syncthreads();

    u8* const tile = args.tiles + prepacked_tile_offset(group, row_tile, row_tiles);
    u32 words[4];
    for (u32 j = 0; j < 4; ++j) {
        words[j] = 0;
        for (u32 q = 0; q < 4; ++q) words[j] |= place_codes(codes[code_byte_place(j, q)], q);
    }
    *(uint4*)(tile + prepacked_codes_offset(threadIdx.x / 32, threadIdx.x % 32)) =
        make_uint4(words[0], words[1], words[2], words[3]);
    if (threadIdx.x < TILE_ROWS * GROUP_CHUNKS) {
        const ScaleWordPlace place = scale_word_place();
        const u8* four = scales + place.first_scale;
        const u32 odd = (u32)four[1] << 4 | (u32)four[3] << 20;
        *(u32*)(tile + place.offset) = (u32)four[0] << 4 | (u32)four[2] << 20 | __funnelshift_l(odd, odd, 24);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) gemm_unpack(PrepackArguments args) {
    __shared__ __align__(8) u8 codes[TILE_ROWS * ROW_CODE_BYTES];
    __shared__ u8 scales[TILE_ROWS * TILE_BLOCKS];
    const u32 row_tiles = (u32)((args.n + TILE_ROWS - 1) / TILE_ROWS);
    const u32 group = blockIdx.x / row_tiles, row_tile = blockIdx.x % row_tiles;
    u64 across;
    const ScaleLayout layout = layout_of(args, across);

    const u8* const tile = args.tiles + prepacked_tile_offset(group, row_tile, row_tiles);
    for (u32 j = 0; j < 4; ++j) {
        const u32 word = load_word(tile + prepacked_codes_offset(threadIdx.x / 32, threadIdx.x % 32) + 4 * j);
        for (u32 q = 0; q < 4; ++q) codes[code_byte_place(j, q)] = take_codes(word, q);
    }
    if (threadIdx.x < TILE_ROWS * GROUP_CHUNKS) {
        const ScaleWordPlace place = scale_word_place();
        const u32 word = load_word(tile + place.offset), turned = __funnelshift_l(word, word, 8);
        u8* four = scales + place.first_scale;
        four[0] = word >> 4, four[1] = turned >> 4, four[2] = word >> 20, four[3] = turned >> 20;
    }
    __syncthreads();

    for (u32 i = threadIdx.x; i < TILE_ROWS * TILE_BLOCKS; i += THREADS) {
        const i64 row = (i64)row_tile * TILE_ROWS + i / TILE_BLOCKS;
        const u32 column = group * TILE_BLOCKS + i % TILE_BLOCKS;
        if (row >= args.n || (i32)(column * BLOCK) >= args.k) continue;
        u8* const to = args.data + row * args.row_bytes + column * (BLOCK / 2);
        for (u32 byte = 0; byte < BLOCK / 2; ++byte) to[byte] = codes[i * (BLOCK / 2) + byte];
        args.scales[scale_offset(layout, row, column, across)] = e4m3_of_e5m3(scales[i]);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) gemm_write_records(PrepackArguments args) {
    const u32 lane = threadIdx.x % 32, columns = (args.k + BLOCK - 1) / BLOCK;
    const i64 row = (i64)blockIdx.x * (THREADS / 32) + threadIdx.x / 32;
    if (row >= args.n) return;
    u64 across;
    const ScaleLayout layout = layout_of(args, across);
    u32 next = args.counts[row];
    for (u32 first = 0; first < columns; first += 32) {
        const PackedBlock block = load_block(args, layout, across, row, first + lane);
        const u32 changed = __ballot_sync(~0u, block.changed);
        if (block.changed) {
            u32* const record = (u32*)args.records + (u64)(next + __popc(changed & ((1u << lane) - 1))) * 4;
            record[0] = (u32)row;
            record[1] = (first + lane) << 8 | block.scale;
            record[2] = block.codes.word[0];
            record[3] = block.codes.word[1];
        }
        next += __popc(changed);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) gemm_restore_records(PrepackArguments args) {
    const u32 i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= args.record_count) return;
    u64 across;
    const ScaleLayout layout = layout_of(args, across);
    const u8* const record = args.records + (u64)i * 16;
    const u32 row = load_word(record), column_and_scale = load_word(record + 4), column = column_and_scale >> 8;
    if (row >= args.n || (i64)column * BLOCK >= args.k) return;  // a weight that comes from a file may lie
    u8* const to = args.data + row * args.row_bytes + column * (BLOCK / 2);
    for (u32 byte = 0; byte < BLOCK / 2; ++byte) to[byte] = load_1(record + 8 + byte);
    args.scales[scale_offset(layout, row, column, across)] = column_and_scale & 0xFF;
}
