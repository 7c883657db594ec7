"""Arguments of another kind are refused in one line, before any file is opened."""

from __future__ import annotations

from typing import Any

from fp4rt.errors import DtypeError

__all__ = ["check_kinds"]


def check_kinds(function: str, *arguments: tuple[str, Any, type | tuple[type, ...], str]) -> None:
    """Refuse an argument of another kind; each is (name, value, kinds, the kinds in words).

    Raises:
        DtypeError: one is.
    """
    for name, value, kinds, wanted in arguments:
        if not isinstance(value, kinds):
            raise DtypeError(f"{function} needs {name} as {wanted}, got {value!r}")
