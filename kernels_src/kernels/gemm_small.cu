// D[m, n] = alpha * A[m, k] @ B[n, k]^T + bias for some tens of tokens (m <= 8 TOKEN_TILES): reading and arithmetic even.
// On entry: B prepacked (layout/prepacked.cuh); A behind a tensor map with boxes of 8 TOKEN_TILES x 64; sm_90a.
//
// Like gemm_decode.cu, with wgmma: ROW_GROUPS x K_GROUPS consumer warpgroups decode weights to registers, the row
// operand of m64nNk16, and the tokens are read from shared memory by the tensor cores themselves. A warpgroup owns
// ROW_BLOCKS blocks of 64 rows and every K_GROUPS-th chunk of 64 columns. While FRAGMENTS products run, the next
// fragments are decoded into the other half of a double buffer.
//
// Weights come from memory, activations from L2: each has stages of its own, of the same columns, so that as much of
// shared memory as possible waits for weights.
//
//   shared memory   [ACTIVATION_STAGES][4 STAGE_GROUPS][8 TOKEN_TILES tokens][128]
//                   [WEIGHT_STAGES][STAGE_GROUPS][ROW_TILES][2304]   barriers   sums that meet
//   beyond the last column group: that group again, times activations that the copy engine fills with 0
//
// Compile-time choices (fp4rt/cuda/gemm/hopper.py): A_TYPE, TOKEN_TILES, ROW_TILES, ROW_GROUPS, K_GROUPS (1, 2 or 4),
// ROW_BLOCKS, FRAGMENTS (1, 2 or 4), STAGE_GROUPS, ACTIVATION_STAGES, WEIGHT_STAGES, CONSUMER_REGISTERS, and where things
// lie in shared memory: WEIGHTS_AT, BARRIERS_AT, REDUCTION_AT.
#include "block/prepacked_work.cuh"
#include "block/result_writer.cuh"
#include "kernels/gemm_prepacked.cuh"
#include "mma/prepacked_fragments.cuh"
#include "mma/warpgroup_product.cuh"
#include "ptx/blocks.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared_memory.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#error "gemm_small.cu is built for sm_90a"
#endif

using Weights = WeightsFor<A_TYPE>;

constexpr u32 TOKENS = 8 * TOKEN_TILES;
constexpr u32 CONSUMER_GROUPS = ROW_GROUPS * K_GROUPS;
constexpr u32 CONSUMER_WARPS = 4 * CONSUMER_GROUPS;
constexpr u32 PRODUCER_REGISTERS = 32;
constexpr u32 STAGE_CHUNKS = STAGE_GROUPS * GROUP_CHUNKS;
constexpr u32 OWN_CHUNKS = STAGE_CHUNKS / K_GROUPS;
constexpr u32 GROUP_BYTES = ROW_TILES * TILE_BYTES;
constexpr u32 CHUNK_TOKEN_BYTES = TOKENS * CHUNK_COLUMNS * 2;
constexpr u32 ACTIVATION_STAGE_BYTES = STAGE_CHUNKS * CHUNK_TOKEN_BYTES;
constexpr u32 WEIGHT_STAGE_BYTES = STAGE_GROUPS * GROUP_BYTES;
constexpr u32 SUMS = TOKENS / 2;  // a lane's sums of one 64-row block
constexpr u32 START_BARRIER = 1, REDUCTION_BARRIER = 2;
constexpr u32 NO_STAGE = ~0u;

