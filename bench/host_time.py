"""What a call costs on the host: the time until it returns, in bursts too short for the driver's queue to fill.

Bursts of a case and of its reference take turns: another program on the same core slows both alike.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from bench.rows import Row, print_row, timing

__all__ = ["Case", "HostRows"]

CALLS = 50  # in a burst: fewer than the driver queues, so that none waits for the device
BURSTS = 60
WARM_CALLS = 20


class Case(NamedTuple):
    """What is measured, and its name."""

    name: str
    call: Callable[[], Any]


class HostRows:
    """The rows of a bench; ``wait`` lets the device finish what is queued."""

    def __init__(self, wait: Callable[[], object]) -> None:
        self.rows: list[Row] = []
        self._wait = wait

    def measure(self, name: str, call: Callable[[], Any], reference: Case | None = None) -> Case:
        """Measure, print and keep one row; gives what another case may be compared with."""
        case = Case(name, call)
        self.rows.append(_row(case, self._wait, reference))
        print_row(self.rows[-1])
        return case


def _row(case: Case, wait: Callable[[], object], reference: Case | None) -> Row:
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
    return Row("host_cost", case.name, time_us, spread, ratio=ratio, reference=name)
