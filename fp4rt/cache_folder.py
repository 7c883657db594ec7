"""Where compiled code and measured tiles are kept between processes."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

__all__ = ["CACHE_VARIABLE", "cache_folder", "why_unwritable", "write_entry"]

CACHE_VARIABLE = "FP4RT_CACHE_DIR"


def cache_folder() -> Path:
    """``FP4RT_CACHE_DIR``, else ``$XDG_CACHE_HOME/fp4rt``, else ``~/.cache/fp4rt``; it need not exist."""
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path(os.path.expanduser("~")) / ".cache") / "fp4rt"


def why_unwritable() -> str | None:
    """What keeps files out of the folder, or None: one is made and removed, as permission bits do not tell.

    A folder that does not exist yet is not made: the file goes into the nearest one above it.
    """
    folder = cache_folder()
    while not os.path.lexists(folder) and folder.parent != folder:
        folder = folder.parent
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".new-"):
            return None
    except OSError as error:
        return f"no file can be made in {folder} ({error.strerror or error})"


def write_entry(path: Path, content: bytes) -> None:
    """Write a file of the folder in one step: who reads it meanwhile sees the old one or the new one.

    Raises:
        OSError: the folder cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".new-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
