"""What to launch, decided apart from launching: the same decision drives a GPU and, in the tests, a host build."""

from __future__ import annotations

from typing import NamedTuple

from fp4rt.cuda.kernel_spec import KernelSpec

__all__ = ["MAX_GRID", "MAX_GRID_Y", "Launch", "divider_magic", "widest_access"]

MAX_GRID = 2**31 - 1  # blocks along x
MAX_GRID_Y = 65535


class Launch(NamedTuple):
    """One launch but for its addresses: ``constants`` are the argument struct's members after the pointers."""

    spec: KernelSpec
    grid: tuple[int, int, int]
    threads: int
    constants: tuple[int, ...]


def divider_magic(divisor: int) -> int:
    """``ceil(2^64 / divisor)``, 0 for 1: what ``layout/divider.cuh`` multiplies with."""
    return -(-(2**64) // divisor) % 2**64


def widest_access(*bytes_: int) -> int:
    """The largest of 16, 8, 4, 2, 1 that divides every address and distance, of any sign."""
    together = 16
    for value in bytes_:
        together |= abs(value)
    return together & -together
