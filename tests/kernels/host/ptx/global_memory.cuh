#pragma once
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "num/integers.cuh"

// The device faults on an address that is no multiple of the access; so does this.
inline void check_address(const u8* address, u64 bytes) {
    if ((u64)address % bytes == 0) return;
    std::fprintf(stderr, "misaligned address %p for %llu bytes\n", (const void*)address, bytes);
    std::abort();
}

template <u32 BYTES>
void copy_from(const u8* from, void* to) {
    check_address(from, BYTES);
    std::memcpy(to, from, BYTES);
}

template <u32 BYTES>
void copy_to(u8* to, const void* from) {
    check_address(to, BYTES);
    std::memcpy(to, from, BYTES);
}

inline void load_16(const u8* from, u32* word) { copy_from<16>(from, word); }
inline void load_16_policy(const u8* from, u32* word, u64) { load_16(from, word); }
inline void prefetch_line(const u8*) {}
inline void load_8(const u8* from, u32* word) { copy_from<8>(from, word); }

inline u32 load_4(const u8* from) {
    u32 word;
    copy_from<4>(from, &word);
    return word;
}

inline u32 load_2(const u8* from) {
    u16 half;
    copy_from<2>(from, &half);
    return half;
}

inline u32 load_1(const u8* from) { return *from; }
inline void store_16(u8* to, const u32* word) { copy_to<16>(to, word); }

inline void store_8(u8* to, u32 low, u32 high) {
    const u32 words[2] = {low, high};
    copy_to<8>(to, words);
}

inline void store_4(u8* to, u32 word) { copy_to<4>(to, &word); }

inline void store_2(u8* to, u32 half) {
    const u16 low = (u16)half;
    copy_to<2>(to, &low);
}

inline void store_1(u8* to, u32 byte) { *to = (u8)byte; }
