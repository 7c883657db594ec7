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

// The product of the global scales, in fp64: it cannot overflow there.
__device__ __forceinline__ double global_scales(const GemmArguments& args) {
    return (args.a_global != nullptr ? (double)*args.a_global : 1.0) * (double)*args.b_global;
}

// alpha as given, or 1 / (product of the global scales) rounded to fp32.
__device__ __forceinline__ float gemm_alpha(const GemmArguments& args) {
    if (args.alpha_array != nullptr) return *args.alpha_array;
    if (args.b_global == nullptr) return args.alpha;
    return (float)(1.0 / global_scales(args));
}

// What gemm_alpha's result stands for: itself, or two factors where the rounding took bits of it or all.
__device__ __forceinline__ Alpha alpha_factors(const GemmArguments& args, float alpha) {
    const bool is_normal = fabsf(alpha) >= 0x1p-126f && fabsf(alpha) <= FP32_MAX;
    if (is_normal || args.alpha_array != nullptr || args.b_global == nullptr) return {alpha, 1.0f};
    const double scales = global_scales(args);
    const float first = scales < 1.0 ? 0x1p64f : 0x1p-64f;
    const float factor = (float)(1.0 / (scales * (double)first));
    return {factor > FP32_MAX ? FP32_MAX : factor, first};  // infinity times a sum of zero would be NaN
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
