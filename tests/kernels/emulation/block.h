// One thread block of a CUDA kernel on a CPU, or a cluster of up to four: every thread is a fiber, barriers and warp-wide
// instructions switch.
//
// The kernel's own source is compiled; only kernels_src/ptx/ is replaced, by the folder beside this file. Copies of
// cp.async land when their group is waited for and not before, and only inside memory that the test has named.
// Threads run in their order, or, where `disturbed`, in a random one, and then give way at shared memory too.
#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#define __CUDACC_VER_MAJOR__ 12  // so what CUDA 12 needs is emulated
#define __device__
#define __global__
#define __shared__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))

struct Index {
    unsigned x, y, z;
};

inline unsigned __float_as_uint(float v) {
    unsigned bits;
    std::memcpy(&bits, &v, 4);
    return bits;
}
inline float __uint_as_float(unsigned bits) {
    float v;
    std::memcpy(&v, &bits, 4);
    return v;
}

namespace emulation {

constexpr int SHARED_MEMORY_BYTES = 232448, STACK_BYTES = 1 << 16, LANES = 32, GROUP = 128, MOST_BLOCKS = 4;

struct Copy {
    unsigned to;
    const void* from;
    unsigned size, valid;
};

struct Thread {
    ucontext_t context;  // where it begins; then `place`: swapcontext asks the system each time
    jmp_buf place;
    std::vector<char> stack;
    bool begun = false, done = false;
    long barriers = 0, warp_barriers = 0, group_barriers = 0, cluster_barriers = 0;
    std::vector<std::vector<Copy>> groups;
    std::vector<Copy> open;
    std::vector<unsigned> hidden;  // rows in shared memory that copies do not see yet
    std::vector<std::vector<std::function<void()>>> store_groups;
    std::vector<std::function<void()>> open_stores;
};

struct Range {
    const char* first;
    size_t bytes;
};

inline std::vector<Thread> threads;
inline std::vector<Range> readable;
inline int current, block_threads = 1;  // of all threads of a cluster; threads of one block
inline bool disturbed;
inline uint64_t random_state;
inline jmp_buf scheduler;
inline std::function<void()> body;
inline std::vector<std::vector<unsigned>> warp_words;  // what the lanes of a warp show each other

[[noreturn]] inline void fail(const char* what) {
    std::fprintf(stderr, "emulation: thread %d: %s\n", current, what);
    std::abort();
}

inline void yield() {
    if (_setjmp(threads[current].place) == 0) _longjmp(scheduler, 1);
}

inline void __attribute__((noinline)) resume(Thread& thread) {  // until it gives way
    if (_setjmp(scheduler) != 0) return;
    if (thread.begun) _longjmp(thread.place, 1);
    thread.begun = true;
    setcontext(&thread.context);
}

inline unsigned random_below(unsigned limit) {  // xorshift
    random_state ^= random_state << 13, random_state ^= random_state >> 7, random_state ^= random_state << 17;
    return (unsigned)(random_state >> 32) % limit;
}

inline void maybe_yield() {
    if (disturbed && random_below(8) == 0) yield();
}

inline int block_of_cluster() { return current / block_threads; }

template <typename Count>
void wait_for(int first, int last, Count count) {
    const long mine = ++count(threads[current]);
    for (int i = first; i < last; ++i) {
        while (!threads[i].done && count(threads[i]) < mine) yield();
    }
}

inline void sync_threads() {
    const int first = block_of_cluster() * block_threads;
    wait_for(first, first + block_threads, [](Thread& t) -> long& { return t.barriers; });
}

inline void sync_warp() {
    const int first = current / LANES * LANES;
    wait_for(first, first + LANES, [](Thread& t) -> long& { return t.warp_barriers; });
}

inline void sync_group() {  // a warpgroup
    const int first = current / GROUP * GROUP;
    wait_for(first, first + GROUP, [](Thread& t) -> long& { return t.group_barriers; });
}

inline void sync_cluster() {
    wait_for(0, (int)threads.size(), [](Thread& t) -> long& { return t.cluster_barriers; });
}

// Whether all threads of a block have ended, but one that does not count.
inline bool is_over(int block, int but = -1) {
    for (int i = block * block_threads; i < (block + 1) * block_threads; ++i) {
        if (i != but && !threads[i].done) return false;
    }
    return true;
}

// That copies and products see what the threads of the block have stored in a place.
inline void check_shown(unsigned from, unsigned bytes) {
    const int first = block_of_cluster() * block_threads;
    for (int i = first; i < first + block_threads; ++i) {
        for (const unsigned at : threads[i].hidden) {
            if (at >= from && at < from + bytes) fail("reads what was not shown to copies");
        }
    }
}

inline void check_readable(const void* from, size_t bytes) {
    if (bytes == 0) return;
    for (const Range& range : readable) {
        const char* at = (const char*)from;
        if (at >= range.first && at + bytes <= range.first + range.bytes) return;
    }
    fail("reads outside of every array");
}

// All lanes hand in `count` words; afterwards each may look at those of any lane of its warp until the next call.
inline const std::vector<unsigned>* exchange(const unsigned* words, int count) {
    warp_words[current].assign(words, words + count);
    sync_warp();
    return &warp_words[current / LANES * LANES];
}

inline void run_thread() {
    body();
    threads[current].done = true;
    yield();
}

inline void run_block(int threads_of_a_block, std::function<void()> kernel, int blocks = 1) {
    const int count = blocks * threads_of_a_block;
    block_threads = threads_of_a_block;
    body = kernel;
    threads.clear();
    threads.resize(count);
    warp_words.assign(count, {});
    for (Thread& thread : threads) {
        thread.stack.resize(STACK_BYTES);
        getcontext(&thread.context);
        thread.context.uc_stack.ss_sp = thread.stack.data();
        thread.context.uc_stack.ss_size = STACK_BYTES;
        thread.context.uc_link = nullptr;
        makecontext(&thread.context, run_thread, 0);
    }
    const int slow = disturbed ? random_below(blocks) : -1;  // this block lags behind
    for (bool running = true; running;) {
        running = false;
        const int first = disturbed ? random_below(count) : 0;
        for (int i = 0; i < count; ++i) {
            current = (first + i) % count;
            if (threads[current].done) continue;
            running = true;
            if (disturbed && random_below(8) < (blocks > 1 && block_of_cluster() == slow ? 7u : 2u)) continue;
            resume(threads[current]);
        }
    }
    current = 0;
}

}  // namespace emulation

inline void __syncthreads() { emulation::sync_threads(); }
inline void __syncwarp() { emulation::sync_warp(); }

inline Index gridDim, blockDim;
struct BlockIndex {
    struct X {
        unsigned first = 0;  // of the cluster
        operator unsigned() const { return first + emulation::block_of_cluster(); }
        X& operator=(unsigned block) { return first = block, *this; }
        X& operator++() { return ++first, *this; }
    } x;
    unsigned y = 0;
};
inline BlockIndex blockIdx;
struct ThreadIndex {
    struct X {
        operator unsigned() const { return (unsigned)(emulation::current % emulation::block_threads); }
    } x;
};
inline ThreadIndex threadIdx;

extern "C" {
alignas(1024) unsigned char shared_memory[emulation::SHARED_MEMORY_BYTES];
}

namespace emulation {

alignas(1024) inline unsigned char other_shared_memory[MOST_BLOCKS - 1][SHARED_MEMORY_BYTES];

inline unsigned char* memory_of(int block) { return block == 0 ? shared_memory : other_shared_memory[block - 1]; }
inline unsigned char* own_memory() { return memory_of(block_of_cluster()); }

}  // namespace emulation

template <typename T>
T min(T a, T b) {
    return b < a ? b : a;
}
