// From an fp32 sum to an element of the result: alpha, bias, one rounding; every product of this folder ends here.
//
// alpha and bias apply in fp32, each rounded on its own: (sum * alpha) + bias.
#pragma once
#include "block/gemm_arguments.cuh"
#include "ptx/half_convert.cuh"

// alpha as given, or 1 / (product of the global scales), taken in fp64 so that it cannot overflow on the way.
__device__ __forceinline__ float gemm_alpha(const GemmArguments& args) {
    if (args.alpha_array != nullptr) return *args.alpha_array;
    if (args.b_global == nullptr) return args.alpha;
    const double a_global = args.a_global != nullptr ? (double)*args.a_global : 1.0;
    return (float)(1.0 / (a_global * (double)*args.b_global));
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
__device__ __forceinline__ void store_result(const GemmArguments& args, i64 row, i64 column, float sum, float alpha) {
    float value = sum * alpha;
    if (args.bias != nullptr) value = value + gemm_bias(args, column);
    const i64 at = row * args.n + column;
    if (args.out_type == FLOAT32) {
        ((float*)args.out)[at] = value;
    } else {
        ((u16*)args.out)[at] = narrow(args.out_type, value);
    }
}
