"""The pytest fixture ``assert_covers``: one line in a kernel's test. Loaded through the ``pytest11`` entry point."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

__all__ = ["assert_covers"]


@pytest.fixture
def assert_covers() -> Callable[..., Any]:
    """``assert_covers(run, outputs=None, **options)``: :func:`fp4rt.coverage.check`, failing with the report."""

    def check_and_raise(run: Callable[..., Any], outputs: Any = None, **options: Any) -> Any:
        from fp4rt import coverage  # here: pytest loads this module in every session

        __tracebackhide__ = True
        return coverage.check(run, outputs, **options).raise_if_broken()

    return check_and_raise
