"""``fp4rt bench``: the measurements of a checkout."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

import fp4rt
from fp4rt.cli.console import WRONG_USAGE, fail, failing

__all__ = ["bench"]

PROJECT = 'name = "fp4rt"'  # line of pyproject.toml


@failing
def bench(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Which one; without it they are listed.")] = None,
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="Passed on to it.")] = None,
) -> None:
    """List the benches, or run the one that is named: it measures on this machine.

    What follows NAME is passed on to it; NAME --help lists what it takes. Benches are scripts of the repository and not
    part of an installed package.
    """
    folder = _benches()
    support = _support(folder / "__main__.py")
    scripts = {path.stem: path for path in sorted(folder.glob("*.py")) if path.stem not in support}
    if not scripts:
        fail(
            f"no benches in {folder}: they are scripts of the source repository; run this from a checkout of it, "
            "or `python -m bench` there"
        )
    if name is None:
        for stem, path in scripts.items():
            print(f"{stem:24} {_summary(path)}")
        return
    if name not in scripts:
        fail(f"no bench called {name!r}; there are {', '.join(scripts)}", WRONG_USAGE)
    passed = arguments or []
    if passed[:1] == ["--"]:
        passed = passed[1:]
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}  # files are named from where one stands, modules are not
    places = [str(folder.parent), *environment.get("PYTHONPATH", "").split(os.pathsep)]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, places))
    done = subprocess.run([sys.executable, "-m", f"bench.{name}", *passed], env=environment)
    raise typer.Exit(done.returncode)


def _benches() -> Path:
    """The folder beside the package, or where an installed package has none, that of the checkout one stands in."""
    beside, here = Path(fp4rt.__file__).resolve().parent.parent, Path.cwd()
    return (here if not _is_checkout(beside) and _is_checkout(here) else beside) / "bench"


def _is_checkout(folder: Path) -> bool:
    """Whether a folder is a checkout of fp4rt; another project may have a folder called bench."""
    project = folder / "pyproject.toml"
    if not project.is_file() or not (folder / "bench" / "__main__.py").is_file():
        return False
    return PROJECT in project.read_text(encoding="utf-8", errors="replace").splitlines()


def _support(path: Path) -> tuple[str, ...]:
    """Modules of the folder that measure nothing: ``SUPPORT`` of its own list, read without running it."""
    if not path.is_file():
        return ()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "SUPPORT":
            names: tuple[str, ...] = ast.literal_eval(node.value)
            return names
    return ()


def _summary(path: Path) -> str:
    """First line of a script's docstring."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return text.partition("\n")[0]
