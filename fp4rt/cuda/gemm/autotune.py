"""Measured tiles: ``tune`` times candidates on the device at hand, and a file remembers the fastest.

Nothing is measured unasked. A file that cannot be read, or of another version, is as good as none; a wrong one costs
speed and no bit of correctness, since tiles that cannot compute the product are refused.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp4rt.cache_folder import CACHE_VARIABLE, cache_folder, write_entry
from fp4rt.cuda.gemm.hopper import DecodeTile, PrefillTile, SmallTile
from fp4rt.cuda.gemm.hopper_choice import worth_measuring
from fp4rt.cuda.gemm.portable import PortableTile
from fp4rt.cuda.gemm.portable_choice import candidates
from fp4rt.cuda.gemm.selection import HOPPER_KERNELS, Choice, check_grid, choose, with_hopper_tile
from fp4rt.errors import Fp4rtError
from fp4rt.version import __version__

if TYPE_CHECKING:
    from fp4rt.cuda.gemm.problem import Problem

__all__ = ["choices", "entry_key", "remember", "remembered", "tune", "tuning_file"]

_TILES = {tile.__name__: tile for tile in (PortableTile, DecodeTile, SmallTile, PrefillTile)}
_TRIED = 12  # of the portable candidates, the cheapest by estimate
_REPEATS = 15


def entry_key(problem: Problem) -> str:
    """What a measurement is taken to hold for: sizes, kinds, device; m up to the next power of two from 8 on."""
    device = problem.device
    tokens = max(8, 1 << (problem.m - 1).bit_length())
    where = f"sm_{device.arch}{'a' if device.specific else ''} x {device.multiprocessors}"
    return f"{__version__} {where} m<={tokens} n={problem.n} k={problem.k} {problem.a_kind} x {problem.b_kind}"


def tuning_file(problem: Problem) -> Path:
    """Where a problem's fastest tile is kept: a file each, so that no process writes over what another found."""
    name = hashlib.sha256(entry_key(problem).encode()).hexdigest()[:32]
    return cache_folder() / "gemm-tiles" / f"{name}.json"


def remembered(problem: Problem, kernel: str | None = None) -> Choice | None:
    """The measured choice for a problem, or None. ``kernel`` limits it to one kernel."""
    try:
        entry = json.loads(tuning_file(problem).read_text(encoding="utf-8"))
        choice = _choice_of(entry, problem)
        check_grid(problem, choice)
    except Exception:  # there is none, it is of another version, or edited: choose anew
        return None
    return choice if kernel in (None, choice.kernel) else None


def _choice_of(entry: Any, problem: Problem) -> Choice:
    """Raises whatever it may where an entry is not one that :func:`remember` writes for the problem."""
    kind, values, splits = _TILES[entry["tile"]], entry["fields"], entry["splits"]
    wanted = {field.name: field.type for field in fields(kind)}  # "int" or "bool"
    found = {name: type(value).__name__ for name, value in values.items()}
    if entry["key"] != entry_key(problem) or found != wanted or type(splits) is not int:
        raise ValueError
    tile = kind(**values)
    base = choose(problem)
    why = f"measured: {entry['us']:.1f} us"
    if isinstance(tile, PortableTile):
        a_kind = "bfloat16" if base.activations == "bf16" else problem.a_kind
        small = tile.shared_bytes(a_kind) <= problem.device.shared_bytes
        if base.kernel != "portable" or not small or not 1 <= splits <= tile.max_splits(problem.k):
            raise ValueError
        return Choice("portable", tile, splits, base.activations, base.repack, why)
    tile.spec("bfloat16")  # raises where it no longer fits
    covers = isinstance(tile, PrefillTile) or problem.m <= tile.max_tokens  # it may be measured for fewer of its range
    if base.kernel not in HOPPER_KERNELS or not covers or not tile.can_share(problem.k):
        raise ValueError  # such as where a cannot be copied in bulk
    return with_hopper_tile(problem, tile, why)


def remember(problem: Problem, choice: Choice, microseconds: float) -> None:
    """Write an entry, or warn that it cannot be: the file is replaced in one step, so that readers see either."""
    path = tuning_file(problem)
    tile: Any = choice.tile
    entry = {
        "key": entry_key(problem),
        "tile": type(tile).__name__,
        "fields": {f.name: asdict(tile)[f.name] for f in fields(tile)},
        "splits": choice.splits,
        "us": microseconds,
    }
    try:
        write_entry(path, json.dumps(entry, indent=1, sort_keys=True).encode())
    except OSError as error:
        warnings.warn(
            f"fp4rt cannot keep what it measured in {path.parent} ({error.strerror or error}); "
            f"set {CACHE_VARIABLE} to a folder that can be written",
            RuntimeWarning,
            stacklevel=2,
        )


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
    timed: list[tuple[float, Choice]] = []
    for choice in choices(problem) if tried is None else tried:
        try:
            measure(choice)  # compiles and warms up
        except (Fp4rtError, MemoryError):  # such as for a workspace that the device has no room for
            if not timed:
                raise
            continue
        timed.append((statistics.median(measure(choice) for _ in range(_REPEATS)), choice))
    microseconds, best = min(timed, key=lambda pair: pair[0])
    remember(problem, best, microseconds)
    return best, microseconds
