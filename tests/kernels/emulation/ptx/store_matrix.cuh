// kernels_src/ptx/store_matrix.cuh on a CPU.
#pragma once
#include "ptx/shared_memory.cuh"

// Of `count` matrices: the lanes of the first ones give the addresses of their rows.
inline void store_matrices_transposed(int count, u32 address, u32 m0, u32 m1, u32 m2, u32 m3) {
    const u32 words[5] = {address, m0, m1, m2, m3};
    const auto* lanes = emulation::exchange(words, 5);
    const int lane = emulation::current % 32;
    if (lane < 8 * count) emulation::threads[emulation::current].hidden.push_back(address);
    for (int column = 0; lane < 8 * count && column < 8; ++column) {  // a row in memory is a column of the matrix
        const u32 pair = lanes[4 * column + lane % 8 / 2][1 + lane / 8];
        emulate_store(lanes[lane][0] + 2 * column, (u16)(pair >> lane % 2 * 16));
    }
    emulation::sync_warp();
}

inline void store_matrix_x2_transposed(u32 address, u32 m0, u32 m1) {
    store_matrices_transposed(2, address, m0, m1, 0, 0);
}

inline void store_matrix_x4_transposed(u32 address, u32 m0, u32 m1, u32 m2, u32 m3) {
    store_matrices_transposed(4, address, m0, m1, m2, m3);
}
