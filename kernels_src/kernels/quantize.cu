// Quantize a matrix with aligned rows: scales, codes and all padding in one pass at the memory's speed.
// On entry: rows of x start at multiples of 16 bytes, n is a multiple of 16, data is aligned to 8 bytes, scales to 16.
// Reads fp16, bf16 or fp32 rows (INPUT); writes data row-major and scales in LAYOUT (0 linear, 1 128x4, 2 8x4).
// The rules are those of fp4rt/format.py; everything else goes to quantize_any.cu.
//
// A warp takes RUN neighbouring blocks of one row, a lane every 32nd of them: long runs of one row are what the memory
// likes. The warps of a CTA take the rows whose scales lie side by side in a tile, {r, r + 1} + {0, 32, 64, 96} in 128x4
// and a whole tile's in 8x4, so that the CTA, through shared memory, writes whole sectors of scales:
//
//   PIECE_BYTES of a tile    row of warp 0, columns 0..3 | row of warp 1, columns 0..3 | ... | row of warp 7
#include "block/global_scale.cuh"
#include "block/quantize_block.cuh"
#include "kernels/quantize_arguments.cuh"
#include "layout/scale_layout.cuh"
#include "ptx/cache_policy.cuh"
#include "ptx/global_memory.cuh"

#if __CUDA_ARCH__ < 800
#error "quantize.cu is built for sm_80 and newer"
#endif

constexpr ScaleLayout SCALES = LAYOUT == 0 ? LAYOUT_LINEAR : LAYOUT == 1 ? LAYOUT_128X4 : LAYOUT_8X4;
constexpr bool TILED = LAYOUT != 0;
constexpr u32 WARP = 32, ROWS = 8, THREADS = ROWS * WARP;
constexpr u32 RUN = WARP * BLOCKS_PER_LANE;
constexpr u32 BLOCK_BYTES = BLOCK * Elements<INPUT>::BYTES, BLOCK_WORDS = Elements<INPUT>::WORDS;
constexpr u32 CODE_BYTES = BLOCK / CODES_PER_BYTE;
constexpr u32 TILE_COLUMNS = 1u << SCALES.tile_columns_log2;
constexpr u32 PIECE_BYTES = ROWS * TILE_COLUMNS;  // of a tile, that a CTA writes
constexpr u32 PIECES = TILED ? (1u << (SCALES.tile_rows_log2 + SCALES.tile_columns_log2)) / PIECE_BYTES : 1;
#ifndef STRIPS_ALONG_Y
#define STRIPS_ALONG_Y 65535u  // what a grid may be high
#endif

// Where a warp's run begins: row, block column, and which piece of which row of tiles its CTA writes.
struct Run {
    u32 row, column, tile_row, piece;
};

__device__ __forceinline__ Run run_of(u32 strip, u32 warp) {
    const u32 tile_row = strip / PIECES, piece = strip % PIECES;
    const u32 row = TILED ? (tile_row << SCALES.tile_rows_log2) + row_of_byte(SCALES, piece * PIECE_BYTES + warp * TILE_COLUMNS)
                          : strip * ROWS + warp;
    return {row, blockIdx.x * RUN, tile_row, piece};
}

__device__ __forceinline__ void load_block(u32* word, const u8* from) {
#pragma unroll
    for (u32 i = 0; i < BLOCK_WORDS; i += 4) load_16(from + 4 * i, word + i);
}

__device__ __forceinline__ void load_block(u32* word, const u8* from, u64 policy) {
#pragma unroll
    for (u32 i = 0; i < BLOCK_WORDS; i += 4) load_16_policy(from + 4 * i, word + i, policy);
}

// Zeros where x has no such block.
__device__ __forceinline__ void load_block_if(bool there, u32* word, const u8* from) {
#pragma unroll
    for (u32 i = 0; i < BLOCK_WORDS; ++i) word[i] = 0;
    if (there) load_block(word, from);
}

// The CTA's scales, tile by tile, to where they lie: 16 bytes a thread.
__device__ __forceinline__ void store_tiles(const u8* stage, const Run& run, const QuantizeArguments& a) {
    constexpr u32 WIDTH = 16, PARTS = TILED ? PIECE_BYTES / WIDTH : 1, TILES = RUN / TILE_COLUMNS;
    const u32 tile = threadIdx.x / PARTS, part = threadIdx.x % PARTS, tile_column = run.column / TILE_COLUMNS + tile;
    if (tile >= TILES || tile_column >= a.across) return;
    const u64 at = ((u64)run.tile_row * a.across + tile_column) << tile_bytes_log2(SCALES);
    store_16(a.scales + at + run.piece * PIECE_BYTES + part * WIDTH, (const u32*)(stage + threadIdx.x * WIDTH));
}

