// D[m, n] = alpha * A[m, k] @ B[n, k]^T + bias for few tokens (m <= 8 TOKEN_TILES): bound by reading the weights.
// On entry: B prepacked (layout/prepacked.cuh); A behind a tensor map with boxes of 8 TOKEN_TILES x 64; sm_90.
//
// One producer warp keeps STAGES stages of weights and activations on their way; ROW_WARPS x K_WARPS consumer warps
// decode weights in registers and multiply with mma.sync, weights as the row operand. A warp owns WARP_TILES row
// tiles, which share its activation fragments, and every K_WARPS-th chunk of 64 columns; the K_WARPS sums meet in
// shared memory at the end, always in the same order. No barrier in the loop but the stages' own.
//
//   stage      [STAGE_GROUPS][ROW_TILES][2304] weights, then [4 STAGE_GROUPS][8 TOKEN_TILES tokens][128] activations
//   beyond the last column group: that group again, times activations that the copy engine fills with 0
//
// Compile-time choices (fp4rt/cuda/gemm/hopper.py): A_TYPE, TOKEN_TILES, ROW_TILES, ROW_WARPS, K_WARPS (a power of
// two), WARP_TILES, STAGE_GROUPS, STAGES, CONSUMER_REGISTERS (0: as compiled), and where things lie in shared memory:
// ACTIVATIONS_AT (in a stage), STAGE_BYTES, BARRIERS_AT, REDUCTION_AT.
#include "block/prepacked_work.cuh"
#include "block/result_writer.cuh"
#include "kernels/gemm_prepacked.cuh"
#include "mma/prepacked_fragments.cuh"
#include "ptx/blocks.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared_memory.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#error "gemm_decode.cu is built for sm_90 and newer"
#endif

using Weights = WeightsFor<A_TYPE>;

constexpr u32 CONSUMER_WARPS = ROW_WARPS * K_WARPS;
constexpr u32 PRODUCER_REGISTERS = 32;
constexpr u32 STAGE_CHUNKS = STAGE_GROUPS * GROUP_CHUNKS;
constexpr u32 WARP_CHUNKS = STAGE_CHUNKS / K_WARPS;
constexpr u32 GROUP_BYTES = ROW_TILES * TILE_BYTES;
constexpr u32 TOKEN_TILE_BYTES = 8 * CHUNK_COLUMNS * 2;
constexpr u32 CHUNK_TOKEN_BYTES = TOKEN_TILES * TOKEN_TILE_BYTES;
constexpr u32 REDUCED_SUMS = TOKEN_TILES * WARP_TILES;  // 16 x 8 tiles of sums a warp
constexpr u32 START_BARRIER = 1, REDUCTION_BARRIER = 2;

