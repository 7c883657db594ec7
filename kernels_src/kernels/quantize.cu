// Quantize a large matrix: scales, codes and all padding in one pass at the memory's speed.
// On entry: rows of x start at multiples of 16 bytes, n is a multiple of 16, data is aligned to 8 bytes.
// Reads fp16, bf16 or fp32 rows (INPUT); writes data row-major and scales in LAYOUT (0 linear, 1 128x4, 2 8x4).
// The rules are those of fp4rt/format.py; everything else goes to quantize_any.cu.
//
// A warp owns 32 scale bytes that lie side by side in each of BLOCKS_PER_LANE neighbouring tiles, a lane one of them:
// so scales are stored as whole 32-byte sectors without exchanging anything between lanes. In 128x4 these are rows
// {r, r + 1} + {0, 32, 64, 96} x 4 block columns; in 8x4 a whole tile; in linear 32 neighbours of a row.
#include "block/global_scale.cuh"
#include "block/quantize_block.cuh"
#include "kernels/quantize_arguments.cuh"
#include "layout/scale_layout.cuh"
#include "ptx/global_memory.cuh"

#if __CUDA_ARCH__ < 800
#error "quantize.cu is built for sm_80 and newer"
#endif

constexpr ScaleLayout SCALES = LAYOUT == 0 ? LAYOUT_LINEAR : LAYOUT == 1 ? LAYOUT_128X4 : LAYOUT_8X4;
constexpr u32 WARP = 32;
constexpr u32 PIECES = LAYOUT == 0 ? 1 : (1u << (SCALES.tile_rows_log2 + SCALES.tile_columns_log2)) / WARP;
constexpr u32 COLUMN_STEP = LAYOUT == 0 ? WARP : 1u << SCALES.tile_columns_log2;  // from one block of a lane to its next
constexpr u32 SCALE_STEP = LAYOUT == 0 ? WARP : 1u << (SCALES.tile_rows_log2 + SCALES.tile_columns_log2);
constexpr u32 BLOCK_BYTES = BLOCK * Elements<INPUT>::BYTES, BLOCK_WORDS = Elements<INPUT>::WORDS;
constexpr u32 CODE_BYTES = BLOCK / CODES_PER_BYTE;

struct LaneBlocks {
    u32 row, column;  // of the first block
    u64 scale;        // its scale's offset
};

__device__ __forceinline__ LaneBlocks blocks_of(u32 warp, u32 lane, const QuantizeArguments& a) {
    const u32 piece = warp % PIECES, strip = warp / PIECES;  // the warps of a strip cover whole tiles
    const u32 tile_row = divide(strip, a.groups_magic), group = strip - tile_row * a.groups;
    if constexpr (LAYOUT == 0) {
        const u32 column = group * (WARP * BLOCKS_PER_LANE) + lane;
        return {tile_row, column, (u64)tile_row * a.columns + column};
    } else {
        const u32 byte = piece * WARP + lane, tile_column = group * BLOCKS_PER_LANE;
        return {(tile_row << SCALES.tile_rows_log2) + row_of_byte(SCALES, byte),
                (tile_column << SCALES.tile_columns_log2) + column_of_byte(SCALES, byte),
                (((u64)tile_row * a.across + tile_column) << tile_bytes_log2(SCALES)) + byte};
    }
}

__device__ __forceinline__ bool has_input(const LaneBlocks& at, u32 k, const QuantizeArguments& a) {
    return at.row < a.m && at.column + k * COLUMN_STEP < a.input_columns;
}

// The lane's block k; zeros where x has none.
__device__ __forceinline__ void load_block(u32* word, const LaneBlocks& at, u32 k, const QuantizeArguments& a) {
    const u8* from = a.x + ((i64)at.row * a.row_stride + (u64)at.column * BLOCK_BYTES) + k * (COLUMN_STEP * BLOCK_BYTES);
#pragma unroll
    for (u32 i = 0; i < BLOCK_WORDS; ++i) word[i] = 0;
    if (has_input(at, k, a)) {
#pragma unroll
        for (u32 i = 0; i < BLOCK_WORDS; i += 4) load_16(from + i * 4, word + i);
    }
}

__device__ __forceinline__ void store_block(const LaneBlocks& at, u32 k, u32 scale_byte, Codes codes,
                                            const QuantizeArguments& a) {
    const u32 column = at.column + k * COLUMN_STEP;
    u8* to = a.data + ((u64)at.row * a.columns + at.column) * CODE_BYTES;
    if (at.row < a.m && column < a.columns) store_8(to + k * COLUMN_STEP * CODE_BYTES, codes.low, codes.high);
    if (column >> SCALES.tile_columns_log2 < a.across) store_1(a.scales + at.scale + k * SCALE_STEP, scale_byte);
}

extern "C" __global__ void __launch_bounds__(THREADS, CTAS_PER_SM) quantize(const __grid_constant__ QuantizeArguments a) {
    const u32 index = blockIdx.x * (THREADS / WARP) + threadIdx.x / WARP;
    if (index >= a.warps) return;
    const LaneBlocks at = blocks_of(a.backwards ? a.warps - 1 - index : index, threadIdx.x % WARP, a);

    u32 word[BLOCKS_PER_LANE][BLOCK_WORDS];
#pragma unroll
    for (u32 k = 0; k < BLOCKS_PER_LANE; ++k) load_block(word[k], at, k, a);
    const float global_scale = read_global_scale(a.global_scale, a.global_scale_value);
    keep_global_scale(a.kept_global_scale, global_scale, blockIdx.x == 0 && threadIdx.x == 0);

    if (is_ordinary(global_scale)) {
        const float inverse = inverse_for_factors(global_scale);
        float t[BLOCKS_PER_LANE + 1] = {};
#pragma unroll
        for (u32 k = 0; k < BLOCKS_PER_LANE; ++k) t[k] = scaled_maximum<INPUT>(word[k], global_scale);  // 1, 2
#pragma unroll
        for (u32 k = 0; k < BLOCKS_PER_LANE; ++k) {
            const u32 scale_bytes = e4m3x2_from_floats(t[k & ~1u], t[k | 1u]);  // 3
            const u32 scale_byte = scale_bytes >> 8 * (k & 1u) & 0xFFu;
            store_block(at, k, scale_byte, quantize_ordinary<INPUT>(word[k], scale_byte, inverse), a);  // 4, 5
        }
    } else {
#pragma unroll 1
        for (u32 k = 0; k < BLOCKS_PER_LANE; ++k) {
            // Loaded again: an index known only at run time would send the registers to memory.
            load_block(word[0], at, k, a);
            Codes codes = {0u, 0u};
            const float t = scaled_maximum<INPUT>(word[0], global_scale);
            const u32 scale_byte = has_input(at, k, a) ? quantize_extreme<INPUT>(word[0], t, global_scale, codes) : 0u;
            store_block(at, k, scale_byte, codes, a);
        }
    }
}
