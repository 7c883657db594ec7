// D[m, n] = alpha * A[m, k] @ B[n, k]^T + bias for some tens of tokens (m <= 8 TOKEN_TILES): reading and arithmetic
// take about as long.
// On entry: B prepacked (layout/prepacked.cuh); A behind a tensor map with boxes of 8 TOKEN_TILES tokens; sm_90a.
//
// Like gemm_decode.cu, with wgmma: ROW_GROUPS x K_GROUPS consumer warpgroups decode weights to registers, the row
// operand of m64nNk16, and the tokens are read from shared memory by the tensor cores themselves. A warpgroup owns
// ROW_BLOCKS blocks of 64 rows and every K_GROUPS-th chunk of 64 columns. While FRAGMENTS products run, the next
// fragments are decoded into the other half of a double buffer. The sums of K_GROUPS warpgroups, and of the K_CLUSTER
// blocks of a cluster, meet in shared memory at the end, always in the same order. With OWN_TILES a cluster shares the k
// of its last row group only (block/prepacked_work.cuh).
//
// What was measured: how decoding and products are interleaved changes nothing. Together they take about as long as one
// after the other, and so each instruction of the loop counts. A step is added to the whole descriptor of the tokens:
// from a sum of low words the descriptor of each product is moved together anew, 9 % of the loop's instructions.
//
// Compile-time choices (fp4rt/cuda/gemm/hopper_stages.py): A_TYPE, TOKEN_TILES, ROW_TILES, ROW_GROUPS, K_GROUPS (1, 2 or
// 4), K_CLUSTER (1, 2 or 4), ONE_PIECE, OWN_TILES, ROW_BLOCKS, FRAGMENTS (1, 2 or 4), STAGE_GROUPS, STAGES, OUT_TOKENS,
// CONSUMER_REGISTERS, PRODUCER_REGISTERS, and where things lie in shared memory: ACTIVATIONS_AT (in a stage),
// STAGE_BYTES, BARRIERS_AT, REDUCTION_AT, OUT_AT.
#define ACTIVATION_WARPS 0
#include "block/meeting.cuh"
#include "block/prepacked_stages.cuh"
#include "block/transposed_results.cuh"
#include "mma/prepacked_fragments.cuh"
#include "mma/warpgroup_product.cuh"
#include "ptx/shared_memory.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#error "gemm_small.cu is built for sm_90a"
#endif

using Weights = WeightsFor<A_TYPE>;

constexpr u32 TOKENS = 8 * TOKEN_TILES;
constexpr u32 CONSUMER_WARPS = 4 * ROW_GROUPS * K_GROUPS;
constexpr u32 OWN_CHUNKS = STAGE_CHUNKS / K_GROUPS;
constexpr u32 PARTS = K_GROUPS * K_CLUSTER;  // sums of an element, which meet
static_assert(OWN_CHUNKS * 4 / FRAGMENTS % 2 == 0, "the halves of the double buffer take turns, also across stages");
constexpr u32 SUMS = TOKENS / 2;  // a lane's sums of one 64-row block
constexpr u32 SUMS_TILE_BYTES = 64 * 8 * 4;
constexpr u32 OWN_GROUPS = OWN_TILES / (4 * ROW_BLOCKS), SHARED_GROUPS = ROW_GROUPS - OWN_GROUPS;
constexpr u32 REDUCTION_BYTES = (PARTS - 1) * SHARED_GROUPS * ROW_BLOCKS * TOKEN_TILES * SUMS_TILE_BYTES;
constexpr u32 REDUCTION_BARRIER = 1, START_BARRIER = 2, STARTING_THREADS = 32 * (CONSUMER_WARPS + 1);
constexpr u32 NO_STAGE = ~0u;

using Results = TransposedResults<1, OUT_TOKENS>;

