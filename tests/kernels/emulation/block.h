// One thread block of a CUDA kernel on a CPU: every thread is a fiber, barriers and warp-wide instructions switch.
//
// The kernel's own source is compiled; only kernels_src/ptx/ is replaced, by the folder beside this file. Copies of
// cp.async land when their group is waited for and not before, and only inside memory that the test has named.
#pragma once
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#define __device__
#define __global__
#define __shared__
#define __forceinline__ inline
#define __launch_bounds__(...)
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

constexpr int SHARED_MEMORY_BYTES = 232448, STACK_BYTES = 1 << 16, LANES = 32;

struct Copy {
    unsigned to;
    const void* from;
    unsigned size, valid;
};

struct Thread {
    ucontext_t context;
    std::vector<char> stack;
    bool done = false;
    long barriers = 0, warp_barriers = 0;
    std::vector<std::vector<Copy>> groups;
    std::vector<Copy> open;
};

struct Range {
    const char* first;
    size_t bytes;
};

inline std::vector<Thread> threads;
inline std::vector<Range> readable;
inline int current;
inline ucontext_t scheduler;
inline std::function<void()> body;
inline std::vector<std::vector<unsigned>> warp_words;  // what the lanes of a warp show each other

[[noreturn]] inline void fail(const char* what) {
    std::fprintf(stderr, "emulation: thread %d: %s\n", current, what);
    std::abort();
}

inline void yield() { swapcontext(&threads[current].context, &scheduler); }

template <typename Count>
void wait_for(int first, int last, Count count) {
    const long mine = ++count(threads[current]);
    for (bool waiting = true; waiting;) {
        waiting = false;
        for (int i = first; i < last; ++i) waiting = waiting || (!threads[i].done && count(threads[i]) < mine);
        if (waiting) yield();
    }
}

inline void sync_threads() {
    wait_for(0, (int)threads.size(), [](Thread& t) -> long& { return t.barriers; });
}

inline void sync_warp() {
    const int first = current / LANES * LANES;
    wait_for(first, first + LANES, [](Thread& t) -> long& { return t.warp_barriers; });
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

inline void run_block(int count, std::function<void()> kernel) {
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
    for (bool running = true; running;) {
        running = false;
        for (current = 0; current < count; ++current) {
            if (threads[current].done) continue;
            swapcontext(&scheduler, &threads[current].context);
            running = true;
        }
    }
}

}  // namespace emulation

inline void __syncthreads() { emulation::sync_threads(); }
inline void __syncwarp() { emulation::sync_warp(); }

inline Index blockIdx, gridDim, blockDim;
struct ThreadIndex {
    struct X {
        operator unsigned() const { return (unsigned)emulation::current; }
    } x;
};
inline ThreadIndex threadIdx;

extern "C" {
alignas(128) unsigned char shared_memory[emulation::SHARED_MEMORY_BYTES];
}

template <typename T>
T min(T a, T b) {
    return b < a ? b : a;
}
