// kernels_src/ptx/cp_async.cuh on a CPU: a copy lands when its group is waited for.
#pragma once
#include "block.h"
#include "num/integers.cuh"

inline void emulate_copy(u32 to, const void* from, u32 size, u32 valid) {
    if (to % size != 0) emulation::fail("cp.async to a misaligned address");
    if ((uintptr_t)from % size != 0) emulation::fail("cp.async from a misaligned address");
    if (valid > size) emulation::fail("cp.async of more bytes than its size");
    emulation::check_readable(from, valid);
    emulation::threads[emulation::current].open.push_back({to, from, size, valid});
}

inline void cp_async_16(u32 to, const void* from) { emulate_copy(to, from, 16, 16); }
inline void cp_async_16_line(u32 to, const void* from) { emulate_copy(to, from, 16, 16); }
inline void cp_async_16(u32 to, const void* from, u32 valid) { emulate_copy(to, from, 16, valid); }
inline void cp_async_8(u32 to, const void* from) { emulate_copy(to, from, 8, 8); }
inline void cp_async_8(u32 to, const void* from, u32 valid) { emulate_copy(to, from, 8, valid); }
inline void cp_async_4(u32 to, const void* from) { emulate_copy(to, from, 4, 4); }
inline void cp_async_4(u32 to, const void* from, u32 valid) { emulate_copy(to, from, 4, valid); }

inline void cp_async_commit() {
    emulation::Thread& thread = emulation::threads[emulation::current];
    thread.groups.push_back(thread.open);
    thread.open.clear();
}

template <int PENDING>
inline void cp_async_wait() {
    auto& groups = emulation::threads[emulation::current].groups;
    while ((int)groups.size() > PENDING) {
        for (const emulation::Copy& copy : groups.front()) {
            std::memset(shared_memory + copy.to, 0, copy.size);
            std::memcpy(shared_memory + copy.to, copy.from, copy.valid);
        }
        groups.erase(groups.begin());
    }
}
