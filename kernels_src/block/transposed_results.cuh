// Finished results of two bytes from registers to (m, n): a lane has two tokens of a row, memory wants rows of a token.
//
// PASS tokens of 16 WARPS rows (of the weight) at a time go through shared memory, transposed on the way in, and leave
// either in accesses of 16 bytes, 32 WARPS bytes of a token side by side, or as one copy.
//
//   shared memory   [PASS tokens][2 WARPS units of 16 bytes], units swizzled by the token
#pragma once
#include "block/result_writer.cuh"
#include "ptx/bulk_copy.cuh"
#include "ptx/global_memory.cuh"
#include "ptx/pair_convert.cuh"
#include "ptx/shared_memory.cuh"
#include "ptx/store_matrix.cuh"

// Whether results can leave so; what cannot goes through write_sums.
__device__ __forceinline__ bool leaves_transposed(const GemmArguments& args) {
    return args.out_type != FLOAT32 && args.n % 8 == 0 && (u64)args.out % 16 == 0;
}

template <u32 WARPS, u32 PASS>
struct TransposedResults {
    static constexpr u32 UNITS = 2 * WARPS, TOKEN_BYTES = UNITS * 16, BYTES = PASS * TOKEN_BYTES;
    static constexpr u32 TURN = 8 / UNITS;  // tokens after which a unit lies in other banks
    static_assert(PASS == 8 || PASS % 16 == 0, "whole matrices");
    u32 shared;

    __device__ __forceinline__ u32 place(u32 token, u32 unit) const {
        return shared + token * TOKEN_BYTES + ((unit ^ token / TURN % UNITS) << 4);
    }

    // A warp's 16 rows, as mma.sync and wgmma leave the sums of PASS tokens; PlainPairs or FinishedPairs.
    template <class Pairs>
    __device__ __forceinline__ void stage(const Pairs& pair_of, const float* sums, u32 warp, u32 lane) const {
        const u32 unit = warp * 2 + lane / 8 % 2;
        if constexpr (PASS == 8) {
            store_matrix_x2_transposed(place(lane % 8, unit), pair_of(sums, false), pair_of(sums + 2, true));
        } else {
#pragma unroll
            for (u32 q = 0; q < PASS / 8; q += 2) {  // matrices (tokens, rows): (0-7, 0-7), (0-7, 8-15), (8-15, 0-7) ...
                u32 pairs[4];
#pragma unroll
                for (u32 i = 0; i < 4; ++i) pairs[i] = pair_of(sums + 4 * q + 2 * i, i % 2 != 0);
                store_matrix_x4_transposed(place(q * 8 + lane / 16 * 8 + lane % 8, unit), pairs[0], pairs[1], pairs[2],
                                           pairs[3]);
            }
        }
    }

    // One thread, when those that staged have shown it to copies and met: in a group of its own. `results` is a map of
    // (m, n); all rows up to n are results.
    __device__ __forceinline__ void send(const TensorMap* results, u32 first_token, u32 first_row) const {
        static_assert(UNITS == 8 && PASS % 8 == 0, "swizzled as the map swizzles 128 bytes");
        tensor_store(results, first_row, first_token, 0, shared);
        commit_stores();
    }

    // THREADS threads: tokens from `first_token` on, rows from `first_row` to `end_row`.
    template <u32 THREADS>
    __device__ __forceinline__ void store(const GemmArguments& args, u32 first_token, u32 first_row, u32 end_row,
                                          u32 thread) const {
        constexpr u32 SWEEP = THREADS / UNITS;  // tokens that leave with one access a thread
        static_assert(PASS % SWEEP == 0 || PASS < SWEEP, "whole sweeps");
        const u32 unit = thread % UNITS, row = first_row + unit * 8;
#pragma unroll 4
        for (u32 token = thread / UNITS; token < PASS; token += SWEEP) {
            const Words4 eight = load_shared_16(place(token, unit));
            if (first_token + token < args.m && row < end_row) {
                store_16((u8*)args.out + ((first_token + token) * args.n + row) * 2, eight.word);
            }
        }
    }
};
