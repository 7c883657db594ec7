// The warpgroup-wide matrix product m64nNk16 (wgmma, sm_90a): A from registers, B from shared memory, fp32 sums.
//
// A and the sums lie like those of mma.sync m16n8k16 (ptx/mma_sync.cuh): warp w of the group has rows 16 w ... 16 w+15,
// sums 4 q ... 4 q+3 are its columns 8 q ... 8 q+7. B is a tile of N rows (tokens) x 64 columns of k, 128 bytes a row,
// swizzled by 128 bytes as the copy engine writes it: 16-byte unit u of row r at 128 r + 16 (u xor r%8).
//
// The product runs beside the warps: neither sums nor A may be touched until wgmma_wait says so.
// Source: PTX ISA, "Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions".
#pragma once
#include "num/integers.cuh"

// Descriptor of B: bits 13:0 address / 16; 29:16 leading offset, unused for this layout (1); 45:32 the 1024 bytes from
// one group of 8 rows to the next / 16; 63:62 = 1, swizzle by 128 bytes. The next 16 columns of k are 32 bytes on.
constexpr u32 WGMMA_TILE_HIGH = 64u | 1u << 30;
constexpr u32 WGMMA_K_STEP = 32 >> 4;

__device__ __forceinline__ u32 wgmma_tile_low(u32 shared_address) { return shared_address >> 4 | 1u << 16; }

__device__ __forceinline__ u64 wgmma_tile(u32 low) { return (u64)WGMMA_TILE_HIGH << 32 | low; }

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Wait until at most PENDING groups are still running.
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Keeps the compiler from moving reads of a sum above the wait.
__device__ __forceinline__ void wgmma_settle(float& sum) { asm volatile("" : "+f"(sum)::"memory"); }

// wgmma_f16<N>(sums, a, tile), wgmma_bf16<N>(sums, a, tile): sums += A * B^T
template <int N>
__device__ void wgmma_f16(float* sums, const u32* a, u64 tile);
template <int N>
__device__ void wgmma_bf16(float* sums, const u32* a, u64 tile);

// An instruction names all its registers, so every N is spelled out: 4 sums a lane for every 8 columns.
#define WGMMA_REGISTERS_1 "%0, %1, %2, %3"
#define WGMMA_REGISTERS_2 WGMMA_REGISTERS_1 ", " "%4, %5, %6, %7"
#define WGMMA_REGISTERS_3 WGMMA_REGISTERS_2 ", " "%8, %9, %10, %11"
#define WGMMA_REGISTERS_4 WGMMA_REGISTERS_3 ", " "%12, %13, %14, %15"
#define WGMMA_REGISTERS_5 WGMMA_REGISTERS_4 ", " "%16, %17, %18, %19"
#define WGMMA_REGISTERS_6 WGMMA_REGISTERS_5 ", " "%20, %21, %22, %23"
#define WGMMA_REGISTERS_7 WGMMA_REGISTERS_6 ", " "%24, %25, %26, %27"
#define WGMMA_REGISTERS_8 WGMMA_REGISTERS_7 ", " "%28, %29, %30, %31"
#define WGMMA_REGISTERS_9 WGMMA_REGISTERS_8 ", " "%32, %33, %34, %35"
#define WGMMA_REGISTERS_10 WGMMA_REGISTERS_9 ", " "%36, %37, %38, %39"
#define WGMMA_REGISTERS_11 WGMMA_REGISTERS_10 ", " "%40, %41, %42, %43"
#define WGMMA_REGISTERS_12 WGMMA_REGISTERS_11 ", " "%44, %45, %46, %47"
#define WGMMA_REGISTERS_13 WGMMA_REGISTERS_12 ", " "%48, %49, %50, %51"
#define WGMMA_REGISTERS_14 WGMMA_REGISTERS_13 ", " "%52, %53, %54, %55"
#define WGMMA_REGISTERS_15 WGMMA_REGISTERS_14 ", " "%56, %57, %58, %59"
#define WGMMA_REGISTERS_16 WGMMA_REGISTERS_15 ", " "%60, %61, %62, %63"
#define WGMMA_REGISTERS_17 WGMMA_REGISTERS_16 ", " "%64, %65, %66, %67"
#define WGMMA_REGISTERS_18 WGMMA_REGISTERS_17 ", " "%68, %69, %70, %71"
#define WGMMA_REGISTERS_19 WGMMA_REGISTERS_18 ", " "%72, %73, %74, %75"
#define WGMMA_REGISTERS_20 WGMMA_REGISTERS_19 ", " "%76, %77, %78, %79"
#define WGMMA_REGISTERS_21 WGMMA_REGISTERS_20 ", " "%80, %81, %82, %83"
#define WGMMA_REGISTERS_22 WGMMA_REGISTERS_21 ", " "%84, %85, %86, %87"
#define WGMMA_REGISTERS_23 WGMMA_REGISTERS_22 ", " "%88, %89, %90, %91"
#define WGMMA_REGISTERS_24 WGMMA_REGISTERS_23 ", " "%92, %93, %94, %95"
#define WGMMA_REGISTERS_25 WGMMA_REGISTERS_24 ", " "%96, %97, %98, %99"
#define WGMMA_REGISTERS_26 WGMMA_REGISTERS_25 ", " "%100, %101, %102, %103"
#define WGMMA_REGISTERS_27 WGMMA_REGISTERS_26 ", " "%104, %105, %106, %107"
#define WGMMA_REGISTERS_28 WGMMA_REGISTERS_27 ", " "%108, %109, %110, %111"
#define WGMMA_REGISTERS_29 WGMMA_REGISTERS_28 ", " "%112, %113, %114, %115"
#define WGMMA_REGISTERS_30 WGMMA_REGISTERS_29 ", " "%116, %117, %118, %119"
#define WGMMA_REGISTERS_31 WGMMA_REGISTERS_30 ", " "%120, %121, %122, %123"
#define WGMMA_REGISTERS_32 WGMMA_REGISTERS_31 ", " "%124, %125, %126, %127"

