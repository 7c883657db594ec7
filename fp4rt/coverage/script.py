"""Coverage checks in a script: every function named ``cover_...`` returns a verdict.

def cover_my_kernel():
    return fp4rt.coverage.check(my_kernel, numpy.empty((128, 4), numpy.uint8))
"""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path

from fp4rt.coverage.verdict import Verdict
from fp4rt.errors import ShapeError

__all__ = ["PREFIX", "find_checks", "run_checks"]

PREFIX = "cover_"


def find_checks(script: Path) -> dict[str, Callable[[], Verdict]]:
    """The checks of a script by name, without the prefix; runs the script's top level.

    Raises:
        ShapeError: there is no such function in it.
    """
    names = runpy.run_path(str(script), run_name="fp4rt_coverage_script")
    checks = {name.removeprefix(PREFIX): value for name, value in names.items() if name.startswith(PREFIX)}
    if not checks:
        raise ShapeError(
            f"{script} has no function named {PREFIX}...; define one that returns fp4rt.coverage.check(...)"
        )
    return checks


def run_checks(script: Path, only: str | None = None) -> dict[str, Verdict]:
    """Run the checks of a script whose name contains ``only``.

    Raises:
        ShapeError: no check is selected, or one returns no verdict.
    """
    checks = find_checks(script)
    chosen = {name: check for name, check in checks.items() if only is None or only in name}
    if not chosen:
        raise ShapeError(f"{script} has no check with {only!r} in its name; it has {', '.join(checks)}")
    verdicts = {}
    for name, check in chosen.items():
        verdict = check()
        if not isinstance(verdict, Verdict):
            raise ShapeError(f"{PREFIX}{name} of {script} returned {type(verdict).__name__}; wanted a coverage verdict")
        verdicts[name] = verdict
    return verdicts
