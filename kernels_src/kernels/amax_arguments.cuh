// The arguments of amax.cu.
#pragma once
#include "num/integers.cuh"

struct AmaxArguments {
    const u8* x;          // element (0, 0) of (rows, n)
    float* global_scale;  // one element, written
    i64 row_stride;       // bytes, any sign; a multiple of 16 where there are pieces
    i64 column_stride;    // bytes, any sign; the element's size where there are pieces
    u64 rows;             // 1 for a dense matrix, which is one long row
    u64 n;
    u64 head;          // elements of a row before its first multiple of 16
    u64 pieces;        // 16-byte pieces of a row
    u64 pieces_magic;  // divider of `pieces`
    u64 rest;          // elements of a row in no piece: head and tail
    u64 rest_magic;    // divider of `rest`
    u32 slot;          // which pair of counters; no two launches that may run at once share one
};
