// D[m, n] = alpha * A[m, k] @ B[n, k]^T + bias for many tokens: bound by the tensor cores.
// On entry: B prepacked (layout/prepacked.cuh); A behind a tensor map with boxes of TOKENS / CLUSTER tokens; sm_90a.
//
// A persistent grid walks over tiles of 64 ROW_GROUPS ROW_BLOCKS rows x TOKENS tokens; with ONE_PIECE each block has the
// tile of its place in the grid, and much less to compute and to fetch before its first copy. One warp keeps stages of
// STAGE_CHUNKS chunks of activations on their way, one the weights; ROW_GROUPS consumer warpgroups decode weights to
// registers, the row operand of wgmma, each for its part of the rows, one stage ahead of the products. Few tokens and one
// row block have little to multiply in a chunk: two make a stage, so that the products of two warpgroups take longer than
// all that comes between them. With K_TAIL half of the last column group lies past k, and is left out. A step is added to
// the low word of the tokens' descriptor: added to the whole one, as in gemm_small.cu, it made products of 4096 tokens up
// to 6 % slower, and others no faster.
// Blocks of a cluster either have neighbouring rows and the same tokens, and each loads its part of these for all of
// them (CLUSTER = 2), or halves of k; then they add their sums, each warpgroup's in the block of its number
// (K_CLUSTER = 2). With DECODES activations are NVFP4, and the blocks decode them among themselves
// (block/shared_decoding.cuh): the first column group where it is multiplied, the others into what the map describes.
//
//   shared memory   [ACTIVATION_STAGES][STAGE_CHUNKS][TOKENS][128]   [WEIGHT_STAGES][ROW_TILES][2304]
//                   [ROW_GROUPS][OUT_STAGES][OUT_TOKENS][128]   barriers, arrivals
//
// Compile-time choices (fp4rt/cuda/gemm/hopper_prefill.py): A_TYPE, TOKENS, ROW_GROUPS (2 or 3), ROW_BLOCKS, ROW_TILES
// (a multiple of 4, <= 4 ROW_GROUPS ROW_BLOCKS), ACTIVATION_STAGES, STAGE_CHUNKS (1 or 2), WEIGHT_STAGES, ONE_PIECE,
// K_TAIL, DECODES, RASTER_TOKENS, CLUSTER, K_CLUSTER, OUT_TOKENS, OUT_STAGES (>= 2), CONSUMER_REGISTERS,
// PRODUCER_REGISTERS, and where things lie in shared memory: WEIGHTS_AT, OUT_AT, BARRIERS_AT, ARRIVALS_AT.
#include "block/prefill_tiles.cuh"
#include "block/prepacked_arguments.cuh"
#include "block/ring.cuh"
#include "block/shared_tiles.cuh"
#include "block/transposed_results.cuh"
#include "layout/prepacked.cuh"
#include "mma/prepacked_fragments.cuh"
#include "mma/warpgroup_product.cuh"
#include "ptx/blocks.cuh"
#include "ptx/shared_memory.cuh"
#if DECODES
#include "block/shared_decoding.cuh"
#endif

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#error "gemm_prefill.cu is built for sm_90a"
#endif

using Weights = WeightsFor<A_TYPE>;
using Tiles = SelectTiles<ONE_PIECE != 0, ROW_TILES, TOKENS, CLUSTER, K_CLUSTER, RASTER_TOKENS>::Type;

