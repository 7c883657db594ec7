"""Measured tiles: ``tune`` times candidates on the device at hand, and a file remembers the fastest.

Nothing is measured unasked. A file that cannot be read, or entries of another version, are as good as none; a wrong one
costs speed and never bits' correctness, since every candidate computes the same product.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import asdict, fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp4rt.cache_folder import cache_folder
from fp4rt.cuda.gemm.hopper import DecodeTile, PrefillTile, SmallTile
from fp4rt.cuda.gemm.hopper_choice import worth_measuring
from fp4rt.cuda.gemm.portable import PortableTile
from fp4rt.cuda.gemm.portable_choice import candidates
from fp4rt.cuda.gemm.selection import HOPPER_KERNELS, Choice, choose, with_hopper_tile
from fp4rt.version import __version__

if TYPE_CHECKING:
    from fp4rt.cuda.gemm.problem import Problem

__all__ = ["choices", "entry_key", "forget", "remember", "remembered", "tune", "tuning_file"]

_TILES = {tile.__name__: tile for tile in (PortableTile, DecodeTile, SmallTile, PrefillTile)}
_TRIED = 12  # of the portable candidates, the cheapest by estimate
_REPEATS = 15


def tuning_file() -> Path:
    """Where measured tiles are kept."""
    return cache_folder() / "gemm-tiles.json"


def entry_key(problem: Problem) -> str:
    """What a measurement is taken to hold for: sizes, kinds, device; m up to the next power of two from 8 on."""
    device = problem.device
    tokens = max(8, 1 << (problem.m - 1).bit_length())
    where = f"sm_{device.arch}{'a' if device.specific else ''} x {device.multiprocessors}"
    return f"{__version__} {where} m<={tokens} n={problem.n} k={problem.k} {problem.a_kind} x {problem.b_kind}"


@cache
def _entries() -> dict[str, Any]:
    try:
        found = json.loads(tuning_file().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def forget() -> None:
    """Read the file anew at the next look."""
    _entries.cache_clear()


def remembered(problem: Problem, kernel: str | None = None) -> Choice | None:
    """The measured choice for a problem, or None. ``kernel`` limits it to one kernel."""
    entry = _entries().get(entry_key(problem)) if _entries() else None
    if not isinstance(entry, dict):
        return None
    try:
        tile = _TILES[entry["tile"]](**entry["fields"])
        name, splits = entry["kernel"], int(entry["splits"])
        if not isinstance(tile, PortableTile):
            tile.spec("bfloat16")  # raises where it no longer fits
        base = choose(problem, name if name not in HOPPER_KERNELS else None)  # which of them is the tile's to say
    except Exception:  # of another version, or edited: measure again
        return None
    if (name in HOPPER_KERNELS) != (base.kernel in HOPPER_KERNELS):  # as when a cannot be copied in bulk
        return None
    fits = splits <= tile.max_splits(problem.k) if isinstance(tile, PortableTile) else tile.can_share(problem.k)
    if kernel not in (None, name) or not fits:
        return None
    if isinstance(tile, (DecodeTile, SmallTile)) and problem.m > tile.max_tokens:  # measured for fewer of its range
        return None
    why = f"measured: {entry['us']:.1f} us"
    if not isinstance(tile, PortableTile):
        return with_hopper_tile(problem, tile, why)
    return Choice(name, tile, splits, base.activations, base.repack, why)


def remember(problem: Problem, choice: Choice, microseconds: float) -> None:
    """Write one entry: the file is replaced in one step, so that readers see the old or the new one."""
    path = tuning_file()
    forget()
    tile: Any = choice.tile
    entry = {
        "kernel": choice.kernel,
        "tile": type(tile).__name__,
        "fields": {f.name: asdict(tile)[f.name] for f in fields(tile)},
        "splits": choice.splits,
        "us": microseconds,
    }
    text = json.dumps({**_entries(), entry_key(problem): entry}, indent=1, sort_keys=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".new-")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(temporary, path)
    forget()


def choices(problem: Problem) -> list[Choice]:
    """What is worth measuring: the choice first, then other tiles."""
    first = choose(problem)
    if first.kernel != "portable":
        sizes = problem.m, problem.n, problem.k
        tiles = worth_measuring(*sizes, problem.device.multiprocessors, problem.a_kind == "nvfp4")
        return [first, *(with_hopper_tile(problem, tile, "tried") for tile in tiles[1:])]
    a_kind = "bfloat16" if first.activations == "bf16" else problem.a_kind
    cheapest = candidates(problem, a_kind)[:_TRIED]
    others = [Choice("portable", tile, splits, first.activations, False, "tried") for _, tile, splits in cheapest]
    return [first] + [c for c in others if (c.tile, c.splits) != (first.tile, first.splits)]


def tune(
    problem: Problem, measure: Callable[[Choice], float], tried: Iterable[Choice] | None = None
) -> tuple[Choice, float]:
    """Measure and remember the fastest.

    Args:
        problem: the product.
        measure: microseconds of one run with a choice; called several times.
        tried: choices; those of :func:`choices` where None.

    Returns:
        (choice, median microseconds).
    """
    timed = []
    for choice in choices(problem) if tried is None else tried:
        measure(choice)  # compiles and warms up
        timed.append((statistics.median(measure(choice) for _ in range(_REPEATS)), choice))
    microseconds, best = min(timed, key=lambda pair: pair[0])
    remember(problem, best, microseconds)
    return best, microseconds
