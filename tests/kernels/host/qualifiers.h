// The names that CUDA has and C++ has not, so that g++ takes num/, layout/ and block/ as they are. The folder ptx/
// beside this file stands in for kernels_src/ptx: each instruction in plain C++.
#pragma once
#include <cstring>

#define __device__
#define __forceinline__ inline
#define __host__
#define __CUDA_ARCH__ 800  // what the kernels ask for at least

inline unsigned int __float_as_uint(float value) {
    unsigned int bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline float __uint_as_float(unsigned int bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}
