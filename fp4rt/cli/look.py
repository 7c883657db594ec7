"""``fp4rt inspect`` and ``fp4rt verify``: look, and change nothing."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from fp4rt.checkpoint.compare import compare
from fp4rt.checkpoint.formats import FORMATS
from fp4rt.checkpoint.inspect import Inspection
from fp4rt.checkpoint.inspect import inspect as look_at
from fp4rt.checkpoint.plan import format_named
from fp4rt.checkpoint.report import jsonable
from fp4rt.checkpoint.store import Store
from fp4rt.checkpoint.verify import verify as check
from fp4rt.cli.console import BAD_INPUT, add, bar, clean, failing, note, print_json, print_table, size, table, usage
from fp4rt.cli.paths import PAGES, PICTURES, check_ending, check_folder, named
from fp4rt.cli.results import decibel, shape_text
from fp4rt.errors import CheckpointError, counted

__all__ = ["inspect", "verify"]

From = Annotated[
    str | None,
    typer.Option("--from", metavar="FORMAT", help=f"Format where the file does not tell: {', '.join(FORMATS)}."),
]
VERDICTS = {"differs": "differ"}  # what is said of several tensors where it is not what is said of one
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


@failing
def inspect(
    path: Annotated[
        Path,
        typer.Argument(metavar="FILE", parser=named, help="A safetensors file, or a folder with one or with shards."),
    ],
    form: From = None,
    figures: Annotated[
        Path | None, typer.Option("--figures", metavar="PNG", help="Draw the layers (needs fp4rt[plot]).")
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write a report that a browser opens.")
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="List the unquantized tensors, too.")] = False,
    as_json: Json = False,
) -> None:
    """Show what is in a checkpoint: files, dtypes, format, layers, scales and sizes.

    Of a layer's blocks, zero blocks are those with a block scale of 0, saturated ones those with the largest that there
    is: the block of the largest value of the layer, or of all that share its global scale, always, and many where
    values were clipped.
    """
    _check_format(form)
    with usage():
        check_ending("--figures", figures, PICTURES)
        check_ending("--html", html, PAGES)
    check_folder(figures)
    check_folder(html)
    if figures is not None:
        from fp4rt.cli import figures as drawing

        drawing.require()
    store = Store(path)
    with bar("inspect", store.nbytes, quiet=as_json) as progress:
        found = look_at(store, form, codes=figures is not None or html is not None, progress=progress)
    if figures is not None:
        if not found.layers:
            raise CheckpointError(f"{path}: holds no NVFP4 layers to draw; `fp4rt quantize` makes them")
        drawing.draw_layers(found, figures)
    if html is not None:
        from fp4rt.cli.page import write_page

        write_page(found, html)
    if as_json:
        print_json(found.to_json())
    else:
        _print_inspection(found, verbose)


@failing
def verify(
    path: Annotated[Path, typer.Argument(metavar="A", parser=named, help="A checkpoint.")],
    other: Annotated[
        Path | None, typer.Argument(metavar="B", parser=named, help="A second one, to be compared with A.")
    ] = None,
    form: From = None,
    min_sqnr: Annotated[
        float | None, typer.Option("--min-sqnr", metavar="DB", help="Fail where a weight of B is further from A's.")
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="List identical tensors, too.")] = False,
    as_json: Json = False,
) -> None:
    """Check every invariant of a checkpoint, or compare two of them, tensor by tensor, across formats.

    A stack of experts is found in experts that lie apart, and the reverse.

    Exit status 1: an invariant is broken, A holds no NVFP4 layers (without B), B lacks what A has or the reverse, or a
    weight is too far.
    """
    _check_format(form)
    with usage():
        if min_sqnr is not None and math.isnan(min_sqnr):
            raise CheckpointError("--min-sqnr needs a number of decibels, got nan")
        if min_sqnr is not None and other is None:
            raise CheckpointError("--min-sqnr compares two checkpoints; name B, too")
    if other is None:
        _verify_one(path, form, as_json)
    else:
        _verify_two(path, other, form, min_sqnr, verbose, as_json)


def _check_format(form: str | None) -> None:
    if form is not None:
        with usage():
            format_named(form)


def _verify_one(path: Path, form: str | None, as_json: bool) -> None:
    store = Store(path)
    with bar("verify", store.nbytes, quiet=as_json) as progress:
        findings = check(store, form, progress, layers_needed=True)
    errors = [finding for finding in findings if finding.severity == "error"]
    if as_json:
        print_json({"path": str(path), "ok": not errors, "findings": [asdict(finding) for finding in findings]})
    else:
        for finding in findings:
            print(f"{finding.severity}: {clean(finding.tensor)}: {finding.message}")
        counts = ((len(store), "tensor"), (len(errors), "error"), (len(findings) - len(errors), "warning"))
        print(f"{path}: {', '.join(counted(number, noun) for number, noun in counts)}")
    if errors:
        raise typer.Exit(BAD_INPUT)


def _verify_two(a: Path, b: Path, form: str | None, min_sqnr: float | None, verbose: bool, as_json: bool) -> None:
    left = Store(a)
    with bar("compare", left.nbytes, quiet=as_json) as progress:
        rows = compare(left, Store(b), (form, form), progress)
    missing = [row for row in rows if not row.matches]
    decibels = {row.name: row.sqnr_db for row in rows if row.sqnr_db is not None}
    far = {name: found for name, found in decibels.items() if min_sqnr is not None and found < min_sqnr}
    if as_json:
        print_json(
            jsonable({"a": str(a), "b": str(b), "ok": not missing and not far, "tensors": list(map(asdict, rows))})
        )
    else:
        result = table("", [("tensor", "left"), ("B against A", "left"), ("max error", "right"), ("SQNR dB", "right")])
        for row in rows:
            if verbose or row.verdict != "identical":
                error = "" if row.max_error is None else f"{row.max_error:.3g}"
                add(result, row.name, row.verdict, error, "" if row.sqnr_db is None else decibel(row.sqnr_db))
        if result.row_count:
            print_table(result)
        counts = Counter(row.verdict for row in rows)
        print(", ".join(counted(count, text, VERDICTS.get(text, text)) for text, count in counts.most_common()))
        for name, found in far.items():
            note(f"{clean(name)}: {decibel(found)} dB is below --min-sqnr {min_sqnr:g}")
    if missing or far:
        raise typer.Exit(BAD_INPUT)


def _print_inspection(found: Inspection, verbose: bool) -> None:
    evidence = f" (said by {', '.join(found.evidence)})" if found.evidence else ""
    print(f"{found.path}: {found.format}{evidence}")
    for name, nbytes, count in found.files:
        print(f"  {clean(name)}: {counted(count, 'tensor')}, {size(nbytes)}")
    for tag, (count, nbytes) in found.dtypes.items():
        print(f"  {tag}: {counted(count, 'tensor')}, {size(nbytes)}")
    if found.layers:
        headings = ("shape", "bytes", "global scale", "input scale", "zero blocks", "saturated")
        result = table("", [("weight", "left"), *((text, "right") for text in headings), ("layout", "left")])
        for layer in found.layers:
            low, high = layer.global_scales
            scale = f"{low:.6g}" if low == high else f"{low:.4g} ... {high:.4g}"
            inputs = "" if layer.input_scale is None else f"{layer.input_scale:.6g}"
            zero, saturated = f"{layer.zero_blocks}/{layer.blocks}", str(layer.saturated_blocks)
            cells = (layer.name, shape_text(layer.shape), size(layer.nbytes), scale, inputs, zero, saturated)
            add(result, *cells, layer.layout)
        print_table(result)
    if verbose or not found.layers:
        result = table("", [("tensor", "left"), ("dtype", "left"), ("shape", "right"), ("bytes", "right")])
        for name, tag, shape, nbytes in found.plain:
            add(result, name, tag, shape_text(shape), size(nbytes))
        print_table(result)
