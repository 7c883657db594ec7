"""Fills the performance tables of the README from ``bench/results/``, so that no figure is typed by hand.

A table stands between two markers; ``match`` is a regular expression over the rows' cases, ``notes`` names notes to
show as columns; both may be left out. With ``grid`` the table has a line for each value of the first of two notes, a
column for each of the second, and the ratios in between::

    <!-- table: quantize_cuda match="8192" notes="bytes_zeroed" -->
    <!-- end table -->

    <!-- table: gemm_models_cuda match="^bf16" grid="weight m" -->
    <!-- end table -->

    python -m bench.make_tables [--check]
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from bench.rows import RESULTS

__all__ = ["fill", "load_rows", "markdown_grid", "markdown_table"]

README = Path(__file__).resolve().parent.parent / "README.md"
MARKER = re.compile(
    r'(?P<start><!-- table: (?P<name>\w+)(?: match="(?P<match>[^"]*)")?(?: notes="(?P<notes>[^"]*)")?'
    r'(?: grid="(?P<grid>\w+ \w+)")? -->\n)'
    r"(?P<body>.*?)(?P<end><!-- end table -->)",
    re.DOTALL,
)
MACHINE_FACTS = ("gpu", "driver", "processor", "cores")


class BadTable(Exception):
    """A marker asks for rows that are not there, or markers do not pair up."""


def load_rows(name: str, folder: Path = RESULTS) -> list[dict[str, Any]]:
    """The rows of ``folder/NAME.jsonl``.

    Raises:
        BadTable: there is no such file, or it is empty.
    """
    path = folder / f"{name}.jsonl"
    if not path.is_file():
        raise BadTable(f"the README asks for the table {name}, but {path.name} is not among the results")
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not rows:
        raise BadTable(f"{path.name} has no rows")
    return rows


def markdown_table(rows: list[dict[str, Any]], notes: tuple[str, ...] = ()) -> str:
    """A Markdown table with the columns that any of the rows has, these notes, and the machine below it."""
    columns: dict[str, list[str]] = {"case": [row["case"] for row in rows], "time": [_time(row) for row in rows]}
    columns |= _optional("rate", rows, lambda row: f"{row['rate']:.4g} {row['unit']}", key="rate")
    for bound in _distinct(rows, "bound"):
        columns |= _optional(
            f"% of {bound}", rows, lambda row: f"{row['percent_of_bound']:.0f}", key="bound", only=bound
        )
    for reference in _distinct(rows, "reference"):
        columns |= _optional(
            f"times as fast as {reference}", rows, lambda row: f"{row['ratio']:.2f}", key="reference", only=reference
        )
    for note in notes:
        columns[note.replace("_", " ")] = [str(row["notes"].get(note, "")) for row in rows]
    return _markdown(columns, rows)


def markdown_grid(rows: list[dict[str, Any]], down: str, across: str) -> str:
    """A Markdown table of the ratios: a line for each value of the note ``down``, a column for each of ``across``."""
    lines, columns = (list(dict.fromkeys(row["notes"][note] for row in rows)) for note in (down, across))
    ratios = {(row["notes"][down], row["notes"][across]): f"{row['ratio']:.2f}" for row in rows}
    head = f"times as fast as {', '.join(_distinct(rows, 'reference'))}; {across} ="
    cells = {str(column): [ratios.get((line, column), "") for line in lines] for column in columns}
    return _markdown({head: [str(line) for line in lines], **cells}, rows)


def _markdown(columns: dict[str, list[str]], rows: list[dict[str, Any]]) -> str:
    lines = [" | ".join(columns), " | ".join(["---"] + ["---:"] * (len(columns) - 1))]
    lines += [" | ".join(cells) for cells in zip(*columns.values(), strict=True)]
    return "\n".join(f"| {line} |" for line in lines) + f"\n\n{_machine(rows)}\n"


def _time(row: dict[str, Any]) -> str:
    microseconds = row["time_us"]
    if microseconds < 1e3:
        return f"{microseconds:.1f} µs"
    return f"{microseconds / 1e3:.2f} ms" if microseconds < 1e6 else f"{microseconds / 1e6:.2f} s"


def _distinct(rows: list[dict[str, Any]], key: str) -> list[str]:
    return list(dict.fromkeys(row[key] for row in rows if row.get(key) is not None))


def _optional(
    title: str, rows: list[dict[str, Any]], text: Any, key: str, only: str | None = None
) -> dict[str, list[str]]:
    """One column, empty where a row has no such value; no column where none has."""
    has = [row.get(key) is not None and (only is None or row[key] == only) for row in rows]
    return {title: [text(row) if there else "" for row, there in zip(rows, has, strict=True)]} if any(has) else {}


def _machine(rows: list[dict[str, Any]]) -> str:
    """Where and at which commit the rows were measured."""
    texts: dict[str, None] = {}
    for facts in (row["machine"] for row in rows):
        known = [f"{fact} {facts[fact]}" if fact != "gpu" else facts[fact] for fact in MACHINE_FACTS if fact in facts]
        texts[", ".join([*known, f"commit {facts.get('commit', 'unknown')}"])] = None
    return "Measured on: " + "; ".join(texts) + "."


def fill(text: str, folder: Path = RESULTS) -> str:
    """``text`` with every table between markers made anew.

    Raises:
        BadTable: a table cannot be made.
    """
    if len(re.findall(r"<!-- table:", text)) != len(MARKER.findall(text)):
        raise BadTable("a table marker is misspelled or lacks its <!-- end table -->")

    def table(match: re.Match[str]) -> str:
        rows = load_rows(match["name"], folder)
        if match["match"] is not None:
            rows = [row for row in rows if re.search(match["match"], row["case"])]
        if not rows:
            raise BadTable(f"no case of {match['name']} matches {match['match']!r}")
        if match["grid"] is not None:
            made = markdown_grid(rows, *match["grid"].split())
        else:
            made = markdown_table(rows, tuple((match["notes"] or "").split()))
        return f"{match['start']}\n{made}\n{match['end']}"

    return MARKER.sub(table, text)


def main() -> int:
    """Rewrite the README; with ``--check`` only say whether it would change."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="exit with status 1 where the README is out of date")
    options = parser.parse_args()
    before = README.read_text(encoding="utf-8")
    try:
        after = fill(before)
    except BadTable as problem:
        print(problem, file=sys.stderr)
        return 1
    if options.check:
        if before != after:
            print("the README's tables are out of date; run `make tables`", file=sys.stderr)
        return int(before != after)
    README.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