static_assert(ROW_TILES % 4 == 0, "a warpgroup's rows are all the block's, or none of them");
constexpr u32 CLUSTER_BLOCKS = CLUSTER * K_CLUSTER;
static_assert(CLUSTER == 1 || K_CLUSTER == 1, "blocks share tokens or halve k");
static_assert(K_CLUSTER == 1 || K_CLUSTER == ROW_GROUPS, "each warpgroup's sums meet in the block of its number");
constexpr u32 GROUP_THREADS = 128;
constexpr u32 GROUP_STAGES = GROUP_CHUNKS / STAGE_CHUNKS;
static_assert(GROUP_STAGES % 2 == 0, "the halves of the double buffer take turns, also across groups");
constexpr u32 CHUNK_TOKEN_BYTES = TOKENS * CHUNK_COLUMNS * 2;
constexpr u32 ACTIVATION_BYTES = STAGE_CHUNKS * CHUNK_TOKEN_BYTES;
constexpr u32 WEIGHT_BYTES = ROW_TILES * TILE_BYTES;
constexpr u32 SUMS = TOKENS / 2;        // a lane's sums of one 64-row block
constexpr u32 GROUP_BARRIER = 1;  // and the next ones, for the other warpgroups
constexpr u32 START_BARRIER = GROUP_BARRIER + ROW_GROUPS, STARTING_THREADS = 64 + ROW_GROUPS * GROUP_THREADS;
constexpr u32 DECODED_BARRIER = START_BARRIER + 1;  // of the consumers
constexpr u32 NO_STAGE = ~0u;
// CUDA 12 compilers find no register for alpha in the loop of the tallest tiles.
constexpr bool ALPHA_LATE = ROW_BLOCKS > 1 && __CUDACC_VER_MAJOR__ < 13;

using Results = TransposedResults<4, OUT_TOKENS>;
using Shared = SharedTiles<ROW_GROUPS, CLUSTER_BLOCKS, ROW_BLOCKS * SUMS>;

struct PrefillRings {
    RingBarriers<ACTIVATION_STAGES> activations;
    RingBarriers<WEIGHT_STAGES> weights;
    u32 sums;  // of a cluster's other block, which arrive like a copy

    __device__ __forceinline__ explicit PrefillRings(u32 base)
        : activations{base + BARRIERS_AT},
          weights{base + BARRIERS_AT + activations.BYTES},
          sums(base + BARRIERS_AT + activations.BYTES + weights.BYTES) {}
};

// The block's part of a stage of activations, to an empty stage of all blocks of the cluster.
__device__ __forceinline__ void send_stage(const PrepackedGemmArguments& args, u32 base, u32 rank, u32 first_token,
                                           u32 chunk, u32 stage) {
    constexpr u32 PART = TOKENS / CLUSTER;
    const u32 barrier = PrefillRings(base).activations.full(stage);
    const u32 own = CLUSTER > 1 ? rank * PART : 0;
    const u32 to = base + stage * ACTIVATION_BYTES + own * CHUNK_COLUMNS * 2, token = first_token + own;
    mbarrier_arrive_expect(barrier, ACTIVATION_BYTES);
    const auto load = [&](u32 to_chunk, u32 column, u32 from_chunk) {
        if constexpr (CLUSTER > 1) {
            tensor_load_multicast(to_chunk, &args.activations, column, token, from_chunk, barrier, (1 << CLUSTER) - 1);
        } else {
            tensor_load(to_chunk, &args.activations, column, token, from_chunk, barrier);
        }
    };
    if (CLUSTER == 1 && STAGE_CHUNKS > 1 && args.whole_chunks != 0) {  // a part of the tokens has gaps between chunks
        load(to, 0, chunk);
    } else {
#pragma unroll
        for (u32 i = 0; i < STAGE_CHUNKS; ++i) load(to + i * CHUNK_TOKEN_BYTES, (chunk + i) * CHUNK_COLUMNS, 0);
    }
}

// Whether the second half of a column group is left out. The parity of stages stays, and with it whose turn it is.
__device__ __forceinline__ bool ends_early(const PrepackedGemmArguments& args, u32 group) {
    static_assert(!K_TAIL || STAGE_CHUNKS == 1, "two stages are a half of a group");
    return group * GROUP_COLUMNS + GROUP_COLUMNS / 2 >= (u32)args.gemm.k;
}

// Whether a block's first activations are asked for before it meets: nobody else writes or gets them.
__device__ __forceinline__ bool sends_activations_first(const PrepackedGemmArguments& args) {
    return CLUSTER == 1 && args.dependent == 0 && !DECODES;
}

