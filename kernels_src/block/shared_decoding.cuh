// NVFP4 activations of a large product, decoded by its own blocks: each value once for all of them, as code * scale in
// bf16, without the global scale, which alpha carries.
//
//   first column group    a block decodes its part of its tokens into its own stages (FirstGroup), copies that to the other
//                         block of its cluster, and multiplies: nobody waits for what goes through memory
//   the others            DECODING_WARPS warps of each block that have nothing else to do decode the tokens of their token
//                         tile into `decoded`, four at a time (SharedDecoder); from there the copy engine brings them
//
// A word for each column group has a bit for each four tokens that are there (DecodedGroups). Blocks need not run
// together: what is still missing after a while, the warps of any block that waits decode themselves. A value is the same
// whoever decodes it, so it may be written twice.
//
// The words of a slot are 0 when the module is loaded and when a launch ends. Two launches never share a slot while both
// may run, so a slot belongs to a stream, or to one node of a graph.
//
// On entry: k > 256; codes at multiples of 16 bytes, an even number of block columns; scales at multiples of 4, four
// columns of a row beside each other; a row of blocks for each token tile (GridTile).
#pragma once
#include "block/prepacked_arguments.cuh"
#include "block/scale_rows.cuh"
#include "layout/prepacked.cuh"
#include "mma/nvfp4_pairs.cuh"
#include "ptx/blocks.cuh"
#include "ptx/global_memory.cuh"
#include "ptx/integer_arithmetic.cuh"
#include "ptx/other_blocks.cuh"
#include "ptx/shared_memory.cuh"

// Defined by the launcher: TOKENS, CLUSTER, STAGE_CHUNKS, SLOTS, SLOT_WORDS.
__device__ u64 decoded_words[SLOTS][SLOT_WORDS];

constexpr u32 DECODING_WARPS = 2;  // of a block
constexpr u32 ITEM_TOKENS = 4;     // that a warp decodes together
constexpr u32 WORD_CODES = 8, CODES_BYTES = CHUNK_COLUMNS / 2;  // of a word; of a token's chunk
static_assert(GROUP_COLUMNS == 32 * WORD_CODES, "a warp decodes a token's column group in one go");

// What is decoded of the block's token tile: the words of its column groups, then how many parties have done with them.
struct DecodedGroups {
    static_assert(TOKENS <= 64 * ITEM_TOKENS, "a word has a bit for each item");
    const u32 first_token, tokens, items, groups;
    u64* const words;
    const u64 all;

    __device__ __forceinline__ DecodedGroups(const PrepackedGemmArguments& args, u32 groups)
        : first_token(blockIdx.y * TOKENS),
          tokens((u32)min((u64)TOKENS, (u64)args.gemm.m - first_token)),
          items((tokens + ITEM_TOKENS - 1) / ITEM_TOKENS),
          groups(groups),
          words(decoded_words[args.slot] + blockIdx.y * (groups + 1)),
          all(~0ull >> (64 - items)) {}

    __device__ __forceinline__ void wait(u32 group) const { wait_for_bits(words + group, all); }

    // One thread of each party, after its last look: the last one leaves zeros.
    __device__ __forceinline__ void leave() const {
        const u32 parties = gridDim.x * (DECODING_WARPS + 1);
        if (count_up_in_order((u32*)(words + groups)) + 1 != parties) return;
        for (u32 i = 0; i <= groups; ++i) words[i] = 0;
    }
};

// A warp that decodes.
struct SharedDecoder {
    static constexpr u32 PATIENCE = 16;  // looks at a word, some 10 us together

    // Where the lane's part of an item lies.
    struct Place {
        const u8* codes;
        const u8* scales;
        u8* to;
        u32 last;  // the place of the item that has no token

        // The same tokens in the next group.
        __device__ __forceinline__ void next_group(u64 scale_group_stride) {
            codes += GROUP_CHUNKS * CODES_BYTES, scales += GROUP_CHUNKS * scale_group_stride, to += GROUP_COLUMNS * 2;
        }
    };

