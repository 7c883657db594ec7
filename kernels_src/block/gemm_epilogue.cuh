// From an fp32 sum to an element of the result: alpha, bias, one rounding; every product of this folder ends here.
//
// alpha and bias apply in fp32, each rounded on its own: (sum * alpha) + bias. 1 / (product of the global scales) may lie
// beyond fp32's normal numbers and products within them: it is then applied in two factors, one of them a power of two.
#pragma once
#include "block/gemm_arguments.cuh"
#include "ptx/half_convert.cuh"

struct Alpha {
    float factor;
    float first;  // applies before the factor; 1, or a power of two
};

constexpr float ALPHA_STEP = 0x1p64f;

// What alpha takes from memory, asked for on its own: other loads can be on their way at the same time.
struct AlphaInputs {
    float a;  // alpha itself where an array has it, otherwise the global scale of A
    float b_global;
};

__device__ __forceinline__ AlphaInputs alpha_inputs(const GemmArguments& args) {
    AlphaInputs inputs = {1.0f, 1.0f};
    if (args.alpha_array != nullptr) {
        inputs.a = *args.alpha_array;
    } else if (args.a_global != nullptr) {
        inputs.a = *args.a_global;
    }
    if (args.b_global != nullptr) inputs.b_global = *args.b_global;
    return inputs;
}

// alpha as given, or 1 / (product of the global scales), taken in fp64 so that it cannot overflow on the way. Where that
// is no normal number of fp32, it comes ALPHA_STEP nearer to 1 and negative, which no scales give: for alpha_factors.
__device__ __forceinline__ float gemm_alpha(const GemmArguments& args, AlphaInputs inputs) {
    if (args.alpha_array != nullptr) return inputs.a;
    if (args.b_global == nullptr) return args.alpha;
    const double alpha = 1.0 / ((double)inputs.a * (double)inputs.b_global);
    if (alpha >= (double)0x1p-126f && alpha <= (double)FP32_MAX) return (float)alpha;
    const float nearer = (float)(alpha * (alpha > 1.0 ? 1.0 / (double)ALPHA_STEP : (double)ALPHA_STEP));
    return -(nearer > FP32_MAX ? FP32_MAX : nearer);  // infinity times a sum of zero would be NaN
}

__device__ __forceinline__ float gemm_alpha(const GemmArguments& args) { return gemm_alpha(args, alpha_inputs(args)); }

// What gemm_alpha's result stands for.
__device__ __forceinline__ Alpha alpha_factors(const GemmArguments& args, float alpha) {
    const bool nearer = alpha < 0.0f && args.alpha_array == nullptr && args.b_global != nullptr;
    return {nearer ? -alpha : alpha, nearer ? (alpha < -1.0f ? ALPHA_STEP : 1.0f / ALPHA_STEP) : 1.0f};
}

__device__ __forceinline__ float gemm_bias(const GemmArguments& args, i64 column) {
    if (args.bias == nullptr) return 0.0f;
    if (args.bias_type == FLOAT32) return ((const float*)args.bias)[column];
    const u16 bits = ((const u16*)args.bias)[column];
    return args.bias_type == FLOAT16 ? float_from_f16(bits) : float_from_bf16(bits);
}

__device__ __forceinline__ u16 narrow(i32 type, float value) {
    return type == FLOAT16 ? f16_from_float(value) : bf16_from_float(value);
}

// One element. `sum` is the true sum of products.
__device__ __forceinline__ void store_result(const GemmArguments& args, i64 row, i64 column, float sum, Alpha alpha) {
    float value = sum * alpha.first * alpha.factor;
    if (args.bias != nullptr) value = value + gemm_bias(args, column);
    const i64 at = row * args.n + column;
    if (args.out_type == FLOAT32) {
        ((float*)args.out)[at] = value;
    } else {
        ((u16*)args.out)[at] = narrow(args.out_type, value);
    }
}