extern "C" __global__ void __launch_bounds__(32 * (CONSUMER_WARPS + 4), 1)
#if K_CLUSTER > 1
__cluster_dims__(K_CLUSTER, 1, 1)
#endif
gemm_small(const __grid_constant__ PrepackedGemmArguments args) {
    extern __shared__ __align__(1024) u8 shared_memory[];
    const u32 base = shared_address(shared_memory);
    const PrepackedStages stages(base);
    const u32 warp = uniform(threadIdx.x / 32), lane = threadIdx.x % 32;

    const Meeting<K_CLUSTER> meeting{base + BARRIERS_AT + stages.barriers.BYTES, REDUCTION_BARRIER, 32 * CONSUMER_WARPS};
    if (warp >= CONSUMER_WARPS) {
        lower_registers<PRODUCER_REGISTERS>();
        if (warp > CONSUMER_WARPS) return;
        if (lane == 0) stages.init_barriers(32 * CONSUMER_WARPS);
        __syncwarp();
        named_barrier_arrive(START_BARRIER, STARTING_THREADS);
        stages.produce(args, lane);
        return;
    }

    raise_registers<CONSUMER_REGISTERS>();
    if (threadIdx.x == 0) meeting.init(REDUCTION_BYTES);
    named_barrier_sync(START_BARRIER, STARTING_THREADS);
    const u32 group_warp = warp % 4, row_group = warp / 4 % ROW_GROUPS, k_group = warp / 4 / ROW_GROUPS;
    const u32 g = lane / 4, t = lane % 4;
    const float alpha = gemm_alpha(args.gemm);
    const bool alone = row_group < OWN_GROUPS;  // this warpgroup's rows are the block's own
    const auto own_tile = [&](u32 block) { return (row_group * ROW_BLOCKS + block) * 4 + group_warp; };

    // K_GROUPS is a power of two, so what chunk i * K_GROUPS + k_group adds to an address splits into a sum of two.
    const auto chunk_codes = [](u32 c) {
        return c / GROUP_CHUNKS * GROUP_BYTES + prepacked_codes_offset(c % GROUP_CHUNKS, 0);
    };
    const auto chunk_scales = [](u32 c) {
        return c / GROUP_CHUNKS * GROUP_BYTES + prepacked_scales_offset(c % GROUP_CHUNKS, 0) - TILE_CODE_BYTES;
    };
    u32 codes[ROW_BLOCKS], scales[ROW_BLOCKS];
#pragma unroll
    for (u32 b = 0; b < ROW_BLOCKS; ++b) {
        const u32 tile = base + min(own_tile(b), (u32)(ROW_TILES - 1)) * TILE_BYTES;  // beyond the last: read it again
        codes[b] = tile + chunk_codes(k_group) + lane * 16;
        scales[b] = tile + TILE_CODE_BYTES + chunk_scales(k_group) + g * 16;
    }
    const u32 tokens = uniform(wgmma_tile_low(base + ACTIVATIONS_AT + k_group * CHUNK_TOKEN_BYTES));

    Words4 words[ROW_BLOCKS];
    Words2 scale_words[ROW_BLOCKS];
    const auto load_weights = [&](u32 stage, u32 i) {
#pragma unroll
        for (u32 b = 0; b < ROW_BLOCKS; ++b) {
            words[b] = load_shared_16(codes[b] + stage * STAGE_BYTES + chunk_codes(i * K_GROUPS));
            scale_words[b] = load_shared_8(scales[b] + stage * STAGE_BYTES + chunk_scales(i * K_GROUPS));
        }
    };
    const auto release = [&](u32 stage) { mbarrier_arrive(stages.barriers.empty(stage)); };

    const Results results{base + OUT_AT + warp * Results::BYTES};
    RingPlace<STAGES> place{0, 0};
    u32 fragments[2][ROW_BLOCKS][4 * FRAGMENTS];
    for (PrepackedWalk walk(args.gemm); !walk.done(); walk.next_item()) {
        const PrepackedWork work = walk.work;
        float sums[ROW_BLOCKS][SUMS] = {};
        u32 read_stage = NO_STAGE;  // still read by products under way
        for (u32 unit = work.first_unit; unit < work.last_unit; ++unit) {
            mbarrier_wait(stages.barriers.full(place.stage), place.parity);
            if (OWN_TILES > 0 && !alone && !walk.takes(unit)) {
                wgmma_wait<0>();
                if (read_stage != NO_STAGE) release(read_stage);
                read_stage = NO_STAGE;
                release(place.stage);
                place.advance();
                continue;
            }
            load_weights(place.stage, 0);
            const u64 stage_tokens = wgmma_tile(tokens + place.stage * (STAGE_BYTES >> 4));
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
                    wgmma_fence();
#pragma unroll
                    for (u32 f = 0; f < FRAGMENTS; ++f) {
#pragma unroll
                        for (u32 b = 0; b < ROW_BLOCKS; ++b) {
                            const u32 at = (i * K_GROUPS * CHUNK_TOKEN_BYTES >> 4) + (j + f) * WGMMA_K_STEP;
                            warpgroup_product<A_TYPE, TOKENS>(sums[b], a[b] + 4 * f, stage_tokens + at);
                        }
                    }
                    wgmma_commit();
                    if (j + FRAGMENTS == 4 && i + 1 < OWN_CHUNKS) load_weights(place.stage, i + 1);
                    wgmma_wait<1>();
                    if (i == 0 && j == 0 && read_stage != NO_STAGE) release(read_stage);
                }
            }
            read_stage = place.stage;
            place.advance();
        }
        wgmma_wait<0>();
        settle(sums);
        if (OWN_TILES == 0 || read_stage != NO_STAGE) release(read_stage);

        if constexpr (PARTS > 1) {
            const u32 part = K_CLUSTER > 1 ? cluster_rank() * K_GROUPS + k_group : k_group;
            const auto sums_at = [&](u32 of_part, u32 b, u32 q) {
                const u32 shared_group = (of_part - 1) * SHARED_GROUPS + row_group - OWN_GROUPS;
                const u32 sums_tile = (shared_group * ROW_BLOCKS + b) * TOKEN_TILES + q;
                return base + REDUCTION_AT + sums_tile * SUMS_TILE_BYTES + threadIdx.x % 128 * 16;
            };
            meeting.open(walk.is_first());
#pragma unroll
            for (u32 b = 0; b < ROW_BLOCKS; ++b) {
#pragma unroll
                for (u32 q = 0; q < TOKEN_TILES; ++q) {
                    if (part > 0 && !alone) meeting.store(sums_at(part, b, q), sums[b] + 4 * q);
                }
            }
            meeting.close(part == 0 && !alone);
            if (part > 0 && !alone) continue;
#pragma unroll
            for (u32 other = 1; other < PARTS; ++other) {
                if (alone) break;
#pragma unroll
                for (u32 b = 0; b < ROW_BLOCKS; ++b) {
#pragma unroll
                    for (u32 q = 0; q < TOKEN_TILES; ++q) add_shared_floats(sums[b] + 4 * q, sums_at(other, b, q));
                }
            }
        }
        const ResultWriter writer = result_writer(args.gemm, Weights::PRODUCT_INVERSE, alpha);
        const bool transposed = leaves_transposed(args.gemm);