extern "C" __global__ void __launch_bounds__(THREADS, CTAS_PER_SM) quantize(const __grid_constant__ QuantizeArguments a) {
    __shared__ __align__(16) u8 stage[TILED ? ROWS * RUN : 16];
    const u32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const u32 strip = blockIdx.z * STRIPS_ALONG_Y + blockIdx.y;
    if (strip >= a.strips) return;
    const Run run = run_of(a.backwards ? a.strips - 1 - strip : strip, warp);
    const u32 column = run.column + lane;
    const bool has_row = run.row < a.m;
    const u32 input_end = has_row ? a.input_columns : 0, columns_end = has_row ? a.columns : 0;

    const float global_scale = read_global_scale(a.global_scale, a.global_scale_value);
    const u8* from = a.x + ((i64)run.row * a.row_stride + (u64)column * BLOCK_BYTES);
    u32 word[BLOCKS_PER_LANE][BLOCK_WORDS];
    const bool whole = run.column + RUN <= input_end;  // almost always
    if (whole && a.read_once) {
        const u64 policy = evict_first_policy();
#pragma unroll
        for (u32 k = 0; k < BLOCKS_PER_LANE; ++k) load_block(word[k], from + k * (WARP * BLOCK_BYTES), policy);
    } else if (whole) {
#pragma unroll
        for (u32 k = 0; k < BLOCKS_PER_LANE; ++k) load_block(word[k], from + k * (WARP * BLOCK_BYTES));
    } else {
#pragma unroll
        for (u32 k = 0; k < BLOCKS_PER_LANE; ++k) {
            load_block_if(column + k * WARP < input_end, word[k], from + k * (WARP * BLOCK_BYTES));
        }
    }
    keep_global_scale(a.kept_global_scale, global_scale, strip == 0 && blockIdx.x == 0 && threadIdx.x == 0);

    u8* data = a.data + ((u64)run.row * a.columns + column) * CODE_BYTES;
    u8* linear_scales = a.scales + ((u64)run.row * a.columns + column);
    u8* staged_scales = stage + (lane / TILE_COLUMNS) * PIECE_BYTES + warp * TILE_COLUMNS + lane % TILE_COLUMNS;
    const auto store = [&](u32 k, u32 scale_byte, Codes codes) {
        const bool there = column + k * WARP < columns_end;
        if (there) store_8(data + k * (WARP * CODE_BYTES), codes.low, codes.high);
        if (TILED) {
            staged_scales[k * (WARP / TILE_COLUMNS * PIECE_BYTES)] = (u8)scale_byte;
        } else if (there) {
            store_1(linear_scales + k * WARP, scale_byte);
        }
    };

    if (is_ordinary(global_scale)) {
        const float inverse = inverse_for_factors(global_scale);
        // One block's instructions serve all: the fewer there are, the sooner the first CTAs have fetched them.
#pragma unroll 1
        for (u32 k = 0; k < BLOCKS_PER_LANE; ++k) {
            const float t = scaled_maximum<INPUT>(word[0], global_scale);                   // 1, 2
            const u32 scale_byte = e4m3x2_from_floats(t, 0.0f) & 0xFFu;                     // 3
            store(k, scale_byte, quantize_ordinary<INPUT>(word[0], scale_byte, inverse));  // 4, 5
#pragma unroll
            for (u32 next = 1; next < BLOCKS_PER_LANE; ++next) {
#pragma unroll
                for (u32 i = 0; i < BLOCK_WORDS; ++i) word[next - 1][i] = word[next][i];
            }
        }
    } else {
#pragma unroll 1
        for (u32 k = 0; k < BLOCKS_PER_LANE; ++k) {
            // Loaded again: an index known only at run time would send the registers to memory.
            const bool there = column + k * WARP < input_end;
            load_block_if(there, word[0], from + k * (WARP * BLOCK_BYTES));
            Codes codes = {0u, 0u};
            const float t = scaled_maximum<INPUT>(word[0], global_scale);
            const u32 scale_byte = there ? quantize_extreme<INPUT>(word[0], t, global_scale, codes) : 0u;
            store(k, scale_byte, codes);
        }
    }
    if (TILED) {
        __syncthreads();
        store_tiles(stage, run, a);
    }
}
