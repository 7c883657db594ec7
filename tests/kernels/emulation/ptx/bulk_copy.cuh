// kernels_src/ptx/bulk_copy.cuh on a CPU. A tensor map is what a test says it is.
#pragma once
#include "ptx/mbarrier.cuh"

struct alignas(64) TensorMap {
    const u16* first;
    u64 rows, columns, pitch;  // elements
    u32 box_rows, box_columns;
};

inline void check_bulk(u32 to, const void* from, u32 bytes) {
    if (to % 16 != 0 || (uintptr_t)from % 16 != 0 || bytes % 16 != 0 || bytes == 0) {
        emulation::fail("bulk copy of misaligned or no bytes");
    }
}

inline void bulk_load(u32 to, const void* from, u32 bytes, u32 barrier) {
    check_bulk(to, from, bytes);
    emulation::check_readable(from, bytes);
    emulation::add_copy(barrier, to, bytes, [=] { std::memcpy(emulation::own_memory() + to, from, bytes); });
}

inline void bulk_load_policy(u32 to, const void* from, u32 bytes, u32 barrier, u64) {
    bulk_load(to, from, bytes, barrier);
}

inline void tensor_load_multicast(u32 to, const TensorMap* map, i32 column, i32 row, u32 barrier, u16 blocks) {
    if (to % 1024 != 0) emulation::fail("swizzled tile at an address that is no multiple of 1024");
    const TensorMap m = *map;
    for (int block = 0; block < emulation::MOST_BLOCKS; ++block) {
        if ((blocks >> block & 1) == 0) continue;
        unsigned char* const tile = emulation::memory_of(block) + to;
        const auto land = [=] {
            for (u32 r = 0; r < m.box_rows; ++r) {
                for (u32 c = 0; c < m.box_columns; ++c) {
                    const bool inside = (u64)row + r < m.rows && (u64)column + c < m.columns;
                    const u16 element = inside ? m.first[(row + r) * m.pitch + column + c] : 0;
                    std::memcpy(tile + r * 128 + (c / 8 ^ r % 8) * 16 + c % 8 * 2, &element, 2);
                }
            }
        };
        emulation::add_copy(barrier, to, m.box_rows * 128, land, block);
    }
}

inline void tensor_load(u32 to, const TensorMap* map, i32 column, i32 row, u32 barrier) {
    tensor_load_multicast(to, map, column, row, barrier, (u16)(1 << emulation::block_of_cluster()));
}

inline void tensor_map_prefetch(const TensorMap*) {}
