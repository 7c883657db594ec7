// e2m1 by the hardware, on the targets that have the conversion: sm_100a, sm_103a, sm_120a and their like.
// Source: PTX ISA, "Data Movement and Conversion Instructions: cvt" (.e2m1x2).
#pragma once
#include "num/integers.cuh"

// NVRTC 12.8 knows a specific target by its own name only.
#if __CUDA_ARCH__ >= 1000 &&                                                                        \
    (defined(__CUDA_ARCH_SPECIFIC__) || defined(__CUDA_ARCH_FEAT_SM100_ALL) ||                       \
     defined(__CUDA_ARCH_FEAT_SM101_ALL) || defined(__CUDA_ARCH_FEAT_SM120_ALL))
#define HARDWARE_E2M1 1

// Eight codes, value 0 in the lowest nibble; nearest even, saturating at 6, the sign kept. On entry: no NaN.
__device__ __forceinline__ u32 e2m1x8_from_floats(const float* value) {
    u32 codes;
    asm("{.reg .b8 b0, b1, b2, b3;"
        " cvt.rn.satfinite.e2m1x2.f32 b0, %2, %1;"
        " cvt.rn.satfinite.e2m1x2.f32 b1, %4, %3;"
        " cvt.rn.satfinite.e2m1x2.f32 b2, %6, %5;"
        " cvt.rn.satfinite.e2m1x2.f32 b3, %8, %7;"
        " mov.b32 %0, {b0, b1, b2, b3};}"
        : "=r"(codes)
        : "f"(value[0]), "f"(value[1]), "f"(value[2]), "f"(value[3]), "f"(value[4]), "f"(value[5]), "f"(value[6]),
          "f"(value[7]));
    return codes;
}
#else
#define HARDWARE_E2M1 0
#endif
