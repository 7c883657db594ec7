"""Write coverage: which bytes of its outputs a kernel never writes, and whether its padding tag tells the truth.

    verdict = coverage.check(lambda out: fp4rt.quantize(x, out=out), fp4rt.quantize(x))
    verdict = coverage.check(my_kernel, coverage.Output(np.empty((128, 4), np.uint8), tag))
    verdict = coverage.check(lambda: fp4rt.quantize(x))             # all that the call allocates
    verdict = coverage.check_partition({"decode": write_decode_rows, "prefill": write_prefill_rows}, output)

In a test, with the fixture of ``fp4rt.coverage.pytest_plugin``: ``assert_covers(my_kernel, output)``.
"""

from __future__ import annotations

from fp4rt.coverage.check import PATTERNS, Output, check, check_allocations, check_partition
from fp4rt.coverage.verdict import CoverageError, Finding, OutputVerdict, Place, Verdict

__all__ = [
    "PATTERNS",
    "CoverageError",
    "Finding",
    "Output",
    "OutputVerdict",
    "Place",
    "Verdict",
    "check",
    "check_allocations",
    "check_partition",
]
