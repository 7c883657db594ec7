// kernels_src/ptx/store_matrix.cuh on a CPU.
#pragma once
#include "ptx/shared_memory.cuh"

inline void store_matrix_x4_transposed(u32 address, u32 m0, u32 m1, u32 m2, u32 m3) {
    const u32 words[5] = {address, m0, m1, m2, m3};
    const auto* lanes = emulation::exchange(words, 5);
    const int lane = emulation::current % 32;
    const u32 to = lanes[lane][0];
    for (int column = 0; column < 8; ++column) {  // of the row that this lane's address is for: transposed, a column
        const u32 pair = lanes[4 * column + lane % 8 / 2][1 + lane / 8];
        emulate_store(to + 2 * column, (u16)(pair >> lane % 2 * 16));
    }
    emulation::sync_warp();
}
