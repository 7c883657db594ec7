"""Where a block scale lies: the three layouts and all their index arithmetic.

``r`` is a row, ``c`` a block column, ``C`` the number of block columns (padded_n / 16), ``C4`` = ceil(C / 4).

linear (row-major, "sf-major"), shape (m, C)::

    offset = r * C + c

128x4 (swizzled, what the tensor cores of Blackwell read), shape (ceil(m/128)*128, C4*4). One tile is 128 rows x
4 block columns = 512 bytes; tiles follow each other along a row of tiles. Inside a tile, rows r, r+32, r+64 and
r+96 share 16 bytes::

    tile byte   0        4        8        12
    16 * 0      row 0    row 32   row 64   row 96      each cell: the 4 block columns of that row
    16 * 1      row 1    row 33   row 65   row 97
    ...
    16 * 31     row 31   row 63   row 95   row 127

    offset = ((r/128) * C4 + c/4) * 512 + (r%32) * 16 + ((r%128)/32) * 4 + c%4

8x4 (TensorRT-LLM, for few rows), shape (ceil(m/8)*8, C4*4). One tile is 8 rows x 4 block columns = 32 bytes::

    tile byte   0       4       8       ...   28
                row 0   row 1   row 2   ...   row 7

    offset = ((r/8) * C4 + c/4) * 32 + (r%8) * 4 + c%4

Data: byte ``r * (padded_n / 2) + column / 2``, the even column in the low nibble.

Sources: NVIDIA cuBLAS documentation, "1D block scaling factors layout" (128x4); TensorRT-LLM's 8x4 layout as
FlashInfer names it (``SfLayout.layout_8x4``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from fp4rt.errors import LayoutError
from fp4rt.format import BLOCK, CODES_PER_BYTE

__all__ = [
    "LAYOUTS",
    "ScaleLayout",
    "block_columns",
    "ceil_div",
    "data_shape",
    "get_layout",
    "round_up",
]


def ceil_div(value: int, divisor: int) -> int:
    """Smallest integer not below ``value / divisor``."""
    return -(-value // divisor)


def round_up(value: int, multiple: int) -> int:
    """Smallest multiple of ``multiple`` not below ``value``."""
    return ceil_div(value, multiple) * multiple


def block_columns(padded_n: int) -> int:
    """Number C of block columns of a row of ``padded_n`` columns."""
    return padded_n // BLOCK


def data_shape(m: int, padded_n: int) -> tuple[int, int]:
    """Shape in bytes of the packed codes."""
    return m, padded_n // CODES_PER_BYTE


@dataclass(frozen=True)
class ScaleLayout:
    """One scale layout. ``tile_rows`` = ``tile_columns`` = 1 means row-major without padding.

    ``row_groups`` is how many row groups interleave in a tile: 4 in 128x4 (rows 32 apart), 1 in 8x4.
    """

    name: str
    tile_rows: int
    tile_columns: int
    row_groups: int
    index: int  # the value of LAYOUT in the kernels

    @property
    def tiled(self) -> bool:
        """Whether the layout has tiles, and with them padding rows and columns."""
        return self.tile_rows > 1

    @property
    def tile_bytes(self) -> int:
        """Bytes of one tile."""
        return self.tile_rows * self.tile_columns

    def shape(self, m: int, columns: int) -> tuple[int, int]:
        """Physical shape in bytes for ``m`` rows and ``columns`` block columns; m = 0 gives no rows."""
        return round_up(m, self.tile_rows), round_up(columns, self.tile_columns)

    def nbytes(self, m: int, columns: int) -> int:
        """Physical size in bytes."""
        rows, cols = self.shape(m, columns)
        return rows * cols

    def offset(self, row: Any, column: Any, columns: int) -> Any:
        """Byte offset of the scale of (row, block column); takes integers or integer arrays."""
        if not self.tiled:
            return row * columns + column
        tiles_across = ceil_div(columns, self.tile_columns)
        tile = (row // self.tile_rows) * tiles_across + column // self.tile_columns
        rows_in_group = self.tile_rows // self.row_groups
        row_in_tile = row % self.tile_rows
        slot = (row_in_tile % rows_in_group) * self.row_groups + row_in_tile // rows_in_group
        return tile * self.tile_bytes + slot * self.tile_columns + column % self.tile_columns

    def coordinates(self, offset: Any, columns: int) -> tuple[Any, Any]:
        """(row, block column) of a byte offset: the inverse of :meth:`offset`, padding included."""
        if not self.tiled:
            return offset // columns, offset % columns
        tiles_across = ceil_div(columns, self.tile_columns)
        tile, within = offset // self.tile_bytes, offset % self.tile_bytes
        slot, column_in_tile = within // self.tile_columns, within % self.tile_columns
        rows_in_group = self.tile_rows // self.row_groups
        row_in_tile = slot // self.row_groups + (slot % self.row_groups) * rows_in_group
        row = (tile // tiles_across) * self.tile_rows + row_in_tile
        return row, (tile % tiles_across) * self.tile_columns + column_in_tile

    def offsets(self, m: int, columns: int) -> np.ndarray:
        """int64 (m, columns): byte offset of every valid scale."""
        rows = np.arange(m, dtype=np.int64)[:, None]
        return self.offset(rows, np.arange(columns, dtype=np.int64)[None, :], columns)

    def padding_mask(self, m: int, columns: int) -> np.ndarray:
        """bool, physical shape: True where a byte belongs to no valid (row, block column)."""
        mask = np.ones(self.nbytes(m, columns), bool)
        mask[self.offsets(m, columns)] = False
        return mask.reshape(self.shape(m, columns))

    def _tile_extents(self, m: int, columns: int) -> tuple[int, int, int, int]:
        """(tiles down, row groups, rows of a group, tiles across); a row of a tile is one integer."""
        rows, cols = self.shape(m, columns)
        return rows // self.tile_rows, self.row_groups, self.tile_rows // self.row_groups, cols // self.tile_columns

    def pack(self, scales: np.ndarray) -> np.ndarray:
        """Row-major (m, columns) uint8 scales to this layout, padding zero."""
        m, columns = scales.shape
        padded = np.zeros(self.shape(m, columns), np.uint8)
        padded[:m, :columns] = scales
        cells = padded.view(f"u{self.tile_columns}").reshape(self._tile_extents(m, columns))
        # (down, group, row, across) to (down, across, row, group), as offset() has them
        return np.ascontiguousarray(cells.transpose(0, 3, 2, 1)).view(np.uint8).reshape(padded.shape)

    def unpack(self, scales: np.ndarray, m: int, columns: int) -> np.ndarray:
        """This layout to row-major (m, columns) uint8 scales, a copy; padding is not read."""
        down, groups, rows, across = self._tile_extents(m, columns)
        dense = np.ascontiguousarray(scales).reshape(-1)
        cells = dense.view(f"u{self.tile_columns}").reshape(down, across, rows, groups).transpose(0, 3, 2, 1)
        row_major = np.ascontiguousarray(cells).reshape(-1).view(np.uint8).reshape(self.shape(m, columns))
        return row_major[:m, :columns].copy()


LAYOUTS = {
    layout.name: layout
    for layout in (
        ScaleLayout("linear", tile_rows=1, tile_columns=1, row_groups=1, index=0),
        ScaleLayout("128x4", tile_rows=128, tile_columns=4, row_groups=4, index=1),
        ScaleLayout("8x4", tile_rows=8, tile_columns=4, row_groups=1, index=2),
    )
}
# Spellings of other libraries: vLLM says "swizzled" and "sf_major", FlashInfer "layout_128x4".
ALIASES = {
    "swizzled": "128x4",
    "layout_128x4": "128x4",
    "layout_8x4": "8x4",
    "layout_linear": "linear",
    "row_major": "linear",
    "sf_major": "linear",
}


def get_layout(name: str) -> ScaleLayout:
    """The layout called ``name`` ("linear", "128x4", "8x4", or an alias).

    Raises:
        LayoutError: the name is unknown.
    """
    if isinstance(name, str):
        layout = LAYOUTS.get(name) or LAYOUTS.get(ALIASES.get(name, ""))
        if layout is not None:
            return layout
    wanted = ", ".join(repr(n) for n in LAYOUTS)
    got = f"of type {type(name).__name__}" if hasattr(name, "shape") else repr(name)
    raise LayoutError(f"unknown scale layout {got}; use one of {wanted}")
