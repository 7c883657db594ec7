"""What a call costs on the host: the time until it returns, in bursts too short for the driver's queue to fill.

Bursts of a case and of its reference take turns: another program on the same core slows both alike.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from bench.rows import Row, print_row, timing

__all__ = ["Case", "host_row"]

CALLS = 50  # in a burst: fewer than the driver queues, so that none waits for the device
BURSTS = 60
WARM_CALLS = 20


class Case(NamedTuple):
    """What is measured, and its name."""

    name: str
    call: Callable[[], Any]


def host_row(case: Case, wait: Callable[[], object], reference: Case | None = None) -> Row:
    """Measure and print; ``wait`` lets the device finish what is queued."""
    cases = [case] if reference is None else [case, reference]
    seconds: list[list[float]] = [[] for _ in cases]
    for one in cases:
        for _ in range(WARM_CALLS):
            one.call()
    for _ in range(BURSTS):
        for one, found in zip(cases, seconds, strict=True):
            wait()
            start = time.perf_counter()
            for _ in range(CALLS):
                one.call()
            found.append((time.perf_counter() - start) / CALLS)
    time_us, spread = timing(seconds[0])
    ratio = name = None
    if reference is not None:
        ratio, name = statistics.median(seconds[1]) / statistics.median(seconds[0]), reference.name
    row = Row("host_cost", case.name, time_us, spread, ratio=ratio, reference=name)
    print_row(row)
    return row