extern "C" __global__ void __launch_bounds__(32 * (CONSUMER_WARPS + 4), 1)
gemm_decode(const __grid_constant__ PrepackedGemmArguments args) {
    extern __shared__ __align__(1024) u8 shared[];
    const u32 base = shared_address(shared);
    const u32 full = base + BARRIERS_AT, empty = full + STAGES * MBARRIER_BYTES;
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 row_tiles = (u32)((args.gemm.n + TILE_ROWS - 1) / TILE_ROWS);
    const u32 groups = (args.gemm.k + GROUP_COLUMNS - 1) / GROUP_COLUMNS;
    const u32 units = (groups + STAGE_GROUPS - 1) / STAGE_GROUPS;
    const u32 items = prepacked_work_items<ROW_TILES>(row_tiles, args.gemm.splits);

    if (warp >= CONSUMER_WARPS) {
        if constexpr (CONSUMER_REGISTERS != 0) lower_registers<PRODUCER_REGISTERS>();
        if (warp > CONSUMER_WARPS) return;
        if (lane == 0) {
            tensor_map_prefetch(&args.activations);
            for (u32 i = 0; i < STAGES; ++i) {
                mbarrier_init(full + i * MBARRIER_BYTES, 1);
                mbarrier_init(empty + i * MBARRIER_BYTES, CONSUMER_WARPS);
            }
            mbarrier_fence_init();
        }
        __syncwarp();
        named_barrier_arrive(START_BARRIER, 32 * (CONSUMER_WARPS + 1));
        start_dependents();

        const u64 read_once = evict_first_policy();
        const auto load_weights = [&](const PrepackedWork& work, u32 unit, u32 stage) {
            const u32 barrier = full + stage * MBARRIER_BYTES;
            if (lane == 0) {
                mbarrier_arrive_expect(barrier, STAGE_GROUPS * work.tiles * TILE_BYTES + STAGE_CHUNKS * CHUNK_TOKEN_BYTES);
            }
            __syncwarp();
            if (lane < STAGE_GROUPS) {
                const u32 group = min(unit * STAGE_GROUPS + lane, groups - 1);
                bulk_load_policy(base + stage * STAGE_BYTES + lane * GROUP_BYTES,
                                 args.gemm.b + prepacked_tile_offset(group, work.first_tile, row_tiles),
                                 work.tiles * TILE_BYTES, barrier, read_once);
            }
        };
        // The first stages' weights leave before anything is waited for: what the activations may still depend on.
        const PrepackedWork first = prepacked_work<ROW_TILES>(blockIdx.x, row_tiles, units, args.gemm.splits);
        const u32 early = min(STAGES, first.last_unit - first.first_unit);
        for (u32 i = 0; i < early; ++i) load_weights(first, first.first_unit + i, i);
        wait_for_prerequisites();

        u32 stage = 0, parity = 1, unit_count = 0;
        for (u32 item = blockIdx.x; item < items; item += gridDim.x) {
            const PrepackedWork work = prepacked_work<ROW_TILES>(item, row_tiles, units, args.gemm.splits);
            for (u32 unit = work.first_unit; unit < work.last_unit; ++unit, ++unit_count) {
                if (unit_count >= early) {
                    mbarrier_wait(empty + stage * MBARRIER_BYTES, parity);
                    load_weights(work, unit, stage);
                }
                if (lane < STAGE_CHUNKS) {
                    tensor_load(base + stage * STAGE_BYTES + ACTIVATIONS_AT + lane * CHUNK_TOKEN_BYTES, &args.activations,
                                (unit * STAGE_CHUNKS + lane) * CHUNK_COLUMNS, 0, full + stage * MBARRIER_BYTES);
                }
                if (++stage == STAGES) stage = 0, parity ^= 1;
            }
        }
        return;
    }

    named_barrier_sync(START_BARRIER, 32 * (CONSUMER_WARPS + 1));
    if constexpr (CONSUMER_REGISTERS != 0) raise_registers<CONSUMER_REGISTERS>();
    const u32 g = lane / 4, t = lane % 4;
    const u32 row_warp = warp % ROW_WARPS, k_warp = warp / ROW_WARPS;
    const u32 own_tile = row_warp * WARP_TILES;                      // of the block's row tiles
    const u32 read_tile = min(own_tile, (u32)(ROW_TILES - WARP_TILES));  // beyond the last one: read it again
    const float alpha = gemm_alpha(args.gemm);

    // Chunk c of a stage lies at chunk_codes(c): with K_WARPS a power of two, c = i * K_WARPS + k_warp splits into sums.
    const auto chunk_codes = [](u32 c) { return c / GROUP_CHUNKS * GROUP_BYTES + prepacked_codes_offset(c % GROUP_CHUNKS, 0); };
    const auto chunk_scales = [](u32 c) { return c / GROUP_CHUNKS * GROUP_BYTES + prepacked_scales_offset(c % GROUP_CHUNKS, 0) - TILE_CODE_BYTES; };
    const u32 codes = base + read_tile * TILE_BYTES + chunk_codes(k_warp) + lane * 16;
    const u32 scales = base + read_tile * TILE_BYTES + TILE_CODE_BYTES + chunk_scales(k_warp) + g * 16;
    // Matrices 0..3 of a load are the 16-byte units 0..3 of 8 tokens, then units 4..7: swizzled by the token.
    const u32 tokens = base + ACTIVATIONS_AT + k_warp * CHUNK_TOKEN_BYTES + lane % 8 * 128 + ((lane / 8 ^ lane % 8) << 4);
    const u32 tokens_high = tokens ^ 64;

    Words4 words[WARP_TILES];
    Words2 scale_words[WARP_TILES];
    const auto load_weights = [&](u32 stage, u32 i) {
#pragma unroll
        for (u32 r = 0; r < WARP_TILES; ++r) {
            const u32 tile = stage * STAGE_BYTES + r * TILE_BYTES;
            words[r] = load_shared_16(codes + tile + chunk_codes(i * K_WARPS));
            scale_words[r] = load_shared_8(scales + tile + chunk_scales(i * K_WARPS));
        }
    };

    u32 stage = 0, parity = 0;
    for (u32 item = blockIdx.x; item < items; item += gridDim.x) {
        const PrepackedWork work = prepacked_work<ROW_TILES>(item, row_tiles, units, args.gemm.splits);
        float sums[WARP_TILES][TOKEN_TILES][4] = {};
        for (u32 unit = work.first_unit; unit < work.last_unit; ++unit) {
            mbarrier_wait(full + stage * MBARRIER_BYTES, parity);
            load_weights(stage, 0);
#pragma unroll
            for (u32 i = 0; i < WARP_CHUNKS; ++i) {
                Words4 x[TOKEN_TILES][2];
#pragma unroll
                for (u32 q = 0; q < TOKEN_TILES; ++q) {
                    const u32 at = stage * STAGE_BYTES + i * K_WARPS * CHUNK_TOKEN_BYTES + q * TOKEN_TILE_BYTES;
                    x[q][0] = load_matrix_x4(tokens + at);
                    x[q][1] = load_matrix_x4(tokens_high + at);
                }
                Words4 now[WARP_TILES];
                ChunkScales low[WARP_TILES], high[WARP_TILES];
#pragma unroll
                for (u32 r = 0; r < WARP_TILES; ++r) {
                    now[r] = words[r];
                    low[r] = Weights::decode_scales(scale_words[r].word[0]);
                    high[r] = Weights::decode_scales(scale_words[r].word[1]);
                }
                if (i + 1 < WARP_CHUNKS) load_weights(stage, i + 1);
#pragma unroll
                for (u32 r = 0; r < WARP_TILES; ++r) {
#pragma unroll
                    for (u32 j = 0; j < 4; ++j) {
                        u32 a[4];
                        decode_fragment<Weights>(now[r].word[j], low[r], high[r], j, a);
#pragma unroll
                        for (u32 q = 0; q < TOKEN_TILES; ++q) {
                            Weights::mma(sums[r][q], a, x[q][j / 2].word[j % 2 * 2], x[q][j / 2].word[j % 2 * 2 + 1]);
                        }
                    }
                }
            }
            __syncwarp();
            if (lane == 0) mbarrier_arrive(empty + stage * MBARRIER_BYTES);
            if (++stage == STAGES) stage = 0, parity ^= 1;
        }

        if constexpr (K_WARPS > 1) {
            const u32 place = base + REDUCTION_AT + lane * 16;
            const auto tile_at = [&](u32 k, u32 r, u32 q) {
                return place + (((k - 1) * ROW_WARPS + row_warp) * REDUCED_SUMS + r * TOKEN_TILES + q) * 512;
            };
            if (item != blockIdx.x) named_barrier_sync(REDUCTION_BARRIER, 32 * CONSUMER_WARPS);  // the last one is read
#pragma unroll
            for (u32 r = 0; r < WARP_TILES; ++r) {
#pragma unroll
                for (u32 q = 0; q < TOKEN_TILES; ++q) {
                    if (k_warp > 0) store_shared_floats(tile_at(k_warp, r, q), sums[r][q]);
                }
            }
            named_barrier_sync(REDUCTION_BARRIER, 32 * CONSUMER_WARPS);
            if (k_warp > 0) continue;
#pragma unroll
            for (u32 k = 1; k < K_WARPS; ++k) {
#pragma unroll
                for (u32 r = 0; r < WARP_TILES; ++r) {
#pragma unroll
                    for (u32 q = 0; q < TOKEN_TILES; ++q) add_shared_floats(sums[r][q], tile_at(k, r, q));
                }
            }
        }
        const ResultWriter writer = result_writer(args.gemm, Weights::PRODUCT_INVERSE, alpha, work.split);
#pragma unroll
        for (u32 r = 0; r < WARP_TILES; ++r) {
            if (own_tile + r >= work.tiles) break;
            const u32 row = (work.first_tile + own_tile + r) * TILE_ROWS + g;
            const float bias = bias_or_nothing(args.gemm, row), bias_high = bias_or_nothing(args.gemm, row + 8);
            apply_first<4 * TOKEN_TILES>(writer, sums[r][0]);
#pragma unroll
            for (u32 q = 0; q < TOKEN_TILES; ++q) {
                const u32 token = 8 * q + 2 * t;
                write_result(writer, token, row, sums[r][q][0], bias);
                write_result(writer, token + 1, row, sums[r][q][1], bias);
                write_result(writer, token, row + 8, sums[r][q][2], bias_high);
                write_result(writer, token + 1, row + 8, sums[r][q][3], bias_high);
            }
        }
    }
}
