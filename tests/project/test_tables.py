"""The README's performance tables: what is drawn from a row, and which mistakes in the markers are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import make_tables
from bench.__main__ import BENCHES, SUPPORT
from bench.rows import Row, timing, write_rows


@pytest.fixture
def results(tmp_path):
    write_rows(
        "quantize",
        [
            Row("quantize", "8192 x 8192", 43.21, 0.5, 5.1, "TB/s", 93.0, "a copy", 2.5, "the reference"),
            Row("quantize", "16 x 8192", 5.4, 0.1, notes={"bytes_zeroed": 512}),
        ],
        tmp_path,
    )
    return tmp_path


def test_table_shows_each_case_with_the_columns_it_has(results):
    text = make_tables.fill("before\n<!-- table: quantize -->\nold\n<!-- end table -->\nafter", results)
    assert "| case | time | rate | % of a copy | times as fast as the reference |" in text
    assert "| 8192 x 8192 | 43.2 µs | 5.1 TB/s | 93 | 2.50 |" in text
    assert "| 16 x 8192 | 5.4 µs |  |  |  |" in text
    assert "old" not in text
    assert text.startswith("before")
    assert text.endswith("after")
    assert "Measured on: " in text


def test_filling_twice_changes_nothing(results):
    once = make_tables.fill("<!-- table: quantize -->\n<!-- end table -->", results)
    assert make_tables.fill(once, results) == once


def test_match_selects_cases(results):
    text = make_tables.fill('<!-- table: quantize match="^16 " -->\n<!-- end table -->', results)
    assert "| 16 x 8192 |" in text
    assert "| 8192 x 8192 |" not in text


def test_notes_become_columns(results):
    text = make_tables.fill('<!-- table: quantize match="^16 " notes="bytes_zeroed" -->\n<!-- end table -->', results)
    assert "| case | time | bytes zeroed |" in text
    assert "| 16 x 8192 | 5.4 µs | 512 |" in text


def test_a_grid_has_a_ratio_for_each_pair_of_notes(tmp_path):
    rows = [
        Row("gemm", f"{weight} {m}", 1.0, 0.1, ratio=ratio, reference="cuBLAS", notes={"weight": weight, "m": m})
        for weight, m, ratio in (("wide", 1, 3.0), ("wide", 16, 2.5), ("tall", 16, 0.954))
    ]
    write_rows("gemm", rows, tmp_path)
    text = make_tables.fill('<!-- table: gemm grid="weight m" -->\n<!-- end table -->', tmp_path)
    assert "| times as fast as cuBLAS; m = | 1 | 16 |\n| --- | ---: | ---: |\n" in text
    assert "| wide | 3.00 | 2.50 |\n| tall |  | 0.95 |\n" in text
    assert "Measured on: " in text


@pytest.mark.parametrize(
    ("marker", "message"),
    [
        ("<!-- table: nothing -->\n<!-- end table -->", "nothing"),
        ('<!-- table: quantize match="1 x 1" -->\n<!-- end table -->', "1 x 1"),
        ("<!-- table: quantize -->\nno end", "misspelled"),
        ("<!-- table: quantize matched=3 -->\n<!-- end table -->", "misspelled"),
        ('<!-- table: quantize grid="one" -->\n<!-- end table -->', "misspelled"),
    ],
)
def test_wrong_marker_is_refused(results, marker, message):
    with pytest.raises(make_tables.BadTable, match=message):
        make_tables.fill(marker, results)


def test_timing_is_the_median_and_the_middle_half():
    assert timing([1e-6, 2e-6, 3e-6, 4e-6, 1.0]) == pytest.approx((3.0, 5e5), rel=1e-2)


def test_a_row_carries_the_machine_it_was_measured_on(results):
    facts = make_tables.load_rows("quantize", results)[0]["machine"]
    assert {"processor", "cores", "python", "numpy"} <= set(facts)


def test_every_script_of_the_folder_is_run_by_make_bench():
    scripts = {path.stem for path in Path(make_tables.__file__).parent.glob("*.py")}
    assert scripts - set(SUPPORT) == {bench.name for bench in BENCHES}
