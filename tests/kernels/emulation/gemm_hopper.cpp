// kernels/gemm_decode.cu, gemm_small.cu or gemm_prefill.cu (SOURCE, ENTRY) as a function of the host: runs its blocks, or
// clusters, one after the other, in any order, which they must not mind.
#include "block.h"

#include SOURCE

#ifdef CLUSTER
constexpr u32 BLOCKS = CLUSTER * K_CLUSTER;
#else
constexpr u32 BLOCKS = K_CLUSTER;
#endif

extern "C" void allow_reads(const void* first, u64 bytes) {
    emulation::readable.push_back({(const char*)first, bytes});
}

// 0: threads run in their order.
extern "C" void disturb(u64 seed) { emulation::disturbed = seed != 0, emulation::random_state = seed; }

// Whether all counters are what they are before a launch.
extern "C" bool counters_are_clear() {
#ifdef SLOTS
    for (const auto& slot : decoded_words) {
        for (const u64 word : slot) {
            if (word != 0) return false;
        }
    }
#endif
    return true;
}

constexpr int GUARD = 0xA5;

// `order` numbers the blocks of a grid of `columns` in x; each has `shared_bytes` of shared memory.
extern "C" void run(const u32* order, u32 blocks, u32 columns, u32 threads, const GemmArguments* gemm, const u16* a, u64 pitch,
                    u32 box_rows, u32 box_chunks, u32 result_rows, u32 dependent, u32 whole_tiles, float* shared_sums,
                    u32* arrivals, u32 sharers, u32 piece_groups, u32 slot, u32 shared_bytes) {
    const PrepackedGemmArguments args = {{a, (u64)gemm->m, (u64)gemm->k, pitch, box_rows, box_chunks},
                                         {result_rows == 0 ? nullptr : (u16*)gemm->out, (u64)gemm->m, (u64)gemm->n,
                                          (u64)gemm->n, result_rows, 0},
                                         *gemm,
                                         box_chunks,
                                         dependent,
                                         whole_tiles,
                                         shared_sums,
                                         arrivals,
                                         sharers,
                                         piece_groups,
                                         (u8*)a,
                                         slot};
    gridDim.x = columns;
    const auto body = [&args] {
        ENTRY(args);
        emulation::check_end_of_block();
    };
    for (u32 i = 0; i < blocks; i += BLOCKS) {
        for (u32 block = 0; block < BLOCKS; ++block) {
            unsigned char* const memory = emulation::memory_of(block);
            std::memset(memory, 0xFF, shared_bytes);  // NaN, as far as any kernel may know
            std::memset(memory + shared_bytes, GUARD, sizeof shared_memory - shared_bytes);
            std::memset(emulation::named_barriers[block], 0, sizeof emulation::named_barriers[block]);
            emulation::barriers[block].clear();
        }
        blockIdx.x = order[i] % columns, blockIdx.y = order[i] / columns;
        emulation::run_block(threads, body, BLOCKS);
        for (u32 block = 0; block < BLOCKS; ++block) {
            const unsigned char* const memory = emulation::memory_of(block);
            for (u32 at = shared_bytes; at < sizeof shared_memory; ++at) {
                if (memory[at] != GUARD) emulation::fail("writes past its shared memory");
            }
        }
    }
    emulation::readable.clear();
}
