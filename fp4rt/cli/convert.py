"""``fp4rt quantize``, ``dequantize`` and ``convert``."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from fp4rt import checkpoint
from fp4rt.checkpoint.formats import FORMATS, MODELOPT
from fp4rt.checkpoint.fusing import FUSE_MODES
from fp4rt.checkpoint.methods import DEFAULT_PERCENTILE, METHODS, Method
from fp4rt.checkpoint.overrides import read_overrides
from fp4rt.checkpoint.plan import format_named, scale_layout
from fp4rt.checkpoint.plan_quantize import QuantizeOptions, check_input_amax
from fp4rt.checkpoint.report import RunReport
from fp4rt.checkpoint.selection import Selection
from fp4rt.checkpoint.store import Store
from fp4rt.cli.console import BAD_INPUT, bar, failing, print_json, usage
from fp4rt.cli.paths import PICTURES, check_ending, check_folder, check_target, named
from fp4rt.cli.results import print_report
from fp4rt.errors import CheckpointError
from fp4rt.format import AMAX_TARGET
from fp4rt.layout import LAYOUTS

__all__ = ["convert", "dequantize", "quantize"]

FLOATS = ("bf16", "fp16", "fp32")
RECIPES = ("weight-only", "w4a4")

Source = Annotated[
    Path, typer.Argument(metavar="IN", parser=named, help="A safetensors file, or a folder with one or with shards.")
]
Target = Annotated[
    Path, typer.Argument(metavar="OUT", parser=named, help="A .safetensors file, or a folder (needed for shards).")
]
Json = Annotated[bool, typer.Option("--json", help="Print the report as JSON.")]
Jobs = Annotated[int, typer.Option("--jobs", "-j", min=1, help="Shards written at once.")]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace the checkpoint that lies there, once the new one is complete.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Write nothing; show what would be done.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="List the tensors that stay as they are, too.")]
From = Annotated[
    str | None,
    typer.Option("--from", metavar="FORMAT", help=f"Format of IN where it does not tell: {', '.join(FORMATS)}."),
]
Layout = Annotated[
    str | None,
    typer.Option(
        "--layout", metavar="LAYOUT", help=f"Layout of the block scales, modelopt only: {', '.join(LAYOUTS)}."
    ),
]


@failing
def quantize(
    source: Source,
    target: Target,
    to: Annotated[str, typer.Option("--to", metavar="FORMAT", help=", ".join(FORMATS))] = MODELOPT.name,
    recipe: Annotated[str, typer.Option("--recipe", metavar="RECIPE", help=", ".join(RECIPES))] = RECIPES[0],
    input_amax: Annotated[
        float | None,
        typer.Option(
            "--input-amax",
            help=f"w4a4: largest activation magnitude to expect, for input_scale.  [default: {AMAX_TARGET:g}]",
        ),
    ] = None,
    method: Annotated[str, typer.Option("--method", metavar="METHOD", help=", ".join(METHODS))] = METHODS[0],
    percentile: Annotated[
        float | None,
        typer.Option("--percentile", help=f"For the method percentile.  [default: {DEFAULT_PERCENTILE:g}]"),
    ] = None,
    overrides: Annotated[
        Path | None, typer.Option("--overrides", metavar="FILE", help="TOML file with methods by layer; see below.")
    ] = None,
    include: Annotated[
        list[str] | None, typer.Option("--include", metavar="PATTERN", help="Take what matches.")
    ] = None,
    exclude: Annotated[
        list[str] | None, typer.Option("--exclude", metavar="PATTERN", help="Leave what matches.")
    ] = None,
    pad: Annotated[bool, typer.Option("--pad", help="Pad columns to a multiple of 16 instead of skipping.")] = False,
    layout: Layout = None,
    compare: Annotated[bool, typer.Option("--compare", help="Measure the other methods too, layer by layer.")] = False,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="PNG", help="Draw error and scale histograms (needs fp4rt[plot]).")
    ] = None,
    jobs: Jobs = 1,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    verbose: Verbose = False,
    as_json: Json = False,
) -> None:
    """Turn the linear weights of a model into NVFP4; everything else goes along byte for byte.

    A folder that an interrupted run left unfinished is finished by the same command.
    """
    with usage():
        _check_choice("recipe", recipe, RECIPES)
        if input_amax is not None:
            check_input_amax(input_amax, "--input-amax")
        if input_amax is not None and recipe != "w4a4":
            raise CheckpointError(f"--input-amax needs --recipe w4a4, the recipe is {recipe}; add that or drop it")
        scale_layout(format_named(to), layout)
        chosen = Method(method, DEFAULT_PERCENTILE if percentile is None else percentile)
        check_ending("--plot", plot, PICTURES)
        check_target(target)
        if compare and dry_run:
            raise CheckpointError("--compare measures what is quantized and --dry-run quantizes nothing; drop one")
        if plot is not None and dry_run:
            raise CheckpointError("--plot draws what is quantized and --dry-run quantizes nothing; drop one")
    if plot is not None:
        from fp4rt.cli import figures

        figures.require()
        check_folder(plot, target)
    rules = None if overrides is None else read_overrides(overrides)
    with usage():
        used = method == "percentile" or compare or (rules is not None and rules.takes_percentile)
        if percentile is not None and not used:
            wanted = "--percentile needs --method percentile, an override with it, or --compare"
            raise CheckpointError(f"{wanted}, the method is {method}; add one of them or drop it")
    options = QuantizeOptions(
        form=to,
        layout=layout,
        activations=recipe == "w4a4",
        input_amax=AMAX_TARGET if input_amax is None else input_amax,
        selection=Selection(tuple(include or ()), tuple(exclude or ()), pad),
        method=chosen,
        override=rules,
        compare=compare,
        histograms=plot is not None,
    )
    with bar("quantize", Store(source).nbytes, quiet=as_json or dry_run) as progress:
        report = checkpoint.quantize(
            source, target, options, jobs=jobs, overwrite=overwrite, dry_run=dry_run, progress=progress
        )
    if plot is not None:
        figures.draw_run(report, plot)
    _show(report, as_json, verbose)


@failing
def dequantize(
    source: Source,
    target: Target,
    dtype: Annotated[str, typer.Option("--dtype", metavar="DTYPE", help=", ".join(FLOATS))] = FLOATS[0],
    form: From = None,
    jobs: Jobs = 1,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    verbose: Verbose = False,
    as_json: Json = False,
) -> None:
    """Turn the NVFP4 layers of a model back into floats; everything else goes along byte for byte.

    Exit status 1, with OUT complete, where block scales are NaN or negative, which no quantizer makes.
    """
    with usage():
        _check_choice("dtype", dtype, FLOATS)
    _convert(source, target, dtype, form, jobs, overwrite, dry_run, verbose, as_json)


@failing
def convert(
    source: Source,
    target: Target,
    to: Annotated[str, typer.Option("--to", metavar="FORMAT", help=", ".join((*FORMATS, *FLOATS)))],
    form: From = None,
    layout: Layout = None,
    fuse: Annotated[
        list[str] | None,
        typer.Option("--fuse", metavar="NAME=PART,PART", help="Join layers by rows: qkv_proj=q_proj,k_proj,v_proj."),
    ] = None,
    fused_scales: Annotated[
        str | None,
        typer.Option(
            "--fused-scales",
            metavar="MODE",
            help=f"Different global scales: keep each, or rescale to one.  [default: {FUSE_MODES[0]}]",
        ),
    ] = None,
    jobs: Jobs = 1,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    verbose: Verbose = False,
    as_json: Json = False,
) -> None:
    """Move an NVFP4 model from one format into another.

    Every code and block scale is kept, but --fused-scales rescale rounds block scales again. compressed-tensors stores
    the reciprocals of the other formats' global scales; a note counts those that would not come back unchanged. Its
    stacks of experts become one module an expert, and stay so when converted back. To bf16, fp16 and fp32 it does what
    dequantize does.
    """
    with usage():
        _check_choice("format", to, (*FORMATS, *FLOATS))
        if to in FORMATS:
            scale_layout(format_named(to), layout)
        mode = FUSE_MODES[0] if fused_scales is None else fused_scales
        _check_choice("way to fuse scales", mode, FUSE_MODES)
        groups = _fuse_groups(fuse or [])
        if to in FLOATS and (layout is not None or groups):
            raise CheckpointError(f"--layout and --fuse are for NVFP4 formats, --to is {to}; drop them")
        if fused_scales is not None and not groups:
            raise CheckpointError("--fused-scales needs --fuse, which names the layers to join; add that or drop it")
    extra = {"layout": layout, "fuse": groups, "fused_scales": mode}
    _convert(source, target, to, form, jobs, overwrite, dry_run, verbose, as_json, **extra)


def _convert(
    source: Path,
    target: Path,
    to: str,
    form: str | None,
    jobs: int,
    overwrite: bool,
    dry_run: bool,
    verbose: bool,
    as_json: bool,
    **extra: Any,
) -> None:
    with usage():
        check_target(target)
        if form is not None:
            format_named(form)
    with bar("convert", Store(source).nbytes, quiet=as_json or dry_run) as progress:
        report = checkpoint.convert(
            source,
            target,
            to,
            format=form,
            jobs=jobs,
            overwrite=overwrite,
            dry_run=dry_run,
            progress=progress,
            **extra,
        )
    _show(report, as_json, verbose)
    if any(row.wrong_scales for row in report.tensors):
        raise typer.Exit(BAD_INPUT)


def _check_choice(what: str, value: str, known: Iterable[str]) -> None:
    if value not in known:
        raise CheckpointError(f"unknown {what} {value!r}; use one of {', '.join(known)}")


def _fuse_groups(texts: list[str]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for text in texts:
        name, _, listed = text.partition("=")
        parts = listed.split(",")
        if not name or not all(parts) or len(parts) < 2 or len(set(parts)) < len(parts):
            raise CheckpointError(f"--fuse wants NAME=PART,PART with two different parts or more, got {text!r}")
        if name in groups:
            raise CheckpointError(f"--fuse names {name!r} twice; list all of its parts in one")
        groups[name] = parts
    return groups


def _show(report: RunReport, as_json: bool, verbose: bool) -> None:
    if as_json:
        print_json(report.to_json())
    else:
        print_report(report, verbose)
