// The global scale of a matrix in one pass: 2688 / the largest finite magnitude.
// On entry: the slot's two counters are 0, as they are when the module is loaded and when a launch ends.
// Reads fp16, bf16 or fp32 (INPUT) of any strides; writes one fp32. The same bits on every run: a maximum has no order.
// The rule is that of fp4rt/format.py, "Global scale of a tensor".
#include "block/finite_maximum.cuh"
#include "block/global_scale.cuh"
#include "kernels/amax_arguments.cuh"
#include "layout/divider.cuh"
#include "ptx/global_memory.cuh"
#include "ptx/integer_arithmetic.cuh"

#if __CUDA_ARCH__ < 800
#error "amax.cu is built for sm_80 and newer"
#endif

constexpr u32 PIECE_BYTES = 16, PIECE_WORDS = PIECE_BYTES / 4;
constexpr u32 ELEMENT_BYTES = Elements<INPUT>::BYTES;

// Two launches never share a slot while both may run, so a slot belongs to a stream, or to one node of a graph.
struct Slot {
    u32 maximum_bits;  // of the CTAs that are done; magnitudes order like their bits
    u32 arrivals;
};
__device__ Slot slots[SLOTS];

// The row of an index into `rows` times `width` things.
__device__ __forceinline__ u64 row_of(u64 index, u64 rows, u64 width, u64 magic) {
    return rows == 1 ? 0 : divide(index, magic, width);
}

__device__ __forceinline__ const u8* piece_address(const AmaxArguments& a, u64 index) {
    const u64 row = row_of(index, a.rows, a.pieces, a.pieces_magic);
    return a.x + (i64)row * a.row_stride + a.head * ELEMENT_BYTES + (index - row * a.pieces) * PIECE_BYTES;
}

// One of the elements in no piece: the row's first `head`, or its last ones.
__device__ __forceinline__ u32 rest_bits(const AmaxArguments& a, u64 index) {
    const u64 row = row_of(index, a.rows, a.rest, a.rest_magic), i = index - row * a.rest;
    const u64 column = i < a.head ? i : a.n - a.rest + i;
    const u8* from = a.x + (i64)row * a.row_stride + (i64)column * a.column_stride;
    return ELEMENT_BYTES == 4 ? load_4(from) : load_2(from);
}

// Adds this CTA's maximum to the slot; the last CTA writes the global scale and leaves the slot at 0.
__device__ __forceinline__ void finish(float* global_scale, Slot& slot, u32 maximum_bits) {
    atomicMax(&slot.maximum_bits, maximum_bits);
    __threadfence();
    if (atomicAdd(&slot.arrivals, 1u) != gridDim.x - 1) return;
    __threadfence();
    *global_scale = global_scale_of(float_of(atomicExch(&slot.maximum_bits, 0u)));
    atomicExch(&slot.arrivals, 0u);
}

extern "C" __global__ void __launch_bounds__(THREADS) amax(const __grid_constant__ AmaxArguments a) {
    constexpr u32 WARP = 32, WARPS = THREADS / WARP;
    FiniteMaximum<INPUT> largest;
    const u64 all_pieces = a.rows * a.pieces, step = (u64)gridDim.x * THREADS * PIECES_PER_THREAD;
    const u64 start = (u64)blockIdx.x * THREADS * PIECES_PER_THREAD + threadIdx.x;
#pragma unroll 1
    for (u64 index = start; index < all_pieces; index += step) {
        u32 word[PIECES_PER_THREAD * PIECE_WORDS] = {};
#pragma unroll
        for (u32 k = 0; k < PIECES_PER_THREAD; ++k) {
            if (index + k * THREADS < all_pieces) load_16(piece_address(a, index + k * THREADS), word + k * PIECE_WORDS);
        }
        largest.add(word);
    }
#pragma unroll 1
    for (u64 index = (u64)blockIdx.x * THREADS + threadIdx.x; index < a.rows * a.rest; index += (u64)gridDim.x * THREADS) {
        const u32 word[1] = {rest_bits(a, index)};
        largest.add(word);
    }

    __shared__ u32 of_warp[WARPS];
    const u32 of_this_warp = warp_maximum(bits_of(largest.value()));
    if (threadIdx.x % WARP == 0) of_warp[threadIdx.x / WARP] = of_this_warp;
    __syncthreads();
    if (threadIdx.x == 0) {
        u32 of_cta = 0;
#pragma unroll
        for (u32 i = 0; i < WARPS; ++i) of_cta = of_cta > of_warp[i] ? of_cta : of_warp[i];
        finish(a.global_scale, slots[a.slot], of_cta);
    }
}