#pragma unroll
        for (u32 b = 0; b < ROW_BLOCKS; ++b) {
            const u32 tile = own_tile(b) - (alone ? 0 : OWN_TILES);
            if (tile >= (alone ? work.own_tiles : work.tiles)) break;
            const u32 row = ((alone ? work.own_first_tile : work.first_tile) + tile) * TILE_ROWS;
            if (!transposed) {
                write_sums<TOKEN_TILES>(args.gemm, writer, sums[b], 2 * t, row + g);
                continue;
            }
            const auto leave = [&](const auto& pair_of) {
#pragma unroll
                for (u32 token = 0; token < TOKENS; token += OUT_TOKENS) {
                    __syncwarp();  // what left before is read
                    results.stage(pair_of, sums[b] + token / 2, 0, lane);
                    __syncwarp();
                    results.template store<32>(args.gemm, token, row, (u32)args.gemm.n, lane);
                }
            };
            if (are_plain<A_TYPE>(args.gemm, writer)) {
                leave(PlainPairs<A_TYPE>{writer});
            } else {
                apply_first<SUMS>(writer, sums[b]);
                leave(FinishedPairs{writer, bias_or_nothing(args.gemm, row + g), bias_or_nothing(args.gemm, row + g + 8)});
            }
        }
    }
}
