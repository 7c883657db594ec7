"""What a bench needs beside fp4rt: its ``--help`` works without, and a run says in one line what is missing."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import fp4rt

__all__ = ["need", "need_gpu", "optional"]

EXTRAS = {"torch": "torch", "matplotlib": "plot"}  # module to the extra of fp4rt that brings it


def optional(name: str) -> Any:
    """A module, or None where it cannot be imported; who uses it asks for it first."""
    try:
        return import_module(name)
    except (ImportError, OSError):
        return None


def need(name: str) -> Any:
    """A module.

    Raises:
        SystemExit: it cannot be imported; says which extra to install.
    """
    try:
        return import_module(name)
    except (ImportError, OSError) as error:
        raise SystemExit(f"this bench needs {name}: {error}; pip install 'fp4rt[{EXTRAS[name]}]'") from None


def need_gpu() -> None:
    """Go on only where a GPU is usable.

    Raises:
        SystemExit: none is; says why and, where CuPy is missing, which extra to install.
    """
    cuda = fp4rt.backends()["cuda"]
    if not cuda.usable:
        raise SystemExit(f"this bench needs a GPU: {cuda.reason}")