#define WGMMA_FOUR(i) "+f"(sums[i]), "+f"(sums[i + 1]), "+f"(sums[i + 2]), "+f"(sums[i + 3])
#define WGMMA_SUMS_1 WGMMA_FOUR(0)
#define WGMMA_SUMS_2 WGMMA_SUMS_1, WGMMA_FOUR(4)
#define WGMMA_SUMS_3 WGMMA_SUMS_2, WGMMA_FOUR(8)
#define WGMMA_SUMS_4 WGMMA_SUMS_3, WGMMA_FOUR(12)
#define WGMMA_SUMS_5 WGMMA_SUMS_4, WGMMA_FOUR(16)
#define WGMMA_SUMS_6 WGMMA_SUMS_5, WGMMA_FOUR(20)
#define WGMMA_SUMS_7 WGMMA_SUMS_6, WGMMA_FOUR(24)
#define WGMMA_SUMS_8 WGMMA_SUMS_7, WGMMA_FOUR(28)
#define WGMMA_SUMS_9 WGMMA_SUMS_8, WGMMA_FOUR(32)
#define WGMMA_SUMS_10 WGMMA_SUMS_9, WGMMA_FOUR(36)
#define WGMMA_SUMS_11 WGMMA_SUMS_10, WGMMA_FOUR(40)
#define WGMMA_SUMS_12 WGMMA_SUMS_11, WGMMA_FOUR(44)
#define WGMMA_SUMS_13 WGMMA_SUMS_12, WGMMA_FOUR(48)
#define WGMMA_SUMS_14 WGMMA_SUMS_13, WGMMA_FOUR(52)
#define WGMMA_SUMS_15 WGMMA_SUMS_14, WGMMA_FOUR(56)
#define WGMMA_SUMS_16 WGMMA_SUMS_15, WGMMA_FOUR(60)
#define WGMMA_SUMS_17 WGMMA_SUMS_16, WGMMA_FOUR(64)
#define WGMMA_SUMS_18 WGMMA_SUMS_17, WGMMA_FOUR(68)
#define WGMMA_SUMS_19 WGMMA_SUMS_18, WGMMA_FOUR(72)
#define WGMMA_SUMS_20 WGMMA_SUMS_19, WGMMA_FOUR(76)
#define WGMMA_SUMS_21 WGMMA_SUMS_20, WGMMA_FOUR(80)
#define WGMMA_SUMS_22 WGMMA_SUMS_21, WGMMA_FOUR(84)
#define WGMMA_SUMS_23 WGMMA_SUMS_22, WGMMA_FOUR(88)
#define WGMMA_SUMS_24 WGMMA_SUMS_23, WGMMA_FOUR(92)
#define WGMMA_SUMS_25 WGMMA_SUMS_24, WGMMA_FOUR(96)
#define WGMMA_SUMS_26 WGMMA_SUMS_25, WGMMA_FOUR(100)
#define WGMMA_SUMS_27 WGMMA_SUMS_26, WGMMA_FOUR(104)
#define WGMMA_SUMS_28 WGMMA_SUMS_27, WGMMA_FOUR(108)
#define WGMMA_SUMS_29 WGMMA_SUMS_28, WGMMA_FOUR(112)
#define WGMMA_SUMS_30 WGMMA_SUMS_29, WGMMA_FOUR(116)
#define WGMMA_SUMS_31 WGMMA_SUMS_30, WGMMA_FOUR(120)
#define WGMMA_SUMS_32 WGMMA_SUMS_31, WGMMA_FOUR(124)