extern "C" __global__ void __launch_bounds__(32 * (CONSUMER_WARPS + 4), 1)
gemm_small(const __grid_constant__ PrepackedGemmArguments args) {
    extern __shared__ __align__(1024) u8 shared[];
    const u32 base = shared_address(shared);
    const u32 weights_full = base + BARRIERS_AT, weights_empty = weights_full + WEIGHT_STAGES * MBARRIER_BYTES;
    const u32 activations_full = weights_empty + WEIGHT_STAGES * MBARRIER_BYTES;
    const u32 activations_empty = activations_full + ACTIVATION_STAGES * MBARRIER_BYTES;
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 row_tiles = (u32)((args.gemm.n + TILE_ROWS - 1) / TILE_ROWS);
    const u32 groups = (args.gemm.k + GROUP_COLUMNS - 1) / GROUP_COLUMNS;
    const u32 units = (groups + STAGE_GROUPS - 1) / STAGE_GROUPS;
    const u32 items = prepacked_work_items<ROW_TILES>(row_tiles, args.gemm.splits);

    if (warp >= CONSUMER_WARPS) {
        lower_registers<PRODUCER_REGISTERS>();
        const bool weights = warp == CONSUMER_WARPS, activations = warp == CONSUMER_WARPS + 1;
        if (!weights && !activations) return;
        const u32 stages = weights ? WEIGHT_STAGES : ACTIVATION_STAGES;
        const u32 full = weights ? weights_full : activations_full, empty = full + stages * MBARRIER_BYTES;
        if (lane == 0) {
            if (activations) tensor_map_prefetch(&args.activations);
            for (u32 i = 0; i < stages; ++i) {
                mbarrier_init(full + i * MBARRIER_BYTES, 1);
                mbarrier_init(empty + i * MBARRIER_BYTES, CONSUMER_WARPS);
            }
            mbarrier_fence_init();
        }
        __syncwarp();
        named_barrier_arrive(START_BARRIER, 32 * (CONSUMER_WARPS + 2));
        start_dependents();

        const u64 read_once = evict_first_policy();
        u32 stage = 0, parity = 1;
        if (activations) wait_for_prerequisites();
        for (u32 item = blockIdx.x; item < items; item += gridDim.x) {
            const PrepackedWork work = prepacked_work<ROW_TILES>(item, row_tiles, units, args.gemm.splits);
            const u32 bytes = weights ? STAGE_GROUPS * work.tiles * TILE_BYTES : ACTIVATION_STAGE_BYTES;
            for (u32 unit = work.first_unit; unit < work.last_unit; ++unit) {
                const u32 barrier = full + stage * MBARRIER_BYTES;
                mbarrier_wait(empty + stage * MBARRIER_BYTES, parity);
                if (lane == 0) mbarrier_arrive_expect(barrier, bytes);
                __syncwarp();
                if (weights && lane < STAGE_GROUPS) {
                    const u32 group = min(unit * STAGE_GROUPS + lane, groups - 1);
                    bulk_load_policy(base + WEIGHTS_AT + stage * WEIGHT_STAGE_BYTES + lane * GROUP_BYTES,
                                     args.gemm.b + prepacked_tile_offset(group, work.first_tile, row_tiles),
                                     work.tiles * TILE_BYTES, barrier, read_once);
                }
                if (activations && lane < STAGE_CHUNKS) {
                    tensor_load(base + stage * ACTIVATION_STAGE_BYTES + lane * CHUNK_TOKEN_BYTES, &args.activations,
                                (unit * STAGE_CHUNKS + lane) * CHUNK_COLUMNS, 0, barrier);
                }
                if (++stage == stages) stage = 0, parity ^= 1;
            }
        }
        return;
    }

    named_barrier_sync(START_BARRIER, 32 * (CONSUMER_WARPS + 2));
    raise_registers<CONSUMER_REGISTERS>();
    const u32 group_warp = warp % 4, row_group = warp / 4 % ROW_GROUPS, k_group = warp / 4 / ROW_GROUPS;
    const u32 g = lane / 4, t = lane % 4;
    const float alpha = gemm_alpha(args.gemm);
    const auto own_tile = [&](u32 block) { return (row_group * ROW_BLOCKS + block) * 4 + group_warp; };

    // Chunk c of a stage lies at chunk_codes(c): with K_GROUPS a power of two, c = i * K_GROUPS + k_group splits into sums.
    const auto chunk_codes = [](u32 c) { return c / GROUP_CHUNKS * GROUP_BYTES + prepacked_codes_offset(c % GROUP_CHUNKS, 0); };
    const auto chunk_scales = [](u32 c) { return c / GROUP_CHUNKS * GROUP_BYTES + prepacked_scales_offset(c % GROUP_CHUNKS, 0) - TILE_CODE_BYTES; };
    u32 codes[ROW_BLOCKS], scales[ROW_BLOCKS];
#pragma unroll
    for (u32 b = 0; b < ROW_BLOCKS; ++b) {
        const u32 tile = base + WEIGHTS_AT + min(own_tile(b), (u32)(ROW_TILES - 1)) * TILE_BYTES;  // beyond the last one: read it again
        codes[b] = tile + chunk_codes(k_group) + lane * 16;
        scales[b] = tile + TILE_CODE_BYTES + chunk_scales(k_group) + g * 16;
    }
    const u32 tokens = uniform(wgmma_tile_low(base + k_group * CHUNK_TOKEN_BYTES));

    Words4 words[ROW_BLOCKS];
    Words2 scale_words[ROW_BLOCKS];
    const auto load_weights = [&](u32 stage, u32 i) {
#pragma unroll
        for (u32 b = 0; b < ROW_BLOCKS; ++b) {
            words[b] = load_shared_16(codes[b] + stage * WEIGHT_STAGE_BYTES + chunk_codes(i * K_GROUPS));
            scale_words[b] = load_shared_8(scales[b] + stage * WEIGHT_STAGE_BYTES + chunk_scales(i * K_GROUPS));
        }
    };
    const auto release_activations = [&](u32 stage) {
        if (lane == 0) mbarrier_arrive(activations_empty + stage * MBARRIER_BYTES);
    };

    u32 weight_stage = 0, weight_parity = 0, activation_stage = 0, activation_parity = 0;
    u32 fragments[2][ROW_BLOCKS][4 * FRAGMENTS];
    for (u32 item = blockIdx.x; item < items; item += gridDim.x) {
        const PrepackedWork work = prepacked_work<ROW_TILES>(item, row_tiles, units, args.gemm.splits);
        float sums[ROW_BLOCKS][SUMS] = {};
        u32 read_stage = NO_STAGE;  // still read by products under way
        for (u32 unit = work.first_unit; unit < work.last_unit; ++unit) {
            mbarrier_wait(weights_full + weight_stage * MBARRIER_BYTES, weight_parity);
            load_weights(weight_stage, 0);
            const u32 stage_tokens = tokens + activation_stage * (ACTIVATION_STAGE_BYTES >> 4);
#pragma unroll
            for (u32 i = 0; i < OWN_CHUNKS; ++i) {
                Words4 now[ROW_BLOCKS];
                ChunkScales low[ROW_BLOCKS], high[ROW_BLOCKS];
#pragma unroll
                for (u32 b = 0; b < ROW_BLOCKS; ++b) {
                    now[b] = words[b];
                    low[b] = Weights::decode_scales(scale_words[b].word[0]);
                    high[b] = Weights::decode_scales(scale_words[b].word[1]);
                }
#pragma unroll
                for (u32 j = 0; j < 4; j += FRAGMENTS) {
                    auto& a = fragments[(i * 4 + j) / FRAGMENTS % 2];
#pragma unroll
                    for (u32 b = 0; b < ROW_BLOCKS; ++b) {
#pragma unroll
                        for (u32 f = 0; f < FRAGMENTS; ++f) {
                            decode_fragment<Weights>(now[b].word[j + f], low[b], high[b], j + f, a[b] + 4 * f);
                        }
                    }
                    if (i == 0 && j == 0) {
                        mbarrier_wait(activations_full + activation_stage * MBARRIER_BYTES, activation_parity);
                    }
                    wgmma_fence();
#pragma unroll
                    for (u32 f = 0; f < FRAGMENTS; ++f) {
#pragma unroll
                        for (u32 b = 0; b < ROW_BLOCKS; ++b) {
                            const u32 at = (i * K_GROUPS * CHUNK_TOKEN_BYTES >> 4) + (j + f) * WGMMA_K_STEP;
                            warpgroup_product<A_TYPE, TOKENS>(sums[b], a[b] + 4 * f, wgmma_tile(stage_tokens + at));
                        }
                    }
                    wgmma_commit();
                    if (j + FRAGMENTS == 4 && i + 1 < OWN_CHUNKS) load_weights(weight_stage, i + 1);
                    wgmma_wait<1>();
                    if (i == 0 && j == 0 && read_stage != NO_STAGE) release_activations(read_stage);
                }
            }
            __syncwarp();
            if (lane == 0) mbarrier_arrive(weights_empty + weight_stage * MBARRIER_BYTES);
            read_stage = activation_stage;
            if (++weight_stage == WEIGHT_STAGES) weight_stage = 0, weight_parity ^= 1;
            if (++activation_stage == ACTIVATION_STAGES) activation_stage = 0, activation_parity ^= 1;
        }
        wgmma_wait<0>();
        settle(sums);
        release_activations(read_stage);

        if constexpr (K_GROUPS > 1) {
            const auto place = [&](u32 k, u32 b, u32 q) {
                const u32 sums_tile = (((k - 1) * ROW_GROUPS + row_group) * ROW_BLOCKS + b) * TOKEN_TILES + q;
                return base + REDUCTION_AT + sums_tile * 2048 + (threadIdx.x % 128) * 16;
            };
            if (item != blockIdx.x) named_barrier_sync(REDUCTION_BARRIER, 32 * CONSUMER_WARPS);  // the last one is read
#pragma unroll
            for (u32 b = 0; b < ROW_BLOCKS; ++b) {
#pragma unroll
                for (u32 q = 0; q < TOKEN_TILES; ++q) {
                    if (k_group > 0) store_shared_floats(place(k_group, b, q), sums[b] + 4 * q);
                }
            }
            named_barrier_sync(REDUCTION_BARRIER, 32 * CONSUMER_WARPS);
            if (k_group > 0) continue;
#pragma unroll
            for (u32 k = 1; k < K_GROUPS; ++k) {
#pragma unroll
                for (u32 b = 0; b < ROW_BLOCKS; ++b) {
#pragma unroll
                    for (u32 q = 0; q < TOKEN_TILES; ++q) add_shared_floats(sums[b] + 4 * q, place(k, b, q));
                }
            }
        }
        const ResultWriter writer = result_writer(args.gemm, Weights::PRODUCT_INVERSE, alpha, work.split);
#pragma unroll
        for (u32 b = 0; b < ROW_BLOCKS; ++b) {
            if (own_tile(b) >= work.tiles) break;
            const u32 row = (work.first_tile + own_tile(b)) * TILE_ROWS + g;
            const float bias = bias_or_nothing(args.gemm, row), bias_high = bias_or_nothing(args.gemm, row + 8);
            apply_first<SUMS>(writer, sums[b]);
#pragma unroll
            for (u32 q = 0; q < TOKEN_TILES; ++q) {
                const u32 token = 8 * q + 2 * t;
                write_result(writer, token, row, sums[b][4 * q], bias);
                write_result(writer, token + 1, row, sums[b][4 * q + 1], bias);
                write_result(writer, token, row + 8, sums[b][4 * q + 2], bias_high);
                write_result(writer, token + 1, row + 8, sums[b][4 * q + 3], bias_high);
            }
        }
    }
}
