"""``fp4rt coverage``: run the coverage checks of a script."""

from __future__ import annotations

import contextlib
import sys
import traceback
from pathlib import Path
from typing import Annotated

import typer

from fp4rt.cli.console import BAD_INPUT, failing, print_json
from fp4rt.cli.paths import named
from fp4rt.coverage.script import ScriptError, run_checks

__all__ = ["coverage"]


@failing
def coverage(
    script: Annotated[
        Path,
        typer.Argument(metavar="SCRIPT", parser=named, help="Python file with cover_... functions"),
    ],
    only: Annotated[str | None, typer.Option("--only", metavar="TEXT", help="Checks with TEXT in their name.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the verdicts as JSON.")] = False,
) -> None:
    """Say which bytes kernels never write: runs the functions of SCRIPT named cover_..., each returning a verdict."""
    try:
        if as_json:
            with contextlib.redirect_stdout(sys.stderr):  # a script may print
                verdicts = run_checks(script, only)
        else:
            verdicts = run_checks(script, only, lambda name, verdict: print(f"{name}: {verdict}"))
    except ScriptError as error:
        traceback.print_exception(error.__cause__)
        raise
    if as_json:
        print_json({name: verdict.as_dict() for name, verdict in verdicts.items()})
    if not all(verdicts.values()):
        raise typer.Exit(BAD_INPUT)
