// kernels_src/ptx/bulk_copy.cuh on a CPU. A tensor map is what a test says it is.
#pragma once
#include "ptx/mbarrier.cuh"

struct alignas(64) TensorMap {
    const u16* first;
    u64 rows, columns, pitch;  // elements
    u32 box_rows, box_chunks;  // 0 chunks: boxes of one, by columns
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

inline void tensor_load_multicast(u32 to, const TensorMap* map, i32 x, i32 row, i32 z, u32 barrier, u16 blocks) {
    if (to % 1024 != 0) emulation::fail("swizzled tile at an address that is no multiple of 1024");
    const TensorMap m = *map;
    const u32 rows = (m.box_chunks == 0 ? 1 : m.box_chunks) * m.box_rows;  // of 64 columns
    if ((m.box_chunks == 0 ? z : x) != 0) emulation::fail("a box of the other map");
    for (int block = 0; block < emulation::MOST_BLOCKS; ++block) {
        if ((blocks >> block & 1) == 0) continue;
        unsigned char* const tile = emulation::memory_of(block) + to;
        const auto land = [=] {
            for (u32 r = 0; r < rows; ++r) {
                for (u32 c = 0; c < 64; ++c) {
                    const u64 token = row + r % m.box_rows, column = (u64)(z + r / m.box_rows) * 64 + x + c;
                    const u16 element = token < m.rows && column < m.columns ? m.first[token * m.pitch + column] : 0;
                    std::memcpy(tile + r * 128 + (c / 8 ^ r % 8) * 16 + c % 8 * 2, &element, 2);
                }
            }
        };
        emulation::add_copy(barrier, to, rows * 128, land, block);
    }
}

inline void tensor_load(u32 to, const TensorMap* map, i32 x, i32 y, i32 z, u32 barrier) {
    tensor_load_multicast(to, map, x, y, z, barrier, (u16)(1 << emulation::block_of_cluster()));
}

inline void tensor_map_prefetch(const TensorMap*) {}
