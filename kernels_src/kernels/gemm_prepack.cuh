// The arguments of the kernels that pack a weight into the prepacked layout and take it out again.
#pragma once
#include "num/integers.cuh"

struct PrepackArguments {
    u8* data;        // (n, row_bytes) codes; read by packing, written by unpacking
    u8* scales;      // e4m3 in `layout`
    u8* tiles;       // data[k / 256][n / 16][2304]
    u32* counts;     // (n,): how many blocks of a row need a record; where a row's records begin, for writing them
    u8* records;     // (count, 16)
    i64 row_bytes;
    i64 n;
    i32 k;
    i32 columns;     // block columns in memory, padding included
    i32 layout;      // index of the scale layout
    u32 record_count;
};
