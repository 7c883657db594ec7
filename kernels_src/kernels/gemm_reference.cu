// D = alpha * A @ B^T + bias as the definition says it, one thread an element: what the fast kernels are held against.
//
// On entry: m >= 1. A is fp16, bf16 (any strides) or NVFP4, B is NVFP4; any shape, any alignment, any scale layout.
// Values are exact in fp32, and so is each product; the sum is rounded to fp32 after every addition, in the order of k.
// Rule: fp4rt/format.py, "Dequantize", without the global scales, which alpha carries.
#include "block/gemm_epilogue.cuh"
#include "block/scale_rows.cuh"
#include "num/e4m3.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#error "gemm_reference.cu is built for sm_80 and newer"
#endif

// Defined by the launcher: A_KIND.

constexpr u32 THREADS = 256;

// The two exponent bits and the mantissa bit in fp32's place are the value times 2^-126, subnormal 0.5 included.
__device__ __forceinline__ float float_from_e2m1(u32 code) {
    const float magnitude = float_of((code & 7) << 22) * 0x1p126f;
    return code & 8 ? -magnitude : magnitude;
}

struct Nvfp4Row {
    const u8* codes;
    const u8* scales;
    u64 group_stride;

    __device__ Nvfp4Row(const u8* matrix, const u8* matrix_scales, u32 layout, u32 columns, i64 row) {
        const ScaleRows rows(matrix_scales, layout, columns);
        codes = matrix + row * columns * 8;
        scales = rows.row(row);
        group_stride = rows.group_stride;
    }

    __device__ float operator[](i32 k) const {
        const u32 code = codes[k / 2] >> k % 2 * 4 & 0xF, column = k / 16;
        return float_from_e2m1(code) * float_from_e4m3_portable(scales[column / 4 * group_stride + column % 4]);
    }
};

struct HalfRow {
    const u8* first;
    i64 stride;

    __device__ float operator[](i32 k) const {
        const u16 bits = *(const u16*)(first + k * stride);
        return A_KIND == FLOAT16 ? float_from_f16(bits) : float_from_bf16(bits);
    }
};

template <typename Row>
__device__ __forceinline__ float sum_of_products(const Row& a, const Nvfp4Row& b, i32 k) {
    float sum = 0.0f;
    for (i32 i = 0; i < k; ++i) sum = sum + a[i] * b[i];
    return sum;
}

extern "C" __global__ void __launch_bounds__(THREADS) gemm_reference(const __grid_constant__ GemmArguments args) {
    const u64 element = (u64)blockIdx.x * THREADS + threadIdx.x;
    const i64 row = element / (u64)args.n, column = element % (u64)args.n;
    if (row >= args.m) return;
    const Nvfp4Row b(args.b, args.b_scales, args.b_layout, args.b_columns, column);
    float sum;
    if constexpr (A_KIND == NVFP4) {
        sum = sum_of_products(Nvfp4Row(args.a, args.a_scales, args.a_layout, args.a_columns, row), b, args.k);
    } else {
        sum = sum_of_products(HalfRow{args.a + row * args.a_row_stride, args.a_column_stride}, b, args.k);
    }
    store_result(args, row, column, sum, alpha_factors(args, gemm_alpha(args)));
}
