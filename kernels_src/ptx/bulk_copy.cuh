// Copies by the copy engine from global to shared memory (cp.async.bulk and its tensor form, sm_90).
// On entry: addresses and sizes are multiples of 16 bytes, a tensor tile's destination of 128 (1024 where it is
// swizzled by 128 bytes). Loads complete on an mbarrier.
// Source: PTX ISA, "Data Movement and Conversion Instructions: cp.async.bulk, cp.async.bulk.tensor".
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

__device__ __forceinline__ void tensor_map_prefetch(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
