"""Where compiled code and measured tiles are kept between processes."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

__all__ = ["CACHE_VARIABLE", "cache_folder", "write_entry"]

CACHE_VARIABLE = "FP4RT_CACHE_DIR"


def cache_folder() -> Path:
    """``FP4RT_CACHE_DIR``, else ``$XDG_CACHE_HOME/fp4rt``, else ``~/.cache/fp4rt``; it need not exist."""
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path(os.path.expanduser("~")) / ".cache") / "fp4rt"


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
