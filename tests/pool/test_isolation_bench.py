"""The isolation experiment reproduces the published finding, small and on the CPU."""

from __future__ import annotations

import sys

import pytest

from bench import isolation
from bench import pool as pool_bench
from fp4rt.device import CPU


@pytest.fixture(scope="module")
def cells():
    rows, surprises = isolation.run("cpu", [(128, 48), (150, 80)])
    assert surprises == []
    return {row.case: row.notes for row in rows}


@pytest.mark.parametrize("shape", ["128x48", "150x80"])
@pytest.mark.parametrize("layout, broken", [("128x4", True), ("linear", False), ("8x4", True)])
def test_unwritten_padding_breaks_tiled_layouts_only(cells, shape, layout, broken):
    assert cells[f"{shape} {layout} empty: incomplete"]["product"] == ("BROKEN" if broken else "right")
    assert cells[f"{shape} {layout} zero: incomplete"]["product"] == "right"


def test_stale_nan_scales_make_nan_and_stale_large_ones_large_errors(cells):
    cell = cells["128x48 128x4 empty: incomplete"]
    assert cell["error_nan"] == "NaN"
    assert cell["error_largest"] > 0.5


@pytest.mark.parametrize("fill", ["zero", "covered", "empty", "poison"])
def test_the_librarys_kernels_break_under_no_policy(cells, fill):
    ours = {case: notes for case, notes in cells.items() if case.endswith(f" {fill}: fp4rt")}
    assert len(ours) == 6
    assert {notes["product"] for notes in ours.values()} == {"right"}
    assert {notes["coverage"] for notes in ours.values()} == {"every byte written"}


def test_an_honest_tag_makes_covered_safe_at_the_price_of_a_fill(cells):
    cell = cells["150x80 8x4 covered: incomplete, honest tag"]
    assert cell["product"] == "right"
    assert cell["bytes_zeroed"] == 152 * 8
    assert cells["150x80 8x4 covered: fp4rt"]["bytes_zeroed"] == 0


def test_the_check_notices_a_quantizer_that_is_not_as_expected(monkeypatch):
    monkeypatch.setitem(isolation.QUANTIZERS, "fp4rt", isolation.incomplete)
    _, surprises = isolation.run("cpu", [(128, 48)])
    assert any("128x48 128x4 empty: fp4rt: the product is BROKEN" in surprise for surprise in surprises)
    assert any("coverage of fp4rt" in surprise for surprise in surprises)


def test_a_shape_of_whole_tiles_of_block_columns_can_break_nothing_and_is_told_apart(monkeypatch, capsys):
    def started(*options):
        monkeypatch.setattr(sys, "argv", ["isolation", "--no-write", *options])
        return isolation.main()

    rows, surprises = isolation.run("cpu", [(64, 128)])  # 8 block columns: two tiles; 64 rows: half a tile of 128x4
    assert surprises == []
    assert {row.notes["product"] for row in rows} == {"right"}
    said = {
        row.case.split(" empty")[0]: row.notes["coverage"] for row in rows if row.case.endswith("empty: incomplete")
    }
    assert said["64x128 8x4"] == "every byte written"
    assert said["64x128 128x4"] == f"{64 * 8} bytes never written"
    assert started("--shapes", "64x128") == 0
    assert "nothing to reproduce" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        started("--shapes", "64x128", "--check")
    assert "--check needs a shape where a product meets padding" in capsys.readouterr().err


@pytest.mark.parametrize("shape", ["64x100", "64x0", "0x64", "64", "64x64x64", "axb"])
def test_a_shape_that_cannot_be_quantized_is_wrong_usage(shape, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["isolation", "--no-write", "--shapes", shape])
    with pytest.raises(SystemExit, match="2"):
        isolation.main()
    assert f"wanted MxN with n a multiple of 16, got {shape}" in capsys.readouterr().err


def test_the_pools_bench_compares_with_numpy_in_the_same_run(monkeypatch):
    monkeypatch.setattr(pool_bench, "REPEATS", 4)
    rows = pool_bench.allocation_rows(CPU)
    assert [row.reference for row in rows] == [None, "numpy.empty", "numpy.empty"]
    rows = pool_bench.fill_rows(CPU, ((128, 48),))
    zeroed = {row.case: row.notes["bytes_zeroed"] for row in rows}
    assert zeroed["quantize 128x48 128x4 zero"] == 512 + 128 * 24
    assert zeroed["quantize 128x48 128x4 covered"] == 0
