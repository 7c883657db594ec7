// The arguments of a matrix product D[m, n] = alpha * A[m, k] @ B[n, k]^T + bias: the same for every kernel here.
#pragma once
#include "num/constants.cuh"

// Kinds of operands, beside the element types FLOAT16, BFLOAT16 and FLOAT32.
constexpr i32 NVFP4 = 3, PREPACKED = 4;

struct GemmArguments {
    const u8* a;              // (m, k) fp16 or bf16, or codes (m, 8 * a_columns) bytes
    const u8* a_scales;       // NVFP4: block scales, in a_layout
    const u8* b;              // codes (n, 8 * b_columns) bytes, or prepacked tiles
    const u8* b_scales;       // block scales, in b_layout; unused where prepacked
    const void* bias;         // (n,) of bias_type, or null
    void* out;                // (m, n) of out_type
    float* partial;           // (splits, m, n), or null: then the kernel itself finishes `out`
    const float* alpha_array; // one element, or null
    const float* a_global;    // global scale of A, or null for 1
    const float* b_global;    // not null: alpha is 1 / (a_global * b_global)
    i64 a_row_stride;         // bytes
    i64 a_column_stride;      // bytes; read only where A_ALIGN says that A is not plain rows
    i64 m;
    i64 n;
    i32 k;
    i32 a_columns;            // block columns in memory, padding included
    i32 b_columns;
    i32 a_layout;             // index of the scale layout
    i32 b_layout;
    i32 out_type;
    i32 bias_type;
    i32 splits;               // how many parts of k go to different blocks
    float alpha;              // where alpha_array and b_global are null
};
