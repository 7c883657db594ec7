// D[m, n] = alpha * A[m, k] @ B[n, k]^T + bias for few tokens (m <= 8 TOKEN_TILES): bound by reading the weights.
// On entry: B prepacked (layout/prepacked.cuh); A behind a tensor map with boxes of 8 TOKEN_TILES tokens, or, with
// ACTIVATION_WARPS, NVFP4 with codes at multiples of 8 bytes; sm_90.
//
// One warp keeps stages of weights and activations on their way (block/prepacked_stages.cuh); ROW_WARPS x K_WARPS warps
// decode weights in registers and multiply with mma.sync, weights as the row operand. A warp owns WARP_TILES row tiles,
// which share its activation fragments, and every K_WARPS-th chunk of 64 columns; the sums of K_WARPS warps, and of the
// K_CLUSTER blocks of a cluster, meet in shared memory at the end, always in the same order. No barrier in the loop but
// the stages' own.
//
// Compile-time choices (fp4rt/cuda/gemm/hopper_stages.py): A_TYPE (bf16 for NVFP4), TOKEN_TILES, ROW_TILES, ROW_WARPS,
// K_WARPS (a power of two), K_CLUSTER (1, 2 or 4), ONE_PIECE, ACTIVATION_WARPS, WARP_TILES, STAGE_GROUPS, STAGES, and where
// things lie in shared memory: ACTIVATIONS_AT (in a stage), STAGE_BYTES, BARRIERS_AT, REDUCTION_AT.
#define OWN_TILES 0
#include "block/meeting.cuh"
#include "block/prepacked_stages.cuh"
#include "block/result_writer.cuh"
#include "mma/prepacked_fragments.cuh"
#include "ptx/shared_memory.cuh"
#if ACTIVATION_WARPS > 0
#include "block/decoded_activations.cuh"
#endif

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#error "gemm_decode.cu is built for sm_90 and newer"
#endif

using Weights = WeightsFor<A_TYPE>;

constexpr u32 CONSUMER_WARPS = ROW_WARPS * K_WARPS;
constexpr u32 WARP_CHUNKS = STAGE_CHUNKS / K_WARPS;
constexpr u32 PARTS = K_WARPS * K_CLUSTER;  // sums of an element, which meet
constexpr u32 TOKEN_TILE_BYTES = 8 * CHUNK_COLUMNS * 2;
constexpr u32 SUMS_TILE_BYTES = TILE_ROWS * 8 * 4;
constexpr u32 REDUCTION_BYTES = (PARTS - 1) * ROW_WARPS * WARP_TILES * TOKEN_TILES * SUMS_TILE_BYTES;
constexpr u32 REDUCTION_BARRIER = 1, START_BARRIER = 2;
constexpr u32 STARTING_THREADS = 32 * (CONSUMER_WARPS + 1 + ACTIVATION_WARPS);
#if ACTIVATION_WARPS > 0
constexpr u32 OTHER_WARPS = 1 + ACTIVATION_WARPS;
constexpr float PRODUCT_INVERSE = Weights::PRODUCT_INVERSE * DecodedActivations::DECODED_INVERSE;
#else
constexpr u32 OTHER_WARPS = 4;  // leaves a warp 96 registers
constexpr float PRODUCT_INVERSE = Weights::PRODUCT_INVERSE;
#endif

