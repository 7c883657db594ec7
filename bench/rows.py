"""One measurement is one row: the columns every bench shares, printed and written to ``bench/results/`` as JSON lines.

A row says what was measured (``bench``, ``case``), how long it took (``time_us``, the median; ``spread_us``, the width
of the middle half of the runs), the rate it makes (``rate`` in ``unit``), how near it is to a bound
(``percent_of_bound`` of ``bound``) and how it compares with a reference measured in the same run (``ratio`` =
reference time / own time, more is better; ``reference`` names it). Machine, versions and commit are in every row.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path

__all__ = ["RESULTS", "Row", "machine", "print_row", "time_host", "timing", "write_rows"]

RESULTS = Path(__file__).resolve().parent / "results"
PACKAGES = ("numpy", "numba", "torch", "cupy-cuda12x", "cupy-cuda13x", "jax")


@cache
def machine() -> dict[str, str]:
    """Processor, cores, GPU and driver, versions, commit; only what is there."""
    facts = {"processor": _processor(), "cores": str(len(os.sched_getaffinity(0))), "python": platform.python_version()}
    gpu = _first_line(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"])
    if gpu:
        facts["gpu"], _, facts["driver"] = gpu.partition(", ")
    for package in PACKAGES:
        try:
            facts[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    commit = os.environ.get("FP4RT_BENCH_COMMIT") or _first_line(["git", "rev-parse", "--short=12", "HEAD"])
    if commit:
        facts["commit"] = commit
    return facts


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _first_line(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout.strip() else ""


@dataclass(frozen=True)
class Row:
    """One measurement; see the module's docstring for the columns. What does not apply stays None."""

    bench: str
    case: str
    time_us: float
    spread_us: float
    rate: float | None = None
    unit: str | None = None
    percent_of_bound: float | None = None
    bound: str | None = None
    ratio: float | None = None
    reference: str | None = None
    notes: dict[str, str | float] = field(default_factory=dict)


def timing(seconds: list[float]) -> tuple[float, float]:
    """(median, width of the middle half) in microseconds."""
    if len(seconds) < 4:
        return 1e6 * statistics.median(seconds), 1e6 * (max(seconds) - min(seconds))
    low, middle, high = statistics.quantiles(seconds, n=4)
    return 1e6 * middle, 1e6 * (high - low)


def time_host(function: Callable[[], object], repeats: int = 15, warmup: int = 2) -> list[float]:
    """Wall seconds of each of ``repeats`` calls on the host, after ``warmup`` untimed ones."""
    for _ in range(warmup):
        function()
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - started)
    return seconds


def print_row(row: Row) -> None:
    """One line for a person."""
    parts = [f"{row.bench:<14} {row.case:<44} {row.time_us:>11.1f} us +- {row.spread_us:.1f}"]
    if row.rate is not None:
        parts.append(f"{row.rate:.4g} {row.unit}")
    if row.percent_of_bound is not None:
        parts.append(f"{row.percent_of_bound:.0f} % of {row.bound}")
    if row.ratio is not None:
        parts.append(f"{row.ratio:.2f} x {row.reference}")
    print("  ".join(parts), flush=True)


def write_rows(name: str, rows: list[Row], folder: Path = RESULTS) -> Path:
    """Replace ``folder/NAME.jsonl`` with these rows, machine facts in each."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.jsonl"
    lines = [json.dumps({**asdict(row), "machine": machine()}) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path