    const PrepackedGemmArguments& args;
    const ScaleRows rows;
    const DecodedGroups decoded;
    const u32 helper, lane;
    const u64 code_pitch, scale_pitch, value_pitch;  // from a token to the next one within an item, in every layout
    u32 word[ITEM_TOKENS], scale[ITEM_TOKENS];       // of an item: four tokens of a column group
    Place next;

    // Its first item is on its way.
    __device__ __forceinline__ SharedDecoder(const PrepackedGemmArguments& args, u32 groups, u32 warp, u32 lane)
        : args(args),
          rows(args.gemm.a_scales, args.gemm.a_layout, args.gemm.a_columns),
          decoded(args, groups),
          helper(blockIdx.x * DECODING_WARPS + warp),
          lane(lane),
          code_pitch((u64)args.gemm.a_columns * (BLOCK / 2)),
          scale_pitch(rows.row(1) - rows.row(0)),
          value_pitch((args.gemm.k + BLOCK - 1) / BLOCK * (BLOCK * 2)) {
        if (helper >= decoded.items) return;
        next = place(1, helper);
        load_all(next);
    }

    // Of an item's places, those where there are tokens; 0 where the lane's eight columns are past the blocks of k.
    __device__ __forceinline__ u32 places(u32 group, u32 item) const {
        return group * GROUP_COLUMNS + lane / 2 * BLOCK < (u32)args.gemm.k ? decoded.tokens - item * ITEM_TOKENS : 0;
    }

    __device__ __forceinline__ Place place(u32 group, u32 item) const {
        const u64 token = decoded.first_token + item * ITEM_TOKENS;
        const u32 chunk = group * GROUP_CHUNKS + lane * WORD_CODES / CHUNK_COLUMNS;
        return {args.gemm.a + token * code_pitch + (group * 32 + lane) * (WORD_CODES / 2),
                rows.row(token) + rows.group(chunk) + lane / 2 % 4,
                args.decoded + token * value_pitch + (group * 32 + lane) * (WORD_CODES * 2), places(group, item)};
    }

    __device__ __forceinline__ void load(const Place& from, u32 i) {
        if (i < from.last) word[i] = load_4(from.codes + i * code_pitch), scale[i] = load_1(from.scales + i * scale_pitch);
    }

    __device__ __forceinline__ void load_all(const Place& from) {
#pragma unroll
        for (u32 i = 0; i < ITEM_TOKENS; ++i) load(from, i);
    }

    // Decodes what is loaded, and loads the next item.
    __device__ __forceinline__ void decode(u32 group, u32 item, u8* to, u32 last, const Place& next) {
#pragma unroll
        for (u32 i = 0; i < ITEM_TOKENS; ++i) {
            u32 values[4];
            decode_values(word[i], both_low(BFloat16Pairs::scales(scale[i])), values);
            load(next, i);
            if (i < last) store_16(to + i * value_pitch, values);
        }
        __syncwarp();
        if (lane == 0) announce_bits(decoded.words + group, 1ull << item);
    }

    __device__ __forceinline__ void run() {
        const u32 items = decoded.items, groups = decoded.groups, helpers = gridDim.x * DECODING_WARPS;
        u32 group = helper < items ? 1 : groups, item = helper;
#pragma unroll 1
        while (group < groups) {
            u8* const to = next.to;
            const u32 last = next.last, this_group = group, this_item = item;
            if (helpers >= items) {
                ++group, next.next_group(rows.group_stride);
            } else {
                item += helpers;
                if (item >= items) item = helper, ++group;
                next = place(group, item);
            }
            next.last = group < groups ? places(group, item) : 0;
            decode(this_group, this_item, to, last, next);
        }
#pragma unroll 1
        for (group = 1; group < groups; ++group) {
            for (u32 looks = 0;; ++looks) {
                const u64 missing = decoded.all & ~first_lane(look(decoded.words + group));
                if (missing == 0) break;
                if (looks < PATIENCE) continue;
                const u64 from_own = missing >> helper % 64 << helper % 64;  // not all warps the same
                item = lowest_bit(from_own != 0 ? from_own : missing);
                next = place(group, item);
                load_all(next);
                decode(group, item, next.to, next.last, {});
            }
        }
        if (lane == 0) decoded.leave();
    }
};

