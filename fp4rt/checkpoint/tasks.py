"""Whole jobs as single calls: what the commands do, for Python."""

from __future__ import annotations

import numbers
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from typing import Any

from fp4rt.checkpoint.dtypes import FLOAT_TAGS
from fp4rt.checkpoint.fusing import FUSE_MODES, check_mode
from fp4rt.checkpoint.kinds import check_kinds
from fp4rt.checkpoint.plan import Plan
from fp4rt.checkpoint.plan_convert import plan_convert, plan_dequantize
from fp4rt.checkpoint.plan_quantize import QuantizeOptions, plan_quantize
from fp4rt.checkpoint.report import RunReport
from fp4rt.checkpoint.run import Progress, carry_out, dry_report
from fp4rt.checkpoint.store import Store
from fp4rt.errors import CheckpointError, DtypeError

__all__ = ["FLOAT_NAMES", "convert", "dequantize", "float_tag", "quantize"]

FLOAT_NAMES = {"bf16": "BF16", "fp16": "F16", "fp32": "F32", **{name: tag for tag, name in FLOAT_TAGS.items()}}


def quantize(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    options: QuantizeOptions | None = None,
    *,
    jobs: int = 1,
    executor: Executor | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> RunReport:
    """Quantize the linear weights of a checkpoint to NVFP4; everything else goes along byte for byte.

    Args:
        source: a safetensors file, or a folder with one or with shards and an index.
        target: a file for a source of one file, or a folder. It appears complete, or, for a folder, can be finished by
            the same call after an interruption.
        options: formats, tensors and methods; the defaults write modelopt with the method "amax".
        jobs: shards at once, by threads of this process.
        executor: any ``concurrent.futures.Executor`` that takes plain functions (processes, dask.distributed,
            mpi4py.futures); its workers must see both paths. The bytes written do not depend on it.
        overwrite: replace what is there: the whole checkpoint that lies there, and not before the new one is complete.
        dry_run: write nothing, report what would be done.
        progress: called with bytes of the source as they are dealt with.

    Raises:
        CheckpointError: the source is broken, a weight holds NaN or infinity, the target is taken, or ``jobs`` is
            below 1.
        DtypeError: an argument is of another kind.
        OSError: reading or writing failed.
    """
    options = QuantizeOptions() if options is None else options
    check_kinds("quantize", ("options", options, QuantizeOptions, "QuantizeOptions or None"))
    _check_run("quantize", source, target, jobs, executor, overwrite, dry_run, progress)
    return _do(plan_quantize(Store(source), options), target, jobs, executor, overwrite, dry_run, progress)


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    to: str,
    *,
    format: str | None = None,
    layout: str | None = None,
    fuse: Mapping[str, Sequence[str]] | None = None,
    fused_scales: str = FUSE_MODES[0],
    jobs: int = 1,
    executor: Executor | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> RunReport:
    """Move an NVFP4 checkpoint into another format. Floats: as :func:`dequantize`.

    Every code and block scale is kept, but ``fused_scales="rescale"`` rounds block scales again. compressed-tensors
    stores the reciprocals of the other formats' global scales; a note counts those that would not come back unchanged.

    Args:
        source: see :func:`quantize`.
        target: see :func:`quantize`.
        to: "modelopt", "compressed-tensors", "comfy", "bf16", "fp16" or "fp32".
        format: the source's format where names and configuration do not tell.
        layout: layout of the block scales, for modelopt.
        fuse: layers to join: {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}.
        fused_scales: "keep" a global scale for each part, or "rescale" to one.
        jobs: see :func:`quantize`.
        executor: see :func:`quantize`.
        overwrite: replace what is there.
        dry_run: write nothing, report what would be done.
        progress: see :func:`quantize`.

    Raises:
        CheckpointError: the source is broken or ambiguous, holds what the format cannot carry, an argument does not
            apply to it, or ``jobs`` is below 1.
        DtypeError: an argument is of another kind.
        LayoutError: the layout is unknown.
    """
    _check_conversion(to, format, layout, fuse, fused_scales)
    _check_run("convert", source, target, jobs, executor, overwrite, dry_run, progress)
    if to in FLOAT_NAMES:
        plan = plan_dequantize(Store(source), FLOAT_NAMES[to], format)
    else:
        plan = plan_convert(Store(source), to, format, layout, fuse, fused_scales)
    return _do(plan, target, jobs, executor, overwrite, dry_run, progress)


def dequantize(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    dtype: str = "bf16",
    *,
    format: str | None = None,
    jobs: int = 1,
    executor: Executor | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> RunReport:
    """Turn the NVFP4 layers of a checkpoint into floats; other tensors go along byte for byte.

    Args:
        source: see :func:`quantize`.
        target: see :func:`quantize`.
        dtype: "bf16", "fp16" or "fp32".
        format: the source's format where names and configuration do not tell.
        jobs: see :func:`quantize`.
        executor: see :func:`quantize`.
        overwrite: replace what is there.
        dry_run: write nothing, report what would be done.
        progress: see :func:`quantize`.

    Raises:
        CheckpointError: the source is broken or ambiguous, the dtype is none of the three, or ``jobs`` is below 1.
        DtypeError: an argument is of another kind.
    """
    check_kinds(
        "dequantize",
        ("dtype", dtype, str, "a string"),
        ("format", format, (str, type(None)), "a string or None"),
    )
    _check_run("dequantize", source, target, jobs, executor, overwrite, dry_run, progress)
    plan = plan_dequantize(Store(source), float_tag(dtype), format)
    return _do(plan, target, jobs, executor, overwrite, dry_run, progress)


def float_tag(name: str) -> str:
    """The dtype tag of a float's name.

    Raises:
        CheckpointError: it is none of the three.
    """
    tag = FLOAT_NAMES.get(name)
    if tag is None:
        raise CheckpointError(f"unknown dtype {name!r}; use one of bf16, fp16, fp32")
    return tag


def _check_run(
    function: str, source: Any, target: Any, jobs: Any, executor: Any, overwrite: Any, dry_run: Any, progress: Any
) -> None:
    """Refuse what would fail when the first files lie there, or replace one unasked."""
    check_kinds(
        function,
        ("source", source, (str, os.PathLike), "a path"),
        ("target", target, (str, os.PathLike), "a path"),
        ("overwrite", overwrite, bool, "a bool"),
        ("dry_run", dry_run, bool, "a bool"),
    )
    if isinstance(jobs, bool) or not isinstance(jobs, numbers.Integral):
        raise DtypeError(f"jobs must be an integer, got {jobs!r}")
    if jobs < 1:
        raise CheckpointError(f"jobs must be 1 or more, got {jobs}")
    if executor is not None and not callable(getattr(executor, "submit", None)):
        raise DtypeError(f"executor must have a function submit, got {executor!r}")
    if progress is not None and not callable(progress):
        raise DtypeError(f"progress must be a function or None, got {progress!r}")


def _check_conversion(to: Any, format: Any, layout: Any, fuse: Any, fused_scales: Any) -> None:
    """Refuse what is of another kind, and what does not go together."""
    check_kinds(
        "convert",
        ("to", to, str, "a string"),
        ("format", format, (str, type(None)), "a string or None"),
        ("layout", layout, (str, type(None)), "a string or None"),
        ("fuse", fuse, (Mapping, type(None)), 'a mapping or None, as {"gate_up_proj": ["gate_proj", "up_proj"]}'),
        ("fused_scales", fused_scales, str, "a string"),
    )
    for joined, parts in (fuse or {}).items():
        if not isinstance(parts, (list, tuple)) or not all(isinstance(part, str) for part in parts):
            raise DtypeError(f"convert needs the parts of {joined!r} as a list of strings, got {parts!r}")
    check_mode(fused_scales)
    if fused_scales != FUSE_MODES[0] and not fuse:
        raise CheckpointError(
            f"fused_scales={fused_scales!r} needs fuse, which names the layers to join; add that or drop it"
        )
    if to in FLOAT_NAMES and (fuse or layout is not None):
        raise CheckpointError(f"{to} is no NVFP4 format; fuse and layout do not apply")


def _do(
    plan: Plan,
    target: str | os.PathLike[str],
    jobs: int,
    executor: Executor | None,
    overwrite: bool,
    dry_run: bool,
    progress: Progress | None,
) -> RunReport:
    try:
        if dry_run:
            return dry_report(plan, target, overwrite)
        return carry_out(plan, target, jobs=jobs, executor=executor, overwrite=overwrite, progress=progress)
    finally:
        plan.store.close()
