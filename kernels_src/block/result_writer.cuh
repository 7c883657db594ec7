// Sums from registers to (m, n) in global memory, without a branch an element: code that runs once should be short.
//
// Results take alpha, bias and one rounding.
// A lane's sums lie as mma.sync leaves them: rows of the weight g and g + 8, tokens 2t and 2t + 1.
#pragma once
#include "block/gemm_epilogue.cuh"
#include "ptx/pair_convert.cuh"

struct ResultWriter {
    u8* out;      // at row 0, token 0
    i64 n;        // elements from one token to the next
    u32 m;
    u32 wide;     // 1 where an element is fp32, 0 where it has two bytes
    bool half;    // two bytes: fp16, or bf16
    float factor;  // alpha, times what makes a sum of decoded products a true one (a power of two: it rounds nothing)
    float first;   // 1; where the factor would overflow it is alpha's alone, and this the power of two
};

__device__ __forceinline__ ResultWriter result_writer(const GemmArguments& args, float product_inverse, float alpha) {
    const Alpha factors = alpha_factors(args, alpha);
    const bool fits = fabsf(factors.factor) < 0x1p100f && factors.first == 1.0f;
    return {(u8*)args.out,
            args.n,
            (u32)args.m,
            args.out_type == FLOAT32,
            args.out_type == FLOAT16,
            fits ? alpha * product_inverse : factors.factor,
            fits ? 1.0f : factors.first * product_inverse};
}

// To be done once to all sums.
template <u32 COUNT>
__device__ __forceinline__ void apply_first(const ResultWriter& writer, float* sums) {
    if (writer.first == 1.0f) return;
#pragma unroll
    for (u32 i = 0; i < COUNT; ++i) sums[i] *= writer.first;
}

// The bias of a row, and -0 where there is none: adding it changes no bit.
__device__ __forceinline__ float bias_or_nothing(const GemmArguments& args, i64 row) {
    return args.bias == nullptr || row >= args.n ? -0.0f : gemm_bias(args, row);
}

__device__ __forceinline__ float finished(const ResultWriter& writer, float sum, float bias) {
    return sum * writer.factor + bias;
}

// Whether results are sums times the factor, in the activations' own TYPE of two bytes: most are. Their way out has its own
// instructions, half as many: a short product fetches them from memory at its end, when it has nothing else to do.
template <i32 TYPE>
__device__ __forceinline__ bool are_plain(const GemmArguments& args, const ResultWriter& writer) {
    return args.out_type == TYPE && args.bias == nullptr && writer.first == 1.0f;
}

// Results of two neighbouring tokens, of row g or, `high`, g + 8.
template <i32 TYPE>
struct PlainPairs {
    const ResultWriter& writer;

    __device__ __forceinline__ u32 operator()(const float* two, bool = false) const {
        const float low = two[0] * writer.factor, high_token = two[1] * writer.factor;
        return TYPE == FLOAT16 ? f16x2_from_floats(low, high_token) : bf16x2_from_floats(low, high_token);
    }
};

struct FinishedPairs {
    const ResultWriter& writer;
    float bias, bias_high;  // of rows g and g + 8

    __device__ __forceinline__ u32 operator()(const float* two, bool high) const {
        const float of_row = high ? bias_high : bias;
        const float low = finished(writer, two[0], of_row), high_token = finished(writer, two[1], of_row);
        return writer.half ? f16x2_from_floats(low, high_token) : bf16x2_from_floats(low, high_token);
    }
};

__device__ __forceinline__ void write_result(const ResultWriter& writer, u32 token, i64 row, float sum, float bias) {
    const float value = finished(writer, sum, bias);
    const u16 bits = writer.half ? f16_from_float(value) : bf16_from_float(value);
    u8* const at = writer.out + ((token * writer.n + row) << 1 + writer.wide);
    if (token < writer.m && row < writer.n) {
        if (writer.wide) {
            *(float*)at = value;
        } else {
            *(u16*)at = bits;
        }
    }
}

// The sums of 16 rows x 8 TOKEN_TILES tokens: a lane's are 4 for every 8 tokens; `token` and `row` are its first.
template <u32 TILES>
__device__ __forceinline__ void write_sums(const GemmArguments& args, const ResultWriter& writer, float* sums,
                                           u32 token, u32 row) {
    const float bias = bias_or_nothing(args, row), bias_high = bias_or_nothing(args, row + 8);
    apply_first<4 * TILES>(writer, sums);
#pragma unroll
    for (u32 q = 0; q < TILES; ++q) {
        write_result(writer, token + 8 * q, row, sums[4 * q], bias);
        write_result(writer, token + 8 * q + 1, row, sums[4 * q + 1], bias);
        write_result(writer, token + 8 * q, row + 8, sums[4 * q + 2], bias_high);
        write_result(writer, token + 8 * q + 1, row + 8, sums[4 * q + 3], bias_high);
    }
}

// The same where results are plain.
template <u32 TILES, i32 TYPE>
__device__ __forceinline__ void write_plain_sums(const ResultWriter& writer, const float* sums, u32 token, u32 row) {
    u16* const at = (u16*)writer.out + (token * writer.n + row);
    const bool has_row = row < writer.n, has_high = row + 8 < writer.n;
#pragma unroll
    for (u32 q = 0; q < TILES; ++q) {
        const PlainPairs<TYPE> pair_of{writer};
        const u32 pair = pair_of(sums + 4 * q), pair_high = pair_of(sums + 4 * q + 2);
#pragma unroll
        for (u32 i = 0; i < 2; ++i) {
            u16* const to = at + (8 * q + i) * writer.n;
            const bool has_token = token + 8 * q + i < writer.m;
            if (has_token && has_row) to[0] = (u16)(pair >> 16 * i);
            if (has_token && has_high) to[8] = (u16)(pair_high >> 16 * i);
        }
    }
}
