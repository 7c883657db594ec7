"""Coverage checks in a script: every function named ``cover_...`` returns a verdict.

def cover_my_kernel():
    return fp4rt.coverage.check(my_kernel, numpy.empty((128, 4), numpy.uint8))
"""

from __future__ import annotations

import contextlib
import sys
import traceback
import types
from collections.abc import Callable, Iterator
from pathlib import Path

from fp4rt.coverage.verdict import Verdict
from fp4rt.errors import Fp4rtError, ShapeError

__all__ = ["PREFIX", "ScriptError", "find_checks", "run_checks"]

PREFIX = "cover_"
MODULE = "fp4rt_coverage_script"


class ScriptError(Fp4rtError, RuntimeError):
    """A script or one of its checks raised; ``__cause__`` is what, with the traceback from the script on."""


def find_checks(script: Path) -> dict[str, Callable[[], Verdict]]:
    """The checks of a script by name, without the prefix; runs the script's top level.

    Raises:
        ShapeError: there is no such function in it.
        ScriptError: its top level raises.
        OSError: it cannot be read.
    """
    source = script.read_bytes()  # what the script raises itself is told apart from this
    module = types.ModuleType(MODULE)
    module.__file__ = str(script)
    sys.modules[MODULE] = module  # what it defines can be pickled
    with _as_python_runs(script), _blaming(script, f"script {str(script)!r}"):
        exec(compile(source, str(script), "exec", dont_inherit=True), module.__dict__)
    names = vars(module)
    checks = {name.removeprefix(PREFIX): value for name, value in names.items() if name.startswith(PREFIX)}
    for name, check in checks.items():
        if not callable(check):
            raise ShapeError(f"{PREFIX}{name} of {script} is no function, it is {type(check).__name__}")
    if not checks:
        raise ShapeError(
            f"{script} has no function named {PREFIX}...; define one that returns fp4rt.coverage.check(...)"
        )
    return checks


def run_checks(
    script: Path, only: str | None = None, said: Callable[[str, Verdict], None] = lambda name, verdict: None
) -> dict[str, Verdict]:
    """Run the checks of a script whose name contains ``only``; ``said`` hears of each verdict as it is there.

    Raises:
        ShapeError: no check is selected, or one returns no verdict.
        ScriptError: a check raises, or the script's top level does.
        OSError: the script cannot be read.
    """
    checks = find_checks(script)
    chosen = {name: check for name, check in checks.items() if only is None or only in name}
    if not chosen:
        raise ShapeError(f"{script} has no check with {only!r} in its name; it has {', '.join(checks)}")
    verdicts = {}
    for name, check in chosen.items():
        with _as_python_runs(script), _blaming(script, f"check {name!r}"):
            verdict = check()
        if not isinstance(verdict, Verdict):
            raise ShapeError(f"{PREFIX}{name} of {script} returned {type(verdict).__name__}; wanted a coverage verdict")
        verdicts[name] = verdict
        said(name, verdict)
    return verdicts


@contextlib.contextmanager
def _as_python_runs(script: Path) -> Iterator[None]:
    """With its folder first among those of modules, and no arguments, as ``python script`` has it."""
    argv, path = sys.argv, sys.path
    sys.argv, sys.path = [str(script)], [str(script.absolute().parent), *path]
    try:
        yield
    finally:
        sys.argv, sys.path = argv, path


@contextlib.contextmanager
def _blaming(script: Path, what: str) -> Iterator[None]:
    """Turn whatever the user's code raises into one line that names it and its place."""
    try:
        yield
    except (Exception, SystemExit) as error:
        own = error.__traceback__
        while own is not None and own.tb_frame.f_code.co_filename != str(script):
            own = own.tb_next
        if isinstance(error, SyntaxError):
            text, file, line = error.msg, error.filename, error.lineno
        else:
            frames = traceback.extract_tb(own or error.__traceback__)
            place = next((frame for frame in reversed(frames) if frame.filename == str(script)), frames[-1])
            text, file, line = str(error), place.filename, place.lineno
        said = f"{what} raised {type(error).__name__}{text and ': '}{text} ({Path(file or script).name}:{line})"
        raise ScriptError(said) from error.with_traceback(own)
