// 1 / value, correctly rounded, for a normal value whose reciprocal is normal too.
//
// These are the instructions that rcp.rn itself runs for such values; what is left out is its test for the others and
// the call that serves them. The GPU tests compare the two for every mantissa.
// Source: PTX ISA, "Floating Point Instructions: rcp".
#pragma once
#include "ptx/float_arithmetic.cuh"

__device__ __forceinline__ float reciprocal_of_normal(float value) {
    float estimate;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(estimate) : "f"(value));
    const float error = fused_multiply_add(value, estimate, -1.0f);
    return fused_multiply_add(estimate, -error, estimate);
}