// One thread: the activations, but the first stage where that is on its way, or the first group where it is decoded.
__device__ __forceinline__ void send_activations(const PrepackedGemmArguments& args, const Tiles& tiles, u32 base,
                                                 u32 rank) {
    const PrefillRings rings(base);
    RingPlace<ACTIVATION_STAGES> place{0, 1};
    wait_for_prerequisites();
    const u32 pieces = tiles.pieces();
    for (u32 piece = 0; piece < pieces; ++piece) {
        const PrefillTile tile = tiles.at(piece, rank);
        u32 chunk = tile.first_group * GROUP_CHUNKS;
        if (piece == 0 && sends_activations_first(args)) chunk += STAGE_CHUNKS, place.advance();
#if DECODES
        for (u32 i = 0; i < GROUP_STAGES; ++i) chunk += STAGE_CHUNKS, place.advance();
        const DecodedGroups decoded(args, tiles.groups);
#endif
#pragma unroll 1
        for (; chunk < tile.last_group * GROUP_CHUNKS; chunk += STAGE_CHUNKS) {
            const bool is_second_half = chunk % GROUP_CHUNKS >= GROUP_CHUNKS / 2;
            if (K_TAIL && is_second_half && ends_early(args, tile.group_at(chunk / GROUP_CHUNKS))) continue;
#if DECODES
            if (chunk % GROUP_CHUNKS == 0) {
                decoded.wait(chunk / GROUP_CHUNKS);
                show_memory_to_copies();
            }
#endif
            mbarrier_wait(rings.activations.empty(place.stage), place.parity);
            send_stage(args, base, rank, tile.first_token, tile.chunk_at(chunk), place.stage);
            place.advance();
        }
#if DECODES
        decoded.leave();
#endif
    }
    if constexpr (CLUSTER > 1) {  // shared memory must outlive what the other block sends, its last arrivals too
        for (u32 i = 0; i < ACTIVATION_STAGES; ++i) {
            mbarrier_wait(rings.activations.empty(place.stage), place.parity);
            place.advance();
        }
    }
}

// One column group of a tile's weights, to an empty stage.
__device__ __forceinline__ void send_group(const PrepackedGemmArguments& args, const Tiles& tiles, u32 base,
                                           const PrefillTile& tile, u32 group, u32 stage) {
    const u32 barrier = PrefillRings(base).weights.full(stage), bytes = tile.row_tiles * TILE_BYTES;
    mbarrier_arrive_expect(barrier, bytes);
    if (bytes != 0) {
        const u64 from = prepacked_tile_offset(group, tile.first_row_tile, tiles.all_row_tiles);
        bulk_load(base + WEIGHTS_AT + stage * WEIGHT_BYTES, args.gemm.b + from, bytes, barrier);
    }
}

// One thread: the block's weights after the first.
__device__ __forceinline__ void send_weights(const PrepackedGemmArguments& args, const Tiles& tiles, u32 base,
                                             u32 rank) {
    const PrefillRings rings(base);
    RingPlace<WEIGHT_STAGES> place{0, 1};
    const u32 pieces = tiles.pieces();
    for (u32 piece = 0; piece < pieces; ++piece) {
        const PrefillTile tile = tiles.at(piece, rank);
        u32 group = tile.first_group;
        if (piece == 0) ++group, place.advance();
#pragma unroll 1
        for (; group < tile.last_group; ++group) {
            mbarrier_wait(rings.weights.empty(place.stage), place.parity);
            send_group(args, tiles, base, tile, tile.group_at(group), place.stage);
            place.advance();
        }
    }
}

