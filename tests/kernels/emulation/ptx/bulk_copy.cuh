// kernels_src/ptx/bulk_copy.cuh on a CPU. A tensor map is what a test says it is. A copy from shared memory reads it when
// somebody waits until it has, so one that is overwritten too early shows.
#pragma once
#include "ptx/blocks.cuh"
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
    emulation::maybe_yield();
    const u32 rows = (m.box_chunks == 0 ? 1 : m.box_chunks) * m.box_rows;  // of 64 columns
    if ((m.box_chunks == 0 ? z : x) != 0) emulation::fail("a box of the other map");
    std::vector<u16> box(rows * 64);  // as memory is now: what is written later comes too late
    for (u32 r = 0; r < rows; ++r) {
        for (u32 c = 0; c < 64; ++c) {
            const u64 token = row + r % m.box_rows, column = (u64)(z + r / m.box_rows) * 64 + x + c;
            const u16 element = token < m.rows && column < m.columns ? m.first[token * m.pitch + column] : 0;
            box[r * 64 + (c / 8 ^ r % 8) * 8 + c % 8] = element;
        }
    }
    for (int block = 0; block < emulation::MOST_BLOCKS; ++block) {
        if ((blocks >> block & 1) == 0) continue;
        unsigned char* const tile = emulation::memory_of(block) + to;
        const auto land = [tile, box] { std::memcpy(tile, box.data(), box.size() * 2); };
        emulation::add_copy(barrier, to, rows * 128, land, block);
    }
}

inline void tensor_load(u32 to, const TensorMap* map, i32 x, i32 y, i32 z, u32 barrier) {
    tensor_load_multicast(to, map, x, y, z, barrier, (u16)(1 << emulation::block_of_cluster()));
}

inline void tensor_store(const TensorMap* map, i32 column, i32 row, i32 z, u32 from) {
    emulation::maybe_yield();
    if (from % 1024 != 0) emulation::fail("swizzled tile at an address that is no multiple of 1024");
    const TensorMap m = *map;
    if (m.first == nullptr || m.box_chunks != 0 || z != 0) emulation::fail("no map, or a box of the other one");
    emulation::check_shown(from, m.box_rows * 128);
    const unsigned char* const tile = emulation::own_memory() + from;
    emulation::threads[emulation::current].open_stores.push_back([=] {
        for (u32 r = 0; r < m.box_rows && row + r < m.rows; ++r) {
            for (u32 c = 0; c < 64 && column + c < m.columns; ++c) {
                u16* const to = const_cast<u16*>(m.first) + (row + r) * m.pitch + column + c;
                std::memcpy(to, tile + r * 128 + (c / 8 ^ r % 8) * 16 + c % 8 * 2, 2);
            }
        }
    });
}

// Reads its source when somebody waits for it to have come.
inline void send_bytes(u32 to, u32 from, u32 bytes, u32 barrier) {
    emulation::maybe_yield();
    const emulation::Target target = emulation::target_of(to, barrier);
    check_bulk(target.at, emulation::own_memory() + from, bytes);
    emulation::check_shown(from, bytes);
    const unsigned char* const source = emulation::own_memory() + from;
    unsigned char* const memory = emulation::memory_of(target.block) + target.at;
    const auto land = [=] { std::memcpy(memory, source, bytes); };
    emulation::add_copy(target.barrier, target.at, bytes, land, target.block);
}

inline void show_memory_to_copies() { emulation::maybe_yield(); }

inline void show_to_copies() {
    emulation::maybe_yield();
    emulation::threads[emulation::current].hidden.clear();
}

inline void commit_stores() {
    emulation::Thread& thread = emulation::threads[emulation::current];
    thread.store_groups.push_back(std::move(thread.open_stores));
    thread.open_stores.clear();
}

template <u32 LEFT>
inline void wait_until_read() {
    emulation::maybe_yield();
    auto& groups = emulation::threads[emulation::current].store_groups;
    while (groups.size() > LEFT) {
        for (const auto& store : groups.front()) store();
        groups.erase(groups.begin());
    }
}

inline void tensor_map_prefetch(const TensorMap*) {}
