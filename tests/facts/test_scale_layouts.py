"""Scale layouts: the drawings in the module, every offset of every shape, and the way back."""

from __future__ import annotations

import numpy as np
import pytest

from fp4rt.errors import LayoutError
from fp4rt.layout import ALIASES, LAYOUTS, ScaleLayout, block_columns, ceil_div, data_shape, get_layout, round_up

SHAPES = [(1, 1), (1, 4), (3, 3), (8, 4), (9, 5), (127, 7), (128, 4), (129, 9), (300, 13), (0, 4)]
ALL = list(LAYOUTS.values())


def offset_by_the_formula(name: str, r: int, c: int, columns: int) -> int:
    """The formulas of the public contract, written out."""
    across = -(-columns // 4)
    if name == "128x4":
        return ((r // 128) * across + c // 4) * 512 + (r % 32) * 16 + ((r % 128) // 32) * 4 + c % 4
    if name == "8x4":
        return ((r // 8) * across + c // 4) * 32 + (r % 8) * 4 + c % 4
    return r * columns + c


@pytest.mark.parametrize("layout", ALL, ids=str)
@pytest.mark.parametrize(("m", "columns"), SHAPES)
def test_every_offset_follows_the_formula(layout: ScaleLayout, m: int, columns: int) -> None:
    offsets = layout.offsets(m, columns)
    wanted = [[offset_by_the_formula(layout.name, r, c, columns) for c in range(columns)] for r in range(m)]
    assert offsets.tolist() == wanted
    assert offsets.size == 0 or offsets.max() < layout.nbytes(m, columns)


@pytest.mark.parametrize("layout", ALL, ids=str)
@pytest.mark.parametrize(("m", "columns"), SHAPES)
def test_every_physical_byte_has_one_coordinate_and_the_way_back(layout: ScaleLayout, m: int, columns: int) -> None:
    rows, cols = layout.shape(m, columns)
    place = np.arange(layout.nbytes(m, columns))
    r, c = layout.coordinates(place, columns)
    assert np.array_equal(layout.offset(r, c, columns), place)
    assert len({*zip(np.asarray(r).tolist(), np.asarray(c).tolist(), strict=True)}) == rows * cols


@pytest.mark.parametrize("layout", ALL, ids=str)
@pytest.mark.parametrize(("m", "columns"), SHAPES)
def test_an_offset_is_a_row_part_plus_a_column_part(layout: ScaleLayout, m: int, columns: int) -> None:
    rows = layout.offset(np.arange(m)[:, None], 0, columns)
    assert np.array_equal(layout.offsets(m, columns), rows + layout.offset(0, np.arange(columns), columns))


def test_a_128x4_tile_lies_as_it_is_drawn() -> None:
    tile = LAYOUTS["128x4"]
    for line, rows in ((0, (0, 32, 64, 96)), (1, (1, 33, 65, 97)), (31, (31, 63, 95, 127))):
        for cell, row in enumerate(rows):
            assert [tile.offset(row, c, 4) for c in range(4)] == [16 * line + 4 * cell + c for c in range(4)]
    assert tile.offset(0, 4, 8) == 512
    assert tile.offset(128, 0, 8) == 1024


def test_an_8x4_tile_lies_as_it_is_drawn() -> None:
    tile = LAYOUTS["8x4"]
    assert [tile.offset(row, 0, 4) for row in range(8)] == list(range(0, 32, 4))
    assert tile.offset(8, 5, 8) == 64 + 32 + 1


@pytest.mark.parametrize("layout", ALL, ids=str)
@pytest.mark.parametrize(("m", "columns"), SHAPES)
def test_packing_is_undone_by_unpacking_and_padding_is_zero(layout: ScaleLayout, m: int, columns: int) -> None:
    scales = np.random.default_rng(m).integers(1, 256, (m, columns), dtype=np.uint8)
    packed = layout.pack(scales)
    assert packed.shape == layout.shape(m, columns)
    assert np.array_equal(layout.unpack(packed, m, columns), scales)
    mask = layout.padding_mask(m, columns)
    assert not packed[mask].any()
    assert packed[~mask].all()
    assert mask.sum() == layout.nbytes(m, columns) - m * columns


@pytest.mark.parametrize(
    ("name", "m", "columns", "shape"),
    [
        ("linear", 130, 5, (130, 5)),
        ("128x4", 130, 5, (256, 8)),
        ("8x4", 130, 5, (136, 8)),
        ("128x4", 0, 5, (0, 8)),
        ("128x4", 1, 1, (128, 4)),
    ],
)
def test_physical_shapes(name: str, m: int, columns: int, shape: tuple[int, int]) -> None:
    assert LAYOUTS[name].shape(m, columns) == shape
    assert LAYOUTS[name].nbytes(m, columns) == shape[0] * shape[1]


def test_offsets_beyond_32_bits_are_exact() -> None:
    layout, columns = LAYOUTS["128x4"], 1 << 16
    row = np.int64(1 << 20)
    assert layout.offset(row, np.int64(7), columns) == offset_by_the_formula("128x4", 1 << 20, 7, columns) > 1 << 32


@pytest.mark.parametrize("alias", ALIASES)
def test_spellings_of_other_libraries(alias: str) -> None:
    assert get_layout(alias) is LAYOUTS[ALIASES[alias]]


def test_an_unknown_layout_lists_the_known_ones() -> None:
    with pytest.raises(LayoutError, match=r"'64x4'; use one of 'linear', '128x4', '8x4'"):
        get_layout("64x4")


def test_small_arithmetic() -> None:
    assert [ceil_div(v, 4) for v in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert [round_up(v, 16) for v in (0, 1, 16, 17)] == [0, 16, 16, 32]
    assert block_columns(96) == 6
    assert data_shape(3, 96) == (3, 48)


def test_an_array_in_the_place_of_a_layout_is_not_printed() -> None:
    with pytest.raises(LayoutError, match="unknown scale layout of type ndarray; use one of"):
        get_layout(np.zeros((1000, 1000)))  # type: ignore[arg-type]
