#pragma once
#include <cmath>

inline float multiply_saturate(float a, float b) {
    const float product = a * b;
    return product > 0.0f ? (product < 1.0f ? product : 1.0f) : 0.0f;
}

inline float fused_multiply_add(float a, float b, float c) { return std::fmaf(a, b, c); }
inline float absolute(float a) { return std::fabs(a); }
inline float maximum(float a, float b) { return a != a ? b : b != b ? a : a > b ? a : b; }
inline float maximum_nan(float a, float b) { return a != a ? a : b != b ? b : a > b ? a : b; }
