// Barriers in shared memory that count arrivals and the bytes of asynchronous copies (mbarrier, sm_90).
// A barrier is named by its 32-bit shared address (8 bytes, 8-aligned). Its phase flips when all arrivals and all
// announced bytes are in; a waiter passes once the phase with the parity that it names is over.
// Source: PTX ISA, "Parallel Synchronization and Communication Instructions: mbarrier".
#pragma once
#include "num/integers.cuh"

constexpr u32 MBARRIER_BYTES = 8;

__device__ __forceinline__ void mbarrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialized barriers visible to the copy engine and to the other blocks of a cluster.
__device__ __forceinline__ void mbarrier_fence_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrive, and announce bytes that copies will complete.
__device__ __forceinline__ void mbarrier_arrive_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Arrive on the barrier at the same address in block `rank` of the cluster.
__device__ __forceinline__ void mbarrier_arrive_remote(u32 barrier, u32 rank) {
    asm volatile("{.reg .b32 remote; mapa.shared::cluster.u32 remote, %0, %1; "
                 "mbarrier.arrive.shared::cluster.b64 _, [remote];}" ::"r"(barrier), "r"(rank)
                 : "memory");
}

__device__ __forceinline__ void mbarrier_wait(u32 barrier, u32 parity) {
    asm volatile("{.reg .pred over; \n"
                 "WAIT_%=: mbarrier.try_wait.parity.shared::cta.b64 over, [%0], %1, 0x989680; \n"
                 "@over bra DONE_%=; \n"
                 "bra WAIT_%=; \n"
                 "DONE_%=: }" ::"r"(barrier), "r"(parity)
                 : "memory");
}
