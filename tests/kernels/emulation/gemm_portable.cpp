// kernels/gemm_portable.cu as a function of the host: runs its blocks one after the other.
#include "block.h"
#include "kernels/gemm_portable.cu"

extern "C" void allow_reads(const void* first, u64 bytes) { emulation::readable.push_back({(const char*)first, bytes}); }

extern "C" void run(u32 blocks, const GemmArguments* args) {
    for (u32 block = 0; block < blocks; ++block) {
        std::memset(shared_memory, 0xFF, sizeof shared_memory);  // NaN, as far as any kernel may know
        blockIdx.x = block;
        emulation::run_block(Tile::threads, [args] { gemm_portable(*args); });
    }
    emulation::readable.clear();
}
