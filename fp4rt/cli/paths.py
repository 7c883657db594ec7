"""Paths of the command line, looked at before the work: none is empty by mistake, and no report replaces a model."""

from __future__ import annotations

from pathlib import Path

import typer

from fp4rt.checkpoint.folder import SUFFIX, check_parent
from fp4rt.errors import CheckpointError

__all__ = ["PAGES", "PICTURES", "check_ending", "check_folder", "check_target", "named"]

PAGES = (".html", ".htm")
PICTURES = (".png", ".svg", ".pdf")


def named(text: str) -> Path:
    """A path as given; an empty one, as an unset variable of a shell leaves it, would be the working folder."""
    if not text:
        raise typer.BadParameter("the path is empty; name a file or folder, the working folder is .")
    return Path(text)


def check_ending(option: str, path: Path | None, endings: tuple[str, ...]) -> None:
    """A report has a name of its kind: it would replace a model, or be a picture that nobody can draw.

    Raises:
        CheckpointError: it ends otherwise.
    """
    if path is not None and path.suffix.lower() not in endings:
        raise CheckpointError(f"{option} needs a name that ends with {' or '.join(endings)}, got {path}")


def check_target(path: Path) -> None:
    """OUT is a safetensors file or a folder; the ending of another kind of file is a mistake, version numbers are none.

    Raises:
        CheckpointError: it ends so, and no folder of that name exists.
    """
    if path.suffix[1:].isalpha() and path.suffix != SUFFIX and not path.is_dir():
        raise CheckpointError(
            f"OUT needs a name that ends with {SUFFIX}, or a folder, got {path}; name it {path.with_suffix(SUFFIX)} "
            f"for a file or {path.with_suffix('')} for a folder (one that ends with {path.suffix} must exist already)"
        )


def check_folder(path: Path | None, made: Path | None = None) -> None:
    """The folder of a report exists, or is ``made`` by the command itself.

    Raises:
        CheckpointError: it does not.
    """
    if path is not None and path.parent != made:
        check_parent(path)
