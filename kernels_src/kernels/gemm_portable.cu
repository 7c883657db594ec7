// D = alpha * A @ B^T + bias for block-scaled weights on every architecture from sm_80: mma.sync m16n8k16, fp32 sums.
//
// On entry: m >= 1; the alignments named by the macros hold. Weights are the tensor cores' 16-row operand, tokens the
// 8-column one, so one token costs eight columns and not sixteen rows. Codes become fp16 or bf16 in registers, exactly.
// Reads any scale layout through the arguments; padding is never read. Same inputs, same bits: no atomics, every sum in
// one fixed order. Rule: fp4rt/format.py, "Dequantize"; tiles: fp4rt/cuda/gemm/portable.py.
//
// A block takes BLOCK_N rows of B and BLOCK_M rows of A and walks k in stages of BLOCK_K, STAGES - 1 of them on their
// way (cp.async). Its warps split BLOCK_N (WARPS_N) and each stage's columns (WARPS_K, summed at the end through shared
// memory). With splits > 1 several blocks share a tile's k and leave fp32 sums in `partial`.
#include "block/gemm_epilogue.cuh"
#include "block/half_activations.cuh"
#include "block/nvfp4_activations.cuh"
#include "block/prepacked_weights.cuh"
#include "block/standard_weights.cuh"
#include "ptx/blocks.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#error "gemm_portable.cu is built for sm_80 and newer"
#endif

// Defined by the launcher: A_KIND, A_ALIGN, A_SCALE_ALIGN, B_KIND, B_ALIGN, B_SCALE_ALIGN, WARPS_N, WARPS_K,
// ROW_TILES, TOKEN_TILES, PIECES, STAGES, BLOCKS_PER_SM, SHARED_BYTES.

struct Tile {
    static constexpr i32 warps_n = WARPS_N, warps_k = WARPS_K;
    static constexpr i32 warps = warps_n * warps_k, threads = 32 * warps;
    static constexpr i32 row_tiles = ROW_TILES, token_tiles = TOKEN_TILES, pieces = PIECES;
    static constexpr i32 warp_rows = 16 * row_tiles;
    static constexpr i32 block_n = warp_rows * warps_n, block_m = 8 * token_tiles;
    static constexpr i32 block_k = 128 * pieces * warps_k;

    i32 thread, lane, warp, warp_n, warp_k;

    __device__ __forceinline__ explicit Tile(i32 index) : thread(index), lane(index % 32), warp(index / 32) {
        warp_n = warp % warps_n;
        warp_k = warp / warps_n;
    }
};

constexpr i32 MMA_TYPE = A_KIND == BFLOAT16 ? BFLOAT16 : FLOAT16;  // what codes become
template <i32 KIND>
struct WeightsOfKind {
    using Type = StandardWeights<Tile, MMA_TYPE, B_ALIGN, B_SCALE_ALIGN>;
};
template <>
struct WeightsOfKind<PREPACKED> {
    using Type = PrepackedWeights<Tile, MMA_TYPE, B_ALIGN>;
};
using Weights = WeightsOfKind<B_KIND>::Type;
using Pairs = Weights::Pairs;
static_assert(A_KIND != NVFP4 || !Weights::NATURAL_ORDER, "decoded activations have the order of standard weights");

template <i32 KIND>
struct ActivationsOfKind {
    using Type = HalfActivations<Tile, A_ALIGN, Weights::NATURAL_ORDER>;
    static constexpr float SUM_SCALE = Pairs::PRODUCT_INVERSE;
};
template <>
struct ActivationsOfKind<NVFP4> {
    using Type = Nvfp4Activations<Tile, A_ALIGN, A_SCALE_ALIGN>;
    static constexpr float SUM_SCALE = Pairs::PRODUCT_INVERSE * Float16Pairs::PRODUCT_INVERSE;
};
using Activations = ActivationsOfKind<A_KIND>::Type;
constexpr float SUM_SCALE = ActivationsOfKind<A_KIND>::SUM_SCALE;

constexpr i32 STAGE_BYTES = Weights::STAGE_BYTES + Activations::STAGE_BYTES;
constexpr i32 SUM_STRIDE = Tile::block_n + 4;  // floats from one token's sums to the next one's; see the epilogue
constexpr i32 SUM_BYTES = Tile::warps_k * Tile::block_m * SUM_STRIDE * 4;
static_assert(SHARED_BYTES >= STAGES * STAGE_BYTES && SHARED_BYTES >= SUM_BYTES, "the launcher's shared memory plan");

typedef float Sums[ROW_TILES][TOKEN_TILES][4];

// Multiplies one stage. `between(i)` is called after step i of the first piece: copies that are issued among the
// products overlap with them, while issued all at once they would keep every warp waiting for the same unit.
template <typename Between>
__device__ __forceinline__ void multiply_stage(const Weights& weights, const Activations& activations, const Tile& at,
                                               u32 weight_stage, u32 activation_stage, Sums& sums, Between between) {
#pragma unroll
    for (i32 p = 0; p < PIECES; ++p) {
        const Weights::Piece codes = weights.read(weight_stage, p, at);
        const Activations::Piece tokens = activations.read(activation_stage, p);
#pragma unroll
        for (i32 i = 0; i < 4; ++i) {
            u32 b[TOKEN_TILES][4];
            activations.fragments(tokens, i, b);
#pragma unroll
            for (i32 row_tile = 0; row_tile < ROW_TILES; ++row_tile) {
                u32 a[2][4];
                Weights::fragments(codes, row_tile, i, a);
#pragma unroll
                for (i32 step = 0; step < 2; ++step) {
#pragma unroll
                    for (i32 tile = 0; tile < TOKEN_TILES; ++tile)
                        Pairs::mma(sums[row_tile][tile], a[step], b[tile][2 * step], b[tile][2 * step + 1]);
                }
            }
            if (p == 0) between(i);
        }
    }
}