#define WGMMA_INSTRUCTION(N, TYPE, EIGHTS, A0, A1, A2, A3, B)                                                    \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" WGMMA_REGISTERS_##EIGHTS   \
                 "}, {%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #B ", 1, 1, 1, 0;"                             \
                 : WGMMA_SUMS_##EIGHTS                                                                           \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(tile))

// EIGHTS = N / 8; A0 ... A3 and B are the operand numbers after the sums.
#define WGMMA_SHAPE(N, EIGHTS, A0, A1, A2, A3, B)                                                                \
    template <>                                                                                                  \
    __device__ __forceinline__ void wgmma_f16<N>(float* sums, const u32* a, u64 tile) {                          \
        WGMMA_INSTRUCTION(N, "f16", EIGHTS, A0, A1, A2, A3, B);                                                  \
    }                                                                                                            \
    template <>                                                                                                  \
    __device__ __forceinline__ void wgmma_bf16<N>(float* sums, const u32* a, u64 tile) {                         \
        WGMMA_INSTRUCTION(N, "bf16", EIGHTS, A0, A1, A2, A3, B);                                                 \
    }

WGMMA_SHAPE(8, 1, 4, 5, 6, 7, 8)
WGMMA_SHAPE(16, 2, 8, 9, 10, 11, 12)
WGMMA_SHAPE(24, 3, 12, 13, 14, 15, 16)
WGMMA_SHAPE(32, 4, 16, 17, 18, 19, 20)
WGMMA_SHAPE(40, 5, 20, 21, 22, 23, 24)
WGMMA_SHAPE(48, 6, 24, 25, 26, 27, 28)
WGMMA_SHAPE(56, 7, 28, 29, 30, 31, 32)
WGMMA_SHAPE(64, 8, 32, 33, 34, 35, 36)
WGMMA_SHAPE(72, 9, 36, 37, 38, 39, 40)
WGMMA_SHAPE(80, 10, 40, 41, 42, 43, 44)
WGMMA_SHAPE(88, 11, 44, 45, 46, 47, 48)
WGMMA_SHAPE(96, 12, 48, 49, 50, 51, 52)
WGMMA_SHAPE(104, 13, 52, 53, 54, 55, 56)
WGMMA_SHAPE(112, 14, 56, 57, 58, 59, 60)
WGMMA_SHAPE(120, 15, 60, 61, 62, 63, 64)
WGMMA_SHAPE(128, 16, 64, 65, 66, 67, 68)
WGMMA_SHAPE(136, 17, 68, 69, 70, 71, 72)
WGMMA_SHAPE(144, 18, 72, 73, 74, 75, 76)
WGMMA_SHAPE(152, 19, 76, 77, 78, 79, 80)
WGMMA_SHAPE(160, 20, 80, 81, 82, 83, 84)
WGMMA_SHAPE(168, 21, 84, 85, 86, 87, 88)
WGMMA_SHAPE(176, 22, 88, 89, 90, 91, 92)
WGMMA_SHAPE(184, 23, 92, 93, 94, 95, 96)
WGMMA_SHAPE(192, 24, 96, 97, 98, 99, 100)
WGMMA_SHAPE(200, 25, 100, 101, 102, 103, 104)
WGMMA_SHAPE(208, 26, 104, 105, 106, 107, 108)
WGMMA_SHAPE(216, 27, 108, 109, 110, 111, 112)
WGMMA_SHAPE(224, 28, 112, 113, 114, 115, 116)
WGMMA_SHAPE(232, 29, 116, 117, 118, 119, 120)
WGMMA_SHAPE(240, 30, 120, 121, 122, 123, 124)
WGMMA_SHAPE(248, 31, 124, 125, 126, 127, 128)
WGMMA_SHAPE(256, 32, 128, 129, 130, 131, 132)
