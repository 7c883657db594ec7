// Weights and activations on their way to shared memory: decode and small, whose tile holds all tokens.
//
// One warp fills the stages. A stage takes a unit of k: the block's weights in bulk, the activations by tensor map, unless
// ACTIVATION_WARPS other warps decode them (block/decoded_activations.cuh). Few stages are enough and more are slower:
// blocks then drift apart and read memory less in order.
//
//   stage      [STAGE_GROUPS][ROW_TILES, the block's own first][2304] weights,
//              then [4 STAGE_GROUPS][8 TOKEN_TILES tokens][128] activations
//   beyond the last column group: that group again, times activations that are 0
//
// Defined by the kernel: TOKEN_TILES, ROW_TILES, OWN_TILES, STAGE_GROUPS, STAGES, ACTIVATION_WARPS, ACTIVATIONS_AT (in a
// stage), STAGE_BYTES, BARRIERS_AT.
#pragma once
#include "block/prepacked_arguments.cuh"
#include "block/prepacked_work.cuh"
#include "block/ring.cuh"
#include "ptx/blocks.cuh"
#include "ptx/cache_policy.cuh"

constexpr u32 STAGE_CHUNKS = STAGE_GROUPS * GROUP_CHUNKS;
constexpr u32 CHUNK_TOKEN_BYTES = 8 * TOKEN_TILES * CHUNK_COLUMNS * 2;
constexpr u32 COPIED_TOKEN_BYTES = ACTIVATION_WARPS == 0 ? STAGE_CHUNKS * CHUNK_TOKEN_BYTES : 0;  // of a stage
constexpr u32 GROUP_BYTES = ROW_TILES * TILE_BYTES;  // of one column group in a stage
constexpr u32 WEIGHT_COPIES = OWN_TILES > 0 ? 2 : 1;  // of a column group: the block's own row tiles lie elsewhere
static_assert(STAGE_CHUNKS + WEIGHT_COPIES * STAGE_GROUPS <= 32, "each lane of the producer starts at most one copy");

struct PrepackedStages {
    u32 base;
    RingBarriers<STAGES> barriers;

    __device__ __forceinline__ explicit PrepackedStages(u32 shared) : base(shared), barriers{shared + BARRIERS_AT} {}

    __device__ __forceinline__ void send_weights(const PrepackedGemmArguments& args, const PrepackedWalk& walk,
                                                 u32 stage, u32 lane, u64 policy) const {
        const u32 tiles = walk.takes(walk.unit) ? walk.work.tiles : 0;
        if (lane == 0) {
            const u32 weight_bytes = STAGE_GROUPS * (walk.work.own_tiles + tiles) * TILE_BYTES;
            mbarrier_arrive_expect(barriers.full(stage), weight_bytes + COPIED_TOKEN_BYTES);
        }
        __syncwarp();
        if (lane < WEIGHT_COPIES * STAGE_GROUPS) {
            const bool own = lane >= STAGE_GROUPS;
            const u32 place = own ? lane - STAGE_GROUPS : lane, count = own ? walk.work.own_tiles : tiles;
            const u32 group = min(walk.unit * STAGE_GROUPS + place, walk.groups - 1);
            const u32 to = base + stage * STAGE_BYTES + place * GROUP_BYTES + (own ? 0 : OWN_TILES * TILE_BYTES);
            const u32 first = own ? walk.work.own_first_tile : walk.work.first_tile;
            if (OWN_TILES == 0 || count > 0) {
                bulk_load_policy(to, args.gemm.b + prepacked_tile_offset(group, first, walk.row_tiles),
                                 count * TILE_BYTES, barriers.full(stage), policy);
            }
        }
    }

    __device__ __forceinline__ void send_activations(const PrepackedGemmArguments& args, const PrepackedWalk& walk,
                                                     u32 stage, u32 lane) const {
        if (COPIED_TOKEN_BYTES == 0) return;
        const u32 to = base + stage * STAGE_BYTES + ACTIVATIONS_AT, first = walk.unit * STAGE_CHUNKS;
        if (args.whole_chunks != 0) {
            if (lane == 31) tensor_load(to, &args.activations, 0, 0, first, barriers.full(stage));
        } else if (lane >= 32 - STAGE_CHUNKS) {
            const u32 chunk = lane - (32 - STAGE_CHUNKS);
            tensor_load(to + chunk * CHUNK_TOKEN_BYTES, &args.activations, (first + chunk) * CHUNK_COLUMNS, 0, 0,
                        barriers.full(stage));
        }
    }

    __device__ __forceinline__ void init_barriers(u32 consumers) const {
        barriers.init(consumers, 1 + 32 * ACTIVATION_WARPS);
        mbarrier_fence_init();
    }

    // The warp that initialized the barriers: everything that the block needs copied.
    __device__ __forceinline__ void produce(const PrepackedGemmArguments& args, u32 lane) const {
        const u64 read_once = evict_first_policy();
        PrepackedWalk walk(args.gemm);
        RingPlace<STAGES> place{0, 1};
        if (COPIED_TOKEN_BYTES != 0 && args.dependent) {
            // Another kernel still writes the activations. The first weights need not wait for it; more of them would
            // hold up what it reads itself.
            send_weights(args, walk, place.stage, lane, read_once);
            wait_for_prerequisites();
            send_activations(args, walk, place.stage, lane);
            place.advance();
            walk.next_unit();
        }
#pragma unroll 1
        for (; !walk.done(); walk.next_unit()) {
            mbarrier_wait(barriers.empty(place.stage), place.parity);
            send_weights(args, walk, place.stage, lane, read_once);
            send_activations(args, walk, place.stage, lane);
            place.advance();
        }
    }
};
