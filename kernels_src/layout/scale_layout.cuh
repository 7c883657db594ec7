// Where a block scale lies: all index arithmetic of the three layouts. The device's twin of fp4rt/layout.py.
//
// r is a row, c a block column, C the number of block columns, across = ceil(C / tile columns) the tiles in a row.
//
//   128x4: a tile is 128 rows x 4 columns = 512 bytes     8x4: a tile is 8 rows x 4 columns = 32 bytes
//     byte   0        4        8        12                  byte   0       4       ...   28
//     16*0   row 0    row 32   row 64   row 96                     row 0   row 1   ...   row 7
//     16*1   row 1    row 33   row 65   row 97
//     ...                                                 linear: a tile is one scale, across = C
//     16*31  row 31   row 63   row 95   row 127
//
// Example, 128x4 with C = 9 (across = 3): row 130, column 5 is in tile (1, 1), in it row 2, column 1:
//   (1 * 3 + 1) * 512 + (2 * 4 + 0) * 4 + 1 = 2081
//
// Every function takes the layout by value: a constant folds away, a kernel argument costs a few shifts.
#pragma once
#include "num/constants.cuh"
#include "layout/divider.cuh"

__device__ __forceinline__ u32 tile_bytes_log2(ScaleLayout layout) {
    return layout.tile_rows_log2 + layout.tile_columns_log2;
}

__device__ __forceinline__ u32 row_in_tile(ScaleLayout layout, u64 row) {
    return (u32)row & ((1u << layout.tile_rows_log2) - 1);
}

// Offset in a tile of (row, column 0). The row groups interleave: rows r, r + 32, ... share 16 bytes in 128x4.
__device__ __forceinline__ u32 row_offset_in_tile(ScaleLayout layout, u32 row_in_tile) {
    const u32 rows_in_group_log2 = layout.tile_rows_log2 - layout.row_groups_log2;
    const u32 row_in_group = row_in_tile & ((1u << rows_in_group_log2) - 1), group = row_in_tile >> rows_in_group_log2;
    return ((row_in_group << layout.row_groups_log2) + group) << layout.tile_columns_log2;
}

// Offset of (row, column 0).
__device__ __forceinline__ u64 row_offset(ScaleLayout layout, u64 row, u64 across) {
    const u64 tile = (row >> layout.tile_rows_log2) * across;
    return (tile << tile_bytes_log2(layout)) + row_offset_in_tile(layout, row_in_tile(layout, row));
}

// What a column adds to its row's offset.
__device__ __forceinline__ u64 column_offset(ScaleLayout layout, u64 column) {
    const u64 in_tile = column & ((1u << layout.tile_columns_log2) - 1);
    return ((column >> layout.tile_columns_log2) << tile_bytes_log2(layout)) + in_tile;
}

__device__ __forceinline__ u64 scale_offset(ScaleLayout layout, u64 row, u64 column, u64 across) {
    return row_offset(layout, row, across) + column_offset(layout, column);
}

struct ScalePlace {
    u64 row, column;
};

// Inverse of row_offset_in_tile and the column, for a byte within a tile.
__device__ __forceinline__ u32 row_of_byte(ScaleLayout layout, u32 byte) {
    const u32 slot = byte >> layout.tile_columns_log2;
    const u32 group = slot & ((1u << layout.row_groups_log2) - 1);
    return (slot >> layout.row_groups_log2) + (group << (layout.tile_rows_log2 - layout.row_groups_log2));
}

__device__ __forceinline__ u32 column_of_byte(ScaleLayout layout, u32 byte) {
    return byte & ((1u << layout.tile_columns_log2) - 1);
}

// Inverse of scale_offset, padding included; across_magic is the divider's for across.
__device__ __forceinline__ ScalePlace scale_place(ScaleLayout layout, u64 offset, u64 across, u64 across_magic) {
    const u64 tile = offset >> tile_bytes_log2(layout);
    const u32 byte = (u32)offset & ((1u << tile_bytes_log2(layout)) - 1);
    const u64 tile_row = divide(tile, across_magic, across);
    const u64 tile_column = tile - tile_row * across;
    return {(tile_row << layout.tile_rows_log2) + row_of_byte(layout, byte),
            (tile_column << layout.tile_columns_log2) + column_of_byte(layout, byte)};
}

// The layout whose index a kernel was given.
__device__ __forceinline__ ScaleLayout scale_layout(u32 index) {
    return index == LAYOUT_LINEAR.index ? LAYOUT_LINEAR : index == LAYOUT_128X4.index ? LAYOUT_128X4 : LAYOUT_8X4;
}
