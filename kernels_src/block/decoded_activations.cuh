// NVFP4 activations as bf16 in the stages of block/prepacked_stages.cuh: decode, few tokens.
//
// ACTIVATION_WARPS warps do nothing else, where otherwise the copy engine brings bf16. They hold one stage's codes in
// registers while the next one's are on their way. What they write is code * scale * 2^-8, exact in bf16;
// DECODED_INVERSE makes it true. Tokens past m are not written: they make only sums that nobody stores.
//
//   thread    block column `thread % STAGE_BLOCKS` of a stage; token `thread / STAGE_BLOCKS`, every ROUND_TOKENS-th on
//
// Each thread arrives for itself: a race checker follows no others.
//
// Defined by the kernel: what block/prepacked_stages.cuh names.
#pragma once
#include "block/prepacked_stages.cuh"
#include "block/scale_rows.cuh"
#include "mma/nvfp4_pairs.cuh"
#include "ptx/global_memory.cuh"
#include "ptx/shared_memory.cuh"

struct DecodedActivations {
    static constexpr float DECODED_INVERSE = BFloat16Pairs::PRODUCT_INVERSE;
    static constexpr u32 CODE_BYTES = BLOCK / CODES_PER_BYTE;
    static constexpr u32 STAGE_BLOCKS = STAGE_CHUNKS * CHUNK_COLUMNS / BLOCK;
    static constexpr u32 ROUND_TOKENS = 32 * ACTIVATION_WARPS / STAGE_BLOCKS;
    static constexpr u32 ROUNDS = (8 * TOKEN_TILES + ROUND_TOKENS - 1) / ROUND_TOKENS;
    static_assert(32 * ACTIVATION_WARPS % STAGE_BLOCKS == 0, "whole tokens a round");

    struct Held {
        u32 codes[ROUNDS][2], scale[ROUNDS];
    };

    const u8* codes[ROUNDS];   // of the thread's tokens, at its block column of the first stage
    const u8* scales[ROUNDS];  // rows of the thread's tokens
    u64 group_stride;
    u32 m, k, block, token;

    __device__ __forceinline__ DecodedActivations(const GemmArguments& args, u32 thread)
        : m((u32)args.m), k(args.k), block(thread % STAGE_BLOCKS), token(thread / STAGE_BLOCKS) {
        const ScaleRows rows(args.a_scales, args.a_layout, args.a_columns);
        group_stride = rows.group_stride;
        const u64 code_bytes = (u64)m * args.a_columns * CODE_BYTES;
        const u32 tile_rows = 1u << rows.layout.tile_rows_log2;
        prefetch(args.a, code_bytes, thread);
        prefetch(args.a_scales, rows.row((m + tile_rows - 1) / tile_rows * tile_rows) - rows.scales, thread);
#pragma unroll
        for (u32 r = 0; r < ROUNDS; ++r) {
            const u32 row = min(token + r * ROUND_TOKENS, m - 1);  // past m: loaded, and not stored
            codes[r] = args.a + ((u64)row * args.a_columns + block) * CODE_BYTES;
            scales[r] = rows.row(row);
        }
    }

    // Zeros past k.
    __device__ __forceinline__ Held load(u32 unit) const {
        const u32 column = unit * STAGE_BLOCKS + block;
        Held held = {};
        if (column * BLOCK < k) {
#pragma unroll
            for (u32 r = 0; r < ROUNDS; ++r) {
                load_8(codes[r] + unit * (STAGE_BLOCKS * CODE_BYTES), held.codes[r]);
                held.scale[r] = load_1(scales[r] + column / 4 * group_stride + column % 4);
            }
        }
        return held;
    }

    __device__ __forceinline__ void store(const Held& held, u32 unit, u32 stage) const {
        const u32 chunk = stage + block / 4 * CHUNK_TOKEN_BYTES;
        const u32 left = k - min(k, (unit * STAGE_BLOCKS + block) * BLOCK);  // columns of the block and after it
#pragma unroll
        for (u32 r = 0; r < ROUNDS; ++r) {
            const u32 row = token + r * ROUND_TOKENS;
            if (row >= m) break;
            const u32 scale = both_low(BFloat16Pairs::scales(held.scale[r]));
#pragma unroll
            for (u32 half = 0; half < 2; ++half) {
                u32 pair[4], natural[4];
                BFloat16Pairs::decode(held.codes[r][half], pair);
#pragma unroll
                for (u32 j = 0; j < 4; ++j) pair[j] = multiply_bf16x2(pair[j], scale);
                paired_to_natural(pair, natural);
                if (left < BLOCK) keep_first(left - min(left, half * 8), natural);
                const u32 unit_of_token = block % 4 * 2 + half;
                store_shared_16(chunk + row * (CHUNK_COLUMNS * 2) + ((unit_of_token ^ row % 8) << 4), natural);
            }
        }
    }

  private:
    // All blocks together: stages would else come one latency of the memory after the other.
    static __device__ __forceinline__ void prefetch(const u8* first, u64 bytes, u32 thread) {
        constexpr u32 LINE_BYTES = 128, THREADS = 32 * ACTIVATION_WARPS;
        for (u64 at = (u64)(blockIdx.x * THREADS + thread) * LINE_BYTES; at < bytes; at += (u64)gridDim.x * THREADS * LINE_BYTES) {
            prefetch_line(first + at);
        }
    }

    static __device__ __forceinline__ void keep_first(u32 count, u32 (&natural)[4]) {
#pragma unroll
        for (u32 j = 0; j < 4; ++j) {
            if (count < 2 * j + 2) natural[j] &= count < 2 * j + 1 ? 0u : 0xFFFFu;
        }
    }
};

// The warps with ACTIVATION_WARPS: everything that the block needs.
__device__ __forceinline__ void decode_activations(const PrepackedGemmArguments& args, const PrepackedStages& stages,
                                                   u32 thread) {
    PrepackedWalk walk(args.gemm);
    if (walk.done()) return;
    const DecodedActivations activations(args.gemm, thread);
    RingPlace<STAGES> place{0, 1};
    DecodedActivations::Held next = activations.load(walk.unit);
    while (!walk.done()) {
        const DecodedActivations::Held held = next;
        const u32 unit = walk.unit;
        walk.next_unit();
        if (!walk.done()) next = activations.load(walk.unit);
        mbarrier_wait(stages.barriers.empty(place.stage), place.parity);
        activations.store(held, unit, stages.base + place.stage * STAGE_BYTES + ACTIVATIONS_AT);
        mbarrier_arrive(stages.barriers.full(place.stage));
        place.advance();
    }
}