extern "C" __global__ void __launch_bounds__(32 * (CONSUMER_WARPS + OTHER_WARPS), 1)
#if K_CLUSTER > 1
__cluster_dims__(K_CLUSTER, 1, 1)
#endif
gemm_decode(const __grid_constant__ PrepackedGemmArguments args) {
    extern __shared__ __align__(1024) u8 shared_memory[];
    const u32 base = shared_address(shared_memory);
    const PrepackedStages stages(base);
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;

    const Meeting<K_CLUSTER> meeting{base + BARRIERS_AT + stages.barriers.BYTES, REDUCTION_BARRIER, 32 * CONSUMER_WARPS};
    if (warp == CONSUMER_WARPS) {
        if (lane == 0) stages.init_barriers(32 * CONSUMER_WARPS);
        __syncwarp();
        named_barrier_arrive(START_BARRIER, STARTING_THREADS);
        stages.produce(args, lane);
        return;
    }
    if (threadIdx.x == 0) meeting.init(REDUCTION_BYTES);
    named_barrier_sync(START_BARRIER, STARTING_THREADS);
#if ACTIVATION_WARPS > 0
    if (warp > CONSUMER_WARPS) {
        decode_activations(args, stages, threadIdx.x - 32 * (CONSUMER_WARPS + 1));
        return;
    }
#endif

    const u32 g = lane / 4, t = lane % 4;
    const u32 row_warp = warp % ROW_WARPS, k_warp = warp / ROW_WARPS;
    const u32 own_tile = row_warp * WARP_TILES;                          // of the block's row tiles
    const u32 read_tile = min(own_tile, (u32)(ROW_TILES - WARP_TILES));  // beyond the last one: read it again
    const float alpha = gemm_alpha(args.gemm);

    // K_WARPS is a power of two, so what chunk i * K_WARPS + k_warp adds to an address splits into a sum of two.
    const auto chunk_codes = [](u32 c) {
        return c / GROUP_CHUNKS * GROUP_BYTES + prepacked_codes_offset(c % GROUP_CHUNKS, 0);
    };
    const auto chunk_scales = [](u32 c) {
        return c / GROUP_CHUNKS * GROUP_BYTES + prepacked_scales_offset(c % GROUP_CHUNKS, 0) - TILE_CODE_BYTES;
    };
    const u32 own_weights = base + read_tile * TILE_BYTES;
    const u32 codes = own_weights + chunk_codes(k_warp) + lane * 16;
    const u32 scales = own_weights + TILE_CODE_BYTES + chunk_scales(k_warp) + g * 16;
    // Matrices 0..3 of a load are the 16-byte units 0..3 of 8 tokens, then units 4..7: swizzled by the token.
    const u32 own_tokens = base + ACTIVATIONS_AT + k_warp * CHUNK_TOKEN_BYTES;
    const u32 tokens = own_tokens + lane % 8 * 128 + ((lane / 8 ^ lane % 8) << 4);
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

    RingPlace<STAGES> place{0, 0};
    for (PrepackedWalk walk(args.gemm); !walk.done(); walk.next_item()) {
        const PrepackedWork work = walk.work;
        float sums[WARP_TILES][TOKEN_TILES][4] = {};
        for (u32 unit = work.first_unit; unit < work.last_unit; ++unit) {
            mbarrier_wait(stages.barriers.full(place.stage), place.parity);
            load_weights(place.stage, 0);
#pragma unroll
            for (u32 i = 0; i < WARP_CHUNKS; ++i) {
                Words4 x[TOKEN_TILES][2];
#pragma unroll
                for (u32 q = 0; q < TOKEN_TILES; ++q) {
                    const u32 at = place.stage * STAGE_BYTES + i * K_WARPS * CHUNK_TOKEN_BYTES;
                    x[q][0] = load_matrix_x4(tokens + at + q * TOKEN_TILE_BYTES);
                    x[q][1] = load_matrix_x4(tokens_high + at + q * TOKEN_TILE_BYTES);
                }
                Words4 now[WARP_TILES];
                ChunkScales low[WARP_TILES], high[WARP_TILES];
#pragma unroll
                for (u32 r = 0; r < WARP_TILES; ++r) {
                    now[r] = words[r];
                    low[r] = Weights::decode_scales(scale_words[r].word[0]);
                    high[r] = Weights::decode_scales(scale_words[r].word[1]);
                }
                if (i + 1 < WARP_CHUNKS) load_weights(place.stage, i + 1);
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
            mbarrier_arrive(stages.barriers.empty(place.stage));
            place.advance();
        }

        if constexpr (PARTS > 1) {
            const u32 part = K_CLUSTER > 1 ? cluster_rank() * K_WARPS + k_warp : k_warp;
            const auto sums_at = [&](u32 of_part, u32 r, u32 q) {
                const u32 sums_tile = (((of_part - 1) * ROW_WARPS + row_warp) * WARP_TILES + r) * TOKEN_TILES + q;
                return base + REDUCTION_AT + sums_tile * SUMS_TILE_BYTES + lane * 16;
            };
            meeting.open(walk.is_first());
#pragma unroll
            for (u32 r = 0; r < WARP_TILES; ++r) {
#pragma unroll
                for (u32 q = 0; q < TOKEN_TILES; ++q) {
                    if (part > 0) meeting.store(sums_at(part, r, q), sums[r][q]);
                }
            }
            meeting.close(part == 0);
            if (part > 0) continue;
#pragma unroll
            for (u32 other = 1; other < PARTS; ++other) {
#pragma unroll
                for (u32 r = 0; r < WARP_TILES; ++r) {
#pragma unroll
                    for (u32 q = 0; q < TOKEN_TILES; ++q) add_shared_floats(sums[r][q], sums_at(other, r, q));
                }
            }
        }
        const ResultWriter writer = result_writer(args.gemm, PRODUCT_INVERSE, alpha);
        const bool plain = are_plain<A_TYPE>(args.gemm, writer);
#pragma unroll
        for (u32 r = 0; r < WARP_TILES; ++r) {
            if (own_tile + r >= work.tiles) break;
            const u32 row = (work.first_tile + own_tile + r) * TILE_ROWS + g;
            if (plain) {
                write_plain_sums<TOKEN_TILES, A_TYPE>(writer, sums[r][0], 2 * t, row);
            } else {
                write_sums<TOKEN_TILES>(args.gemm, writer, sums[r][0], 2 * t, row);
            }
        }
    }
}
