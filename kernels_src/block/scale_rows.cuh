// The block scales of one matrix, four block columns (a group) at a time: in every layout they are four neighbours.
#pragma once
#include "layout/scale_layout.cuh"

struct ScaleRows {
    const u8* scales;
    ScaleLayout layout;
    u64 across, group_stride;

    __device__ __forceinline__ ScaleRows() {}
    __device__ __forceinline__ ScaleRows(const u8* first, u32 layout_index, u32 columns)
        : scales(first), layout(scale_layout(layout_index)) {
        across = (columns + (1u << layout.tile_columns_log2) - 1) >> layout.tile_columns_log2;
        group_stride = column_offset(layout, 4);
    }

    __device__ __forceinline__ const u8* row(u64 row) const { return scales + row_offset(layout, row, across); }
    __device__ __forceinline__ u64 group(u32 group) const { return group * group_stride; }
};
