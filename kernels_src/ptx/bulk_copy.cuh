// Copies by the copy engine between global and shared memory (cp.async.bulk and its tensor form, sm_90).
// On entry: addresses and sizes are multiples of 16 bytes, a tensor tile's shared address of 128 (1024 where it is
// swizzled by 128 bytes). Loads complete on an mbarrier, stores in groups of the thread that asked for them.
// Source: PTX ISA, "Data Movement and Conversion Instructions: cp.async.bulk, cp.async.bulk.tensor, fence.proxy.async".
#pragma once
#include "num/integers.cuh"

// What cuTensorMapEncodeTiled writes; its address must be a multiple of 64.
struct alignas(64) TensorMap {
    u64 opaque[16];
};

__device__ __forceinline__ void bulk_load(u32 to, const void* from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}

__device__ __forceinline__ void bulk_load_policy(u32 to, const void* from, u32 bytes, u32 barrier, u64 policy) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1], %2, [%3], %4;" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
                 : "memory");
}

// Shared memory to a block of the cluster, completing there. `to` and `barrier` from address_in_block.
__device__ __forceinline__ void send_bytes(u32 to, u32 from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "r"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}

// A box of a tensor of three dimensions, its corner at (x, y, z); what lies outside the tensor arrives as zeros.
__device__ __forceinline__ void tensor_load(u32 to, const TensorMap* map, i32 x, i32 y, i32 z, u32 barrier) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to),
                 "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier)
                 : "memory");
}

// The same into every block of the cluster whose bit is set in `blocks`, at the same addresses, completing there.
__device__ __forceinline__ void tensor_load_multicast(u32 to, const TensorMap* map, i32 x, i32 y, i32 z, u32 barrier,
                                                      u16 blocks) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                 ".multicast::cluster [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(to),
                 "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier), "h"(blocks)
                 : "memory");
}

// Shared memory to a box of a tensor, its corner at (x, y, z); what lies outside the tensor is not written. In the group
// that the thread has open.
__device__ __forceinline__ void tensor_store(const TensorMap* map, i32 x, i32 y, i32 z, u32 from) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3}], [%4];" ::"l"(map), "r"(x),
                 "r"(y), "r"(z), "r"(from)
                 : "memory");
}

// By every thread whose stores to shared memory a copy will read, before it meets the thread that asks for the copy.
__device__ __forceinline__ void show_to_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// By a thread that has learned what others wrote to global memory, before it asks for a copy of that.
__device__ __forceinline__ void show_memory_to_copies() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// Closes the group of the thread's stores.
__device__ __forceinline__ void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Until shared memory has been read for all of the thread's groups but the last LEFT.
template <u32 LEFT>
__device__ __forceinline__ void wait_until_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(LEFT) : "memory");
}

__device__ __forceinline__ void tensor_map_prefetch(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