// The consumers' part of the first column group, 32 codes of each chunk a thread: a token's half.
struct FirstGroup {
    static constexpr u32 PART = TOKENS / CLUSTER, THREADS = 256, STAGES = GROUP_CHUNKS / STAGE_CHUNKS;
    static constexpr u32 CHUNK_BYTES = TOKENS * CHUNK_COLUMNS * 2, PART_BYTES = PART * CHUNK_COLUMNS * 2;
    static_assert(2 * PART <= THREADS, "a thread has half a token's chunk");

    const u32 half, token;  // in the block's part
    u32 word[GROUP_CHUNKS][4], scales[GROUP_CHUNKS];

    // What it needs is on its way; tokens past m are others once more, and make only sums that nobody stores.
    __device__ __forceinline__ FirstGroup(const PrepackedGemmArguments& args, u32 first_token, u32 thread)
        : half(thread % 2), token(thread / 2) {
        if (token >= PART) return;
        const u64 row = min((u64)first_token + token, (u64)args.gemm.m - 1);
        const ScaleRows rows(args.gemm.a_scales, args.gemm.a_layout, args.gemm.a_columns);
        const u8* const codes = args.gemm.a + row * args.gemm.a_columns * (BLOCK / 2) + half * (CODES_BYTES / 2);
        const u8* const row_scales = rows.row(row);
#pragma unroll
        for (u32 c = 0; c < GROUP_CHUNKS; ++c) load_16(codes + c * CODES_BYTES, word[c]);
#pragma unroll
        for (u32 c = 0; c < GROUP_CHUNKS; ++c) scales[c] = load_4(row_scales + rows.group(c));
    }

    // To the block's part `rank` of the stages at `base`, whose barriers are `full`, 8 bytes apart; and to the other
    // block's. All consumers meet at `barrier`.
    __device__ __forceinline__ void leave(u32 base, u32 full, u32 rank, u32 thread, u32 barrier) const {
        const u32 part = base + rank * PART_BYTES, row = part + token * (CHUNK_COLUMNS * 2);
        if (token < PART) {
#pragma unroll
            for (u32 c = 0; c < GROUP_CHUNKS; ++c) {
                const u32 pair = BFloat16Pairs::scales(half != 0 ? scales[c] >> 16 : scales[c] & 0xFFFFu);
#pragma unroll
                for (u32 j = 0; j < 4; ++j) {
                    u32 values[4];
                    decode_values(word[c][j], j / 2 != 0 ? both_high(pair) : both_low(pair), values);
                    store_shared_16(row + c * CHUNK_BYTES + ((half * 4 + j ^ row / (CHUNK_COLUMNS * 2) % 8) << 4), values);
                }
            }
        }
        show_to_copies();
        named_barrier_sync(barrier, THREADS);
        if (thread != 0) return;
        for (u32 s = 0; s < STAGES; ++s) {
            const u32 stage_full = full + s * MBARRIER_BYTES;
            if constexpr (CLUSTER == 1) {
                mbarrier_arrive(stage_full);
            } else {
                mbarrier_arrive_expect(stage_full, STAGE_CHUNKS * PART_BYTES);
                const u32 other_full = address_in_block(stage_full, rank ^ 1);
#pragma unroll
                for (u32 i = 0; i < STAGE_CHUNKS; ++i) {
                    const u32 at = part + (s * STAGE_CHUNKS + i) * CHUNK_BYTES;
                    send_bytes(address_in_block(at, rank ^ 1), at, PART_BYTES, other_full);
                }
            }
        }
    }
};
