// Parts of a block, clusters of blocks, and kernels that follow each other.
// Source: PTX ISA, "barrier", "barrier.cluster", "setmaxnreg", "griddepcontrol".
#pragma once
#include "num/integers.cuh"

// A value that is the same in all lanes, said so: branches on it are not divergent, and it can live in a uniform
// register, as descriptors must; from others they are copied for every product.
__device__ __forceinline__ u32 uniform(u32 value) { return __shfl_sync(~0u, value, 0); }

// What the first lane of the warp has.
__device__ __forceinline__ u64 first_lane(u64 value) { return __shfl_sync(~0u, value, 0); }

// Barrier `id` (1 ... 15) among `threads` threads, whole warps.
__device__ __forceinline__ void named_barrier_sync(u32 id, u32 threads) {
    asm volatile("barrier.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// The same for threads that nothing keeps waiting: they count as having come.
__device__ __forceinline__ void named_barrier_arrive(u32 id, u32 threads) {
    asm volatile("barrier.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Has `value` read, though nothing comes of it: what only an empty asm takes is not.
__device__ __forceinline__ void keep_read(u32 value) {
    if (value == ~0u) asm volatile("nanosleep.u32 0;" ::: "memory");
}

// Registers a thread may hold from here on, for a warpgroup; the kernel must have a cap at entry.
template <int REGISTERS>
__device__ __forceinline__ void raise_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

template <int REGISTERS>
__device__ __forceinline__ void lower_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

__device__ __forceinline__ u32 cluster_rank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// The shared address in block `rank` of the cluster of what lies at `address` in this block.
__device__ __forceinline__ u32 address_in_block(u32 address, u32 rank) {
    u32 remote;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
    return remote;
}

// Among all threads of the cluster that have not returned: that they have come so far, and, after mbarrier_fence_init,
// that their barriers are there. Orders no other memory: that would cost a fence.
__device__ __forceinline__ void cluster_meet() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Lets a kernel that was launched as a dependent of this one start, once every block has said so or is over.
// Before sm_90 kernels always follow each other whole.
__device__ __forceinline__ void start_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits until the kernels that this one depends on are over and their writes are visible; at once if there are none.
__device__ __forceinline__ void wait_for_prerequisites() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