// Sums of a warp to shared memory, token by token: [warp k][token][row of B]. A lane's tokens 2t are 8 banks apart
// (2 * SUM_STRIDE = 8 mod 32), its rows g 1 bank: no two lanes of a store meet.
__device__ __forceinline__ void spread_sums(u32 shared, const Tile& at, const Sums& sums) {
    const i32 g = at.lane / 4, t = at.lane % 4;
    const i32 token = (at.warp_k * Tile::block_m + 2 * t) * SUM_STRIDE;
    const u32 to = shared + 4 * (token + at.warp_n * Tile::warp_rows + g);
#pragma unroll
    for (i32 row_tile = 0; row_tile < ROW_TILES; ++row_tile) {
#pragma unroll
        for (i32 tile = 0; tile < TOKEN_TILES; ++tile) {
#pragma unroll
            for (i32 i = 0; i < 4; ++i) {
                const i32 offset = (tile * 8 + i % 2) * SUM_STRIDE + row_tile * 16 + i / 2 * 8;
                store_shared_float(to + 4 * offset, sums[row_tile][tile][i] * SUM_SCALE);
            }
        }
    }
}

// From shared memory to `out` or `partial`, consecutive threads on consecutive elements of a row of D.
__device__ __forceinline__ void store_sums(const GemmArguments& args, u32 shared, const Tile& at, i64 first_token,
                                           i64 first_row, i64 split, Alpha alpha) {
    for (i32 index = at.thread; index < Tile::block_m * Tile::block_n; index += Tile::threads) {
        const i32 token = index / Tile::block_n, row = index % Tile::block_n;
        if (first_token + token >= args.m) break;
        if (first_row + row >= args.n) continue;
        float sum = load_shared_float(shared + 4 * (token * SUM_STRIDE + row));
#pragma unroll
        for (i32 k_group = 1; k_group < Tile::warps_k; ++k_group)
            sum += load_shared_float(shared + 4 * ((k_group * Tile::block_m + token) * SUM_STRIDE + row));
        if (args.partial == nullptr) {
            store_result(args, first_token + token, first_row + row, sum, alpha);
        } else {
            args.partial[(split * args.m + first_token + token) * args.n + first_row + row] = sum;
        }
    }
}

extern "C" __global__ void __launch_bounds__(Tile::threads, BLOCKS_PER_SM)
    gemm_portable(const __grid_constant__ GemmArguments args) {
    extern __shared__ __align__(128) u8 shared_memory[];
    const u32 shared = shared_address(shared_memory);
    const Tile at(threadIdx.x);

    // Which tile: tokens vary fastest, so that blocks that run together share rows of B; parts of k slowest.
    const u32 tiles_m = (u32)((args.m + Tile::block_m - 1) / Tile::block_m);
    const u32 tiles_n = (u32)((args.n + Tile::block_n - 1) / Tile::block_n);
    const u32 split = blockIdx.x / (tiles_m * tiles_n), tile = blockIdx.x % (tiles_m * tiles_n);
    const i64 first_token = (i64)(tile % tiles_m) * Tile::block_m, first_row = (i64)(tile / tiles_m) * Tile::block_n;

    // Which stages of k: whole ones are `full`, the last one of all may not be.
    const u32 all_stages = (u32)(args.k + Tile::block_k - 1) / Tile::block_k, splits = (u32)args.splits;
    const u32 begin = all_stages * split / splits, stages = all_stages * (split + 1) / splits - begin;
    const u32 full = min(stages, (u32)args.k / Tile::block_k - begin);

    Weights weights(args, at, first_row, begin * Tile::block_k);
    Activations activations(args, at, first_token, begin * Tile::block_k);
    constexpr u32 RING_BYTES = STAGES * STAGE_BYTES;
    u32 to = shared, from = shared;  // where the next stage goes, and where the one to multiply lies
    const auto next = [&](u32 place) { return place + STAGE_BYTES == shared + RING_BYTES ? shared : place + STAGE_BYTES; };
    const auto load_weights = [&](u32 stage) {
        if (stage < full) {
            weights.template load<true>(to, at);
        } else if (stage < stages) {
            weights.template load<false>(to, at);
        }
    };
    const auto load_activations = [&](u32 stage) {
        if (stage < full) {
            activations.template load<true>(to + Weights::STAGE_BYTES, at);
        } else if (stage < stages) {
            activations.template load<false>(to + Weights::STAGE_BYTES, at);
        }
        to = next(to);
        cp_async_commit();
    };

#pragma unroll 1
    for (u32 stage = 0; stage < STAGES - 1; ++stage) {
        load_weights(stage);
        load_activations(stage);
    }
    start_dependents();  // the addition of parts, where k is split
    const Alpha alpha = args.partial == nullptr ? alpha_factors(args, gemm_alpha(args)) : Alpha{};
    Sums sums = {};
#pragma unroll 1
    for (u32 stage = 0; stage < stages; ++stage) {
        cp_async_wait<STAGES - 2>();
        __syncthreads();  // this stage has landed for all, and all are done with the one that is filled next
        multiply_stage(weights, activations, at, from, from + Weights::STAGE_BYTES, sums, [&](i32 step) {
            if (step == 0) load_weights(stage + STAGES - 1);
            if (step == 1) load_activations(stage + STAGES - 1);
        });
        from = next(from);
    }
    cp_async_wait<0>();
    __syncthreads();
    spread_sums(shared, at, sums);
    __syncthreads();
    store_sums(args, shared, at, first_token, first_row, split, alpha);
}
