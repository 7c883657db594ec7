// kernels_src/ptx/shared_memory.cuh on a CPU: an address is an offset.
#pragma once
#include "block.h"
#include "num/integers.cuh"
#include "ptx/blocks.cuh"
#include "ptx/mbarrier.cuh"

struct Words2 {
    u32 word[2];
};

struct Words4 {
    u32 word[4];
};

inline u32 shared_address(const void* pointer) { return (u32)((const u8*)pointer - shared_memory); }

template <typename T>
inline T emulate_load(u32 address) {
    emulation::maybe_yield();
    if (address % sizeof(T) != 0 || address + sizeof(T) > sizeof shared_memory) emulation::fail("bad shared address");
    T v;
    std::memcpy(&v, emulation::own_memory() + address, sizeof v);
    return v;
}

template <typename T>
inline void emulate_store(u32 address, T v) {
    emulation::maybe_yield();
    if (address % sizeof(T) != 0 || address + sizeof(T) > sizeof shared_memory) emulation::fail("bad shared address");
    std::memcpy(emulation::own_memory() + address, &v, sizeof v);
}

inline Words4 load_shared_16(u32 address) { return emulate_load<Words4>(address); }
inline Words2 load_shared_8(u32 address) {
    if (address % 8 != 0) emulation::fail("bad shared address");
    return emulate_load<Words2>(address);
}
inline u32 load_shared_4(u32 address) { return emulate_load<u32>(address); }
inline u32 load_shared_2(u32 address) { return emulate_load<u16>(address); }
inline float load_shared_float(u32 address) { return emulate_load<float>(address); }
inline void store_shared_4(u32 address, u32 value) { emulate_store(address, value); }
inline void store_shared_float(u32 address, float value) { emulate_store(address, value); }

inline void store_shared_floats(u32 address, const float* value) {
    if (address % 16 != 0) emulation::fail("bad shared address");
    for (u32 i = 0; i < 4; ++i) emulate_store(address + 4 * i, value[i]);
}

inline void store_shared_16(u32 address, const u32* word) {
    if (address % 16 != 0) emulation::fail("bad shared address");
    for (u32 i = 0; i < 4; ++i) emulate_store(address + 4 * i, word[i]);
    emulation::threads[emulation::current].hidden.push_back(address);
}

inline void add_shared_floats(float* sum, u32 address) {
    if (address % 16 != 0) emulation::fail("bad shared address");
    for (u32 i = 0; i < 4; ++i) sum[i] += emulate_load<float>(address + 4 * i);
}

// On its way until the block that gets it waits for the barrier; until then NaN.
inline void send_floats(u32 address, const float* value, u32 barrier) {
    emulation::maybe_yield();
    const emulation::Target target = emulation::target_of(address, barrier);
    if (target.at % 16 != 0) emulation::fail("bad shared address");
    unsigned char* const to = emulation::memory_of(target.block) + target.at;
    const std::vector<float> sent(value, value + 4);
    const auto land = [to, sent] { std::memcpy(to, sent.data(), 16); };
    emulation::add_copy(target.barrier, target.at, 16, land, target.block);
}

inline Words4 load_matrix_x4(u32 address) {
    const auto* lanes = emulation::exchange(&address, 1);
    const int lane = emulation::current % 32, g = lane / 4, t = lane % 4;
    Words4 v;
    for (int i = 0; i < 4; ++i) v.word[i] = emulate_load<u32>(lanes[8 * i + g][0] + 4 * t);
    emulation::sync_warp();
    return v;
}
