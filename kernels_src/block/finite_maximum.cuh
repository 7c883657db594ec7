// The largest finite magnitude of some words of elements, as a number that grows word by word.
#pragma once
#include "block/elements.cuh"

// fp16 and bf16: a pair of running maxima; fp32: one.
template <int TYPE>
struct FiniteMaximum {
    using E = Elements<TYPE>;
    u32 pair = 0;

    // The hardware's maximum lets NaN lose, so only infinities must be looked for: rarely, and then one by one.
    template <u32 WORDS>
    __device__ __forceinline__ void add(const u32 (&word)[WORDS]) {
        u32 all = 0;
#pragma unroll
        for (u32 i = 0; i < WORDS; ++i) all = E::maximum(all, E::magnitude(word[i]));
        if ((all & 0xFFFFu) >= E::INFINITY_BITS || (all >> 16) >= E::INFINITY_BITS) {
            all = 0;
            for (u32 i = 0; i < WORDS; ++i) all = E::maximum(all, finite(E::magnitude(word[i])));
        }
        pair = E::maximum(pair, all);
    }

    __device__ __forceinline__ float value() const { return maximum(E::low(pair), E::high(pair)); }

  private:
    static __device__ __forceinline__ u32 finite(u32 magnitudes) {
        const u32 low = magnitudes & 0xFFFFu, high = magnitudes >> 16;
        return (low < E::INFINITY_BITS ? low : 0u) | (high < E::INFINITY_BITS ? high : 0u) << 16;
    }
};

template <>
struct FiniteMaximum<FLOAT32> {
    float largest = 0.0f;

    template <u32 WORDS>
    __device__ __forceinline__ void add(const u32 (&word)[WORDS]) {
        float all = 0.0f;
#pragma unroll
        for (u32 i = 0; i < WORDS; ++i) all = maximum(all, absolute(float_of(word[i])));
        if (all > FP32_MAX) {
            all = 0.0f;
            for (u32 i = 0; i < WORDS; ++i) {
                const float magnitude = absolute(float_of(word[i]));
                if (magnitude <= FP32_MAX) all = maximum(all, magnitude);
            }
        }
        largest = maximum(largest, all);
    }

    __device__ __forceinline__ float value() const { return largest; }
};
