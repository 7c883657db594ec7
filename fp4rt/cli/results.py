"""Reports of runs as tables for people."""

from __future__ import annotations

import math
from collections import Counter

from fp4rt.checkpoint.methods import METHODS
from fp4rt.checkpoint.report import RunReport, TensorReport
from fp4rt.cli.console import add, clean, note, print_table, size, table
from fp4rt.errors import counted

__all__ = ["decibel", "print_report", "shape_text"]

CHECKSUM_SHOWN = 16


def print_report(report: RunReport, verbose: bool) -> None:
    """The rows of a run, what was left and why, the files and the sums."""
    changed = [row for row in report.tensors if row.action != "copied"]
    if report.operation == "quantize":
        _quantized(changed)
    else:
        _converted(changed)
    _left([row for row in report.tensors if row.action == "copied"], verbose)
    if report.copied:
        print(f"copied files: {clean(', '.join(report.copied))}")
    if report.left:
        print(f"files left behind: {clean(', '.join(report.left))}")
    for text in report.notes:
        print(f"note: {clean(text)}")
    if not report.dry_run:
        _files(report)
    _sums(report, changed)


def _quantized(rows: list[TensorReport]) -> None:
    compared = [name for name in METHODS if any(name in row.methods for row in rows)]
    columns = [("weight", "left"), ("shape", "right"), ("from", "left"), ("bytes", "right"), ("to", "right")]
    columns += [
        ("method", "left"),
        ("SQNR dB", "right"),
        ("max error", "right"),
        ("clipped", "right"),
        ("zero", "right"),
    ]
    result = table("", [*columns, *((name, "right") for name in compared)])
    for row in rows:
        cells = [row.name, shape_text(row.shape), row.dtype, size(row.bytes_before), size(row.bytes_after), row.method]
        if row.sqnr_db is None:
            cells += [""] * 4
        else:
            cells += [decibel(row.sqnr_db), f"{row.max_error:.3g}"]
            cells += [f"{row.clipped_blocks}/{row.blocks}", f"{row.zero_blocks}"]
        cells += [decibel(row.methods[name]) if name in row.methods else "" for name in compared]
        add(result, *cells)
    print_table(result)
    clipped = sum(row.clipped_blocks for row in rows)
    if clipped:
        blocks = counted(clipped, "block is", "blocks are")
        note(f"note: {blocks} clipped: the largest value exceeds what the global scale can express")


def _converted(rows: list[TensorReport]) -> None:
    columns = [("weight", "left"), ("shape", "right"), ("from", "left"), ("bytes", "right"), ("to", "right")]
    result = table("", [*columns, ("done", "left"), ("note", "left")])
    for row in rows:
        cells = [row.name, shape_text(row.shape), row.dtype, size(row.bytes_before), size(row.bytes_after)]
        add(result, *cells, row.action, row.note)
    print_table(result)
    wrong = sum(bool(row.wrong_scales) for row in rows)
    if wrong:
        have = counted(wrong, "weight has", "weights have")
        note(f"note: {have} block scales that no quantizer makes; `fp4rt verify` says where they are")


def _left(rows: list[TensorReport], verbose: bool) -> None:
    """Tensors that stay as they are: all of them, or how many for which reason."""
    if not rows:
        return
    if verbose:
        result = table("unchanged", [("tensor", "left"), ("shape", "right"), ("dtype", "left"), ("why", "left")])
        for row in rows:
            add(result, row.name, shape_text(row.shape), row.dtype, row.note)
        print_table(result)
        return
    reasons = Counter(row.note for row in rows)
    if set(reasons) == {""}:
        print(f"unchanged: {counted(len(rows), 'tensor')}")
        return
    for reason, count in reasons.most_common():
        names = [row.name for row in rows if row.note == reason]
        print(f"unchanged: {count} x {reason} ({clean(names[0])}{', ...' if count > 1 else ''})")


def _files(report: RunReport) -> None:
    for shard in report.shards:
        kept = " (kept from an earlier run)" if shard.resumed else ""
        print(f"{clean(shard.file)}: {size(shard.nbytes)}, sha256 {shard.sha256[:CHECKSUM_SHOWN]}...{kept}")
    if report.configuration:
        print(f"configuration: {clean(', '.join(report.configuration))}")


def _sums(report: RunReport, changed: list[TensorReport]) -> None:
    verb = "would write" if report.dry_run else "wrote"
    ratio = report.bytes_after / report.bytes_before if report.bytes_before else 1.0
    text = (
        f"{verb} {report.target} ({report.format}): {counted(len(changed), 'weight')}, {size(report.bytes_before)} -> "
    )
    text += f"{size(report.bytes_after)} ({ratio:.0%})"
    if not report.dry_run:
        speed = report.bytes_before / max(report.seconds, 1e-9)
        text += f" in {report.seconds:.1f} s, {size(int(speed))}/s"
    print(text)


def shape_text(shape: tuple[int, ...]) -> str:
    """A shape as people write it."""
    return " x ".join(str(extent) for extent in shape) or "scalar"


def decibel(value: float) -> str:
    """SQNR with two places; "exact" where nothing was lost."""
    return "exact" if value == math.inf else f"{value:.2f}"