extern "C" __global__ void __launch_bounds__((1 + ROW_GROUPS) * GROUP_THREADS, 1)
#if CLUSTER * K_CLUSTER > 1
__cluster_dims__(CLUSTER * K_CLUSTER, 1, 1)
#endif
gemm_prefill(const __grid_constant__ PrepackedGemmArguments args) {
    extern __shared__ __align__(1024) u8 shared_memory[];
    const u32 base = shared_address(shared_memory);
    const PrefillRings rings(base);
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 rank = CLUSTER * K_CLUSTER > 1 ? cluster_rank() : 0;
#if DECODES
    static_assert(ROW_GROUPS * GROUP_THREADS == FirstGroup::THREADS && ROW_BLOCKS == 1 && ONE_PIECE && K_CLUSTER == 1);
    static_assert(ACTIVATION_STAGES >= GROUP_STAGES, "the first column group is there as a whole");
    const u32 consumer = threadIdx.x - GROUP_THREADS;
    const FirstGroup first_group(args, blockIdx.y * TOKENS + rank * FirstGroup::PART,
                                 warp < 4 ? 2 * FirstGroup::PART : consumer);
#endif

    if (warp < 4) {  // what the block needs first is on its way before it meets
        lower_registers<PRODUCER_REGISTERS>();
        const Tiles tiles(args.gemm, args.whole_tiles, args.sharers, args.piece_groups);
        const bool any = tiles.has_any();
        const PrefillTile tile = any ? tiles.at(0, rank) : PrefillTile{};
        if (warp == 0 && lane == 0) {
            rings.activations.init(ROW_GROUPS * CLUSTER);
            mbarrier_fence_init();
            if (any && sends_activations_first(args)) {
                send_stage(args, base, rank, tile.first_token, tile.first_group * GROUP_CHUNKS, 0);
            } else {
                tensor_map_prefetch(&args.activations);
            }
        }
        if (warp == 1 && lane == 0) {
            rings.weights.init(ROW_GROUPS * GROUP_THREADS);
            mbarrier_fence_init();
            if (any) send_group(args, tiles, base, tile, tile.first_group, 0);
        }
        __syncwarp();
#if DECODES
        if (warp >= 4 - DECODING_WARPS) {
            SharedDecoder decoder(args, tiles.groups, warp - (4 - DECODING_WARPS), lane);
            if constexpr (CLUSTER > 1) cluster_meet();
            decoder.run();
            return;
        }
#endif
        if constexpr (CLUSTER > 1) {
            cluster_meet();
        } else {
            if (warp < 2) named_barrier_arrive(START_BARRIER, STARTING_THREADS);
        }
        if (warp == 0 && lane == 0) send_activations(args, tiles, base, rank);
        if (warp == 1 && lane == 0) send_weights(args, tiles, base, rank);
        return;
    }

    fetch_arguments(args, warp - 4);
    raise_registers<CONSUMER_REGISTERS>();
    if (K_CLUSTER > 1 && threadIdx.x == 4 * 32) {  // those that meet initialize what they meet at
        mbarrier_init(rings.sums, 1);
        mbarrier_fence_init();
    }
    const AlphaInputs alpha_from = alpha_inputs(args.gemm);
    if constexpr (CLUSTER > 1) cluster_meet(); else named_barrier_sync(START_BARRIER, STARTING_THREADS);
    if (K_CLUSTER > 1 && threadIdx.x == 4 * 32) {
        mbarrier_arrive_expect(rings.sums, ROW_BLOCKS * SUMS * 4 * GROUP_THREADS);
    }
    const u32 group = warp / 4 - 1, group_warp = warp % 4, group_thread = threadIdx.x % GROUP_THREADS;
    const u32 g = lane / 4, t = lane % 4;
    const auto own_tile = [&](u32 block) { return (group * ROW_BLOCKS + block) * 4 + group_warp; };
    const auto release_activations = [&](u32 stage) {
        if constexpr (CLUSTER > 1) {
            if (group_thread < CLUSTER) mbarrier_arrive_remote(rings.activations.empty(stage), group_thread);
        } else {
            if (group_thread == 0) mbarrier_arrive(rings.activations.empty(stage));
        }
    };
    const u32 tokens = uniform(wgmma_tile_low(base));

    u32 codes[ROW_BLOCKS], scales[ROW_BLOCKS];
#pragma unroll
    for (u32 b = 0; b < ROW_BLOCKS; ++b) {  // beyond the last row tile: read it again
        const u32 tile = base + WEIGHTS_AT + min(own_tile(b), (u32)(ROW_TILES - 1)) * TILE_BYTES;
        codes[b] = tile + prepacked_codes_offset(0, lane);
        scales[b] = tile + prepacked_scales_offset(0, g);
    }
    RingPlace<ACTIVATION_STAGES> activation_place{0, 0};
    RingPlace<WEIGHT_STAGES> weight_place{0, 0};
    u32 fragments[2][STAGE_CHUNKS][ROW_BLOCKS][16];
    const u32 barrier = GROUP_BARRIER + group;
    const auto for_each_block = [](auto action) {  // row block b of chunk i of a stage
#pragma unroll
        for (u32 i = 0; i < STAGE_CHUNKS; ++i) {
#pragma unroll
            for (u32 b = 0; b < ROW_BLOCKS; ++b) action(i, b);
        }
    };
    u32 out_stage = 0;
    const Tiles tiles(args.gemm, args.whole_tiles, args.sharers, args.piece_groups);
    const Shared shared{args, rank, group, group_thread, barrier, base + ARRIVALS_AT + group * 4};

#if DECODES
    first_group.leave(base, rings.activations.full(0), rank, consumer, DECODED_BARRIER);
#endif

    float alpha = ALPHA_LATE ? 0.0f : gemm_alpha(args.gemm, alpha_from);
    const u32 pieces = tiles.pieces();
    for (u32 piece = 0; piece < pieces; ++piece) {
        const PrefillTile tile = tiles.at(piece, rank);
        float sums[ROW_BLOCKS][SUMS];
#pragma unroll
        for (u32 b = 0; b < ROW_BLOCKS; ++b) {
#pragma unroll
            for (u32 i = 0; i < SUMS; ++i) sums[b][i] = 0.0f;
        }
        u32 read_stage = NO_STAGE;  // of activations, still read by products under way
        for (u32 k = tile.first_group; k < tile.last_group; ++k) {
            mbarrier_wait(rings.weights.full(weight_place.stage), weight_place.parity);
#pragma unroll
            for (u32 s = 0; s < GROUP_STAGES; ++s) {
                Words4 words[STAGE_CHUNKS][ROW_BLOCKS];
                Words2 scale_words[STAGE_CHUNKS][ROW_BLOCKS];
                for_each_block([&](u32 i, u32 b) {
                    const u32 c = s * STAGE_CHUNKS + i, stage = weight_place.stage * WEIGHT_BYTES;
                    const u32 chunk_scales = prepacked_scales_offset(c, 0) - prepacked_scales_offset(0, 0);
                    words[i][b] = load_shared_16(codes[b] + stage + prepacked_codes_offset(c, 0));
                    scale_words[i][b] = load_shared_8(scales[b] + stage + chunk_scales);
                });
                for_each_block([&](u32 i, u32 b) {
                    const ChunkScales low = Weights::decode_scales(scale_words[i][b].word[0]);
                    const ChunkScales high = Weights::decode_scales(scale_words[i][b].word[1]);
#pragma unroll
                    for (u32 j = 0; j < 4; ++j) {
                        decode_fragment<Weights>(words[i][b].word[j], low, high, j, fragments[s % 2][i][b] + 4 * j);
                    }
                });
                mbarrier_wait(rings.activations.full(activation_place.stage), activation_place.parity);
                const u32 stage_tokens = tokens + activation_place.stage * (ACTIVATION_BYTES >> 4);
                if (s + 1 == GROUP_STAGES) mbarrier_arrive(rings.weights.empty(weight_place.stage));  // all is decoded
                wgmma_fence();
#pragma unroll
                for (u32 i = 0; i < STAGE_CHUNKS; ++i) {
#pragma unroll
                    for (u32 j = 0; j < 4; ++j) {
                        const u32 at = stage_tokens + i * (CHUNK_TOKEN_BYTES >> 4) + j * WGMMA_K_STEP;
#pragma unroll
                        for (u32 b = 0; b < ROW_BLOCKS; ++b) {
                            warpgroup_product<A_TYPE, TOKENS>(sums[b], fragments[s % 2][i][b] + 4 * j, wgmma_tile(at));
                        }
                    }
                }
                wgmma_commit();
                wgmma_wait<1>();
                if (read_stage != NO_STAGE) release_activations(read_stage);
                read_stage = activation_place.stage;
                activation_place.advance();
                if constexpr (K_TAIL) {
                    if (s + 1 == GROUP_STAGES / 2 && ends_early(args, tile.group_at(k))) {
                        mbarrier_arrive(rings.weights.empty(weight_place.stage));
                        break;
                    }
                }
            }
            weight_place.advance();
        }
        wgmma_wait<0>();
        settle(sums);
        release_activations(read_stage);

        if constexpr (K_CLUSTER > 1) {  // over the activations, which are all read
            const u32 place = base + group_thread * 16;
            cluster_meet();
            if (group != rank) {
                const u32 remote = address_in_block(place, group), arrivals = address_in_block(rings.sums, group);
#pragma unroll
                for (u32 b = 0; b < ROW_BLOCKS; ++b) {
#pragma unroll
                    for (u32 i = 0; i < SUMS; i += 4) {
                        send_floats(remote + (b * SUMS + i) * GROUP_THREADS * 4, sums[b] + i, arrivals);
                    }
                }
                continue;
            }
            mbarrier_wait(rings.sums, 0);
#pragma unroll
            for (u32 b = 0; b < ROW_BLOCKS; ++b) {
#pragma unroll
                for (u32 i = 0; i < SUMS; i += 4) {
                    add_shared_floats(sums[b] + i, place + (b * SUMS + i) * GROUP_THREADS * 4);
                }
            }
        }
        if constexpr (Tiles::SHARES) {
            if (tile.shared != NOT_SHARED && !shared.add(tiles, tile.shared, sums[0])) continue;
        }
        if (ALPHA_LATE) alpha = gemm_alpha(args.gemm);
        const ResultWriter writer = result_writer(args.gemm, Weights::PRODUCT_INVERSE, alpha);
        const bool transposed = leaves_transposed(args.gemm);
        const u32 end_row = min((u32)args.gemm.n, (tile.first_row_tile + tile.row_tiles) * TILE_ROWS);
#pragma unroll
        for (u32 b = 0; b < ROW_BLOCKS; ++b) {
            const u32 first_row = (tile.first_row_tile + (group * ROW_BLOCKS + b) * 4) * TILE_ROWS;
            const u32 row = first_row + group_warp * TILE_ROWS + g;
            if (first_row >= end_row) break;
            if (!transposed) {
                if (own_tile(b) < tile.row_tiles) {
                    write_sums<TOKENS / 8>(args.gemm, writer, sums[b], tile.first_token + 2 * t, row);
                }
                continue;
            }
            const auto leave = [&](const auto& pair_of) {
#pragma unroll
                for (u32 token = 0; token < TOKENS; token += OUT_TOKENS) {
                    const Results results{base + OUT_AT + (group * OUT_STAGES + out_stage) * Results::BYTES};
                    if (++out_stage == OUT_STAGES) out_stage = 0;
                    results.stage(pair_of, sums[b] + token / 2, group_warp, lane);
                    show_to_copies();
                    if (group_thread == 0) wait_until_read<OUT_STAGES - 2>();  // what the next pass writes over
                    named_barrier_sync(barrier, GROUP_THREADS);
                    if (group_thread == 0) results.send(&args.results, tile.first_token + token, first_row);
                }
            };
            if (are_plain<A_TYPE>(args.gemm, writer)) {
                leave(PlainPairs<A_TYPE>{writer});
            } else {
                apply_first<SUMS>(writer, sums[b]);
                leave(FinishedPairs{writer, bias_or_nothing(args.gemm, row), bias_or_nothing(args.gemm, row + 8)});
            }
        }
    }
    if (group_thread == 0) wait_until_read<0>();  // shared memory must outlive it
}
