"""What an allocation from the pool costs on the host, and what filling padding costs against writing it in the kernel.

    python -m bench.pool [--device cuda] [--no-write]

Rows "allocate ...": one warm allocation and its release, host time, against the library's own empty() in the same run.
Rows "quantize ...": a call under ``covered`` and ``empty`` against the same call under ``zero``.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import fp4rt
from bench.isolation import time_calls
from bench.needs import need_gpu
from bench.rows import Row, print_row, timing, write_rows
from fp4rt import interop
from fp4rt.device import CPU, Device
from fp4rt.layout import LAYOUTS
from fp4rt.pool import Fill, PaddedPool, scale_tag, use_pool

SHAPES = ((16, 8192), (128, 8192), (1024, 8192), (4096, 8192), (8192, 8192))
HOST_SHAPES = ((16, 1024), (256, 1024))
FILLS: tuple[Fill, ...] = ("zero", "covered", "empty")
CALLS, REPEATS = 500, 40


def host_seconds(function: Callable[[], object]) -> list[float]:
    """Seconds a call, for many batches of calls."""
    seconds = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        for _ in range(CALLS):
            function()
        seconds.append((time.perf_counter() - started) / CALLS)
    return seconds[REPEATS // 4 :]


def allocation_cases(device: Device) -> dict[str, tuple[Callable[[], object], str]]:
    """Case -> (what is timed, the case that it is compared with)."""
    pool = PaddedPool()
    tag = scale_tag("128x4", 100, 1000, 1024)
    shape, nbytes = tag.physical, tag.nbytes
    if device.kind == "cpu":
        return {
            "numpy.empty": (lambda: np.empty(shape, np.uint8), ""),
            "buffer alone": (lambda: pool.allocate(nbytes, device, 0, tag), "numpy.empty"),
            "as a numpy array": (lambda: pool.allocate(nbytes, device, 0, tag).numpy(shape), "numpy.empty"),
        }
    import cupy

    with contextlib.suppress(ImportError):  # torch is compared where it is there
        import torch

    def in_library(library: str) -> Callable[[], object]:
        return lambda: interop.from_device(pool.allocate(nbytes, device, 0, tag), shape, "uint8", library)

    cases: dict[str, tuple[Callable[[], object], str]] = {
        "cupy.empty": (lambda: cupy.empty(shape, np.uint8), ""),
        "buffer alone": (lambda: pool.allocate(nbytes, device, 0, tag), "cupy.empty"),
        "as a cupy array": (in_library("cupy"), "cupy.empty"),
    }
    if "torch" in sys.modules:
        torch = sys.modules["torch"]
        cases["torch.empty"] = (lambda: torch.empty(shape, dtype=torch.uint8, device="cuda"), "")
        cases["as a torch tensor"] = (in_library("torch"), "torch.empty")
    return cases


def allocation_rows(device: Device) -> list[Row]:
    """One row a case."""
    rows: list[Row] = []
    medians: dict[str, float] = {}
    for case, (function, reference) in allocation_cases(device).items():
        time_us, spread_us = timing(host_seconds(function))
        medians[case] = time_us
        ratio = medians[reference] / time_us if reference else None
        rows.append(
            Row(f"pool_{device.kind}", f"allocate {case}", time_us, spread_us, ratio=ratio, reference=reference or None)
        )
        print_row(rows[-1])
    return rows


def fill_rows(device: Device, shapes: tuple[tuple[int, int], ...]) -> list[Row]:
    """quantize with a given scale into fresh memory, one row a shape, layout and policy."""
    rows = []
    values = np.random.default_rng(0).normal(size=1 << 20).astype(np.float16)
    for m, n in shapes:
        x: Any = np.resize(values, (m, n))
        if device.kind == "cuda":
            x = sys.modules["cupy"].asarray(x)
        for layout in LAYOUTS:
            zero_us = None
            for fill in FILLS:
                with use_pool(PaddedPool(fill)) as pool:
                    time_us, spread_us = timing(time_calls(partial(quantize, x, layout), x))
                    before = pool.stats()
                    quantize(x, layout)
                    zeroed = pool.stats().bytes_zeroed - before.bytes_zeroed
                zero_us = zero_us or time_us
                row = Row(
                    f"pool_{device.kind}",
                    f"quantize {m}x{n} {layout} {fill}",
                    time_us,
                    spread_us,
                    ratio=zero_us / time_us,
                    reference="fill zero",
                    notes={"bytes_zeroed": zeroed},
                )
                rows.append(row)
                print_row(row)
    return rows


def quantize(x: Any, layout: str) -> Any:
    """The call that is timed."""
    return fp4rt.quantize(x, 1.0, layout=layout)


def main() -> int:
    """Run, print, write ``bench/results/pool_DEVICE.jsonl``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--allocations-only", action="store_true")
    parser.add_argument("--no-write", action="store_true", help="only print")
    arguments = parser.parse_args()
    if arguments.device == "cuda":
        need_gpu()
    device = CPU if arguments.device == "cpu" else Device("cuda", 0)
    rows = allocation_rows(device)
    if not arguments.allocations_only:
        rows += fill_rows(device, HOST_SHAPES if device == CPU else SHAPES)
    if not arguments.no_write:
        write_rows(f"pool_{device.kind}", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
