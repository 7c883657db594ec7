// e4m3 by the hardware where it has the conversion (sm_89), else in integers; the same bits.
// Source: PTX ISA, "Data Movement and Conversion Instructions: cvt" (.e4m3x2: sm_89).
#pragma once
#include "num/e4m3.cuh"

#if __CUDA_ARCH__ >= 890
#define HARDWARE_E4M3 1
#else
#define HARDWARE_E4M3 0
#endif

// Nearest even, saturating at 448; NaN gives 0x7F. On entry: values >= 0 or NaN. The low value in bits 7..0.
__device__ __forceinline__ u32 e4m3x2_from_floats(float low, float high) {
#if HARDWARE_E4M3
    u16 bytes;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(bytes) : "f"(high), "f"(low));
    return bytes;
#else
    return e4m3_from_float_portable(low) | e4m3_from_float_portable(high) << 8;
#endif
}

__device__ __forceinline__ float float_from_e4m3(u32 byte) {
#if HARDWARE_E4M3
    float value;
    asm("{.reg .b16 b; .reg .b32 p; .reg .f16 l, h; cvt.u16.u32 b, %1; cvt.rn.f16x2.e4m3x2 p, b; mov.b32 {l, h}, p; "
        "cvt.f32.f16 %0, l;}"
        : "=f"(value)
        : "r"(byte & 0xFFu));
    return value;
#else
    return float_from_e4m3_portable(byte);
#endif
}
