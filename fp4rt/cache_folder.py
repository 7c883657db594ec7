"""Where compiled code is kept between processes."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["CACHE_VARIABLE", "cache_folder"]

CACHE_VARIABLE = "FP4RT_CACHE_DIR"


def cache_folder() -> Path:
    """``FP4RT_CACHE_DIR``, else ``$XDG_CACHE_HOME/fp4rt``, else ``~/.cache/fp4rt``; it need not exist."""
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path(os.path.expanduser("~")) / ".cache") / "fp4rt"
