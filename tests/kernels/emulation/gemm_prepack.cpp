// kernels/gemm_prepack.cu as functions of the host: an entry runs its blocks one after the other.
#include "block.h"
#undef __shared__
#define __shared__ static  // fibers share it, and blocks run one at a time

struct uint4 {
    unsigned x, y, z, w;
};
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned bits) {
    return bits % 32 ? high << bits % 32 | low >> (32 - bits % 32) : high;
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned bits) {
    return bits % 32 ? low >> bits % 32 | high << (32 - bits % 32) : low;
}
inline int __clz(unsigned v) { return __builtin_clz(v); }
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline void atomicAdd(unsigned* to, unsigned v) { *to += v; }
inline unsigned __ballot_sync(unsigned, bool predicate) {
    const unsigned word = predicate;
    const auto* lanes = emulation::exchange(&word, 1);
    unsigned found = 0;
    for (int i = 0; i < 32; ++i) found |= lanes[i][0] << i;
    emulation::sync_warp();
    return found;
}

#include "kernels/gemm_prepack.cu"

#define ENTRY_OF(NAME)                                                                     \
    extern "C" void run_##NAME(u32 blocks, const PrepackArguments* args) {                  \
        for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {                           \
            emulation::run_block(THREADS, [args] { NAME(*args); });                         \
        }                                                                                   \
    }
ENTRY_OF(gemm_pack)
ENTRY_OF(gemm_unpack)
ENTRY_OF(gemm_write_records)
ENTRY_OF(gemm_restore_records)
