"""What bounds large products: how busy the tensor cores are, beside cuBLAS's kernel, by Nsight Compute's counters.

    python -m bench.gemm_profile

It needs `ncu` on the path and the right to read counters.
``percent_of_bound`` is the share of all cycles in which the tensor cores work, over all multiprocessors, from the first
block's start to the last one's end. Clocks are left as they are: the counters are in cycles.
"""

from __future__ import annotations

import argparse
import csv
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from bench.needs import need, need_gpu
from bench.rows import Row, print_row, write_rows

PRODUCTS = ((4096, 8192, 8192), (1024, 8192, 8192), (512, 28672, 8192), (4096, 28672, 8192), (1024, 4096, 4096))
BUSY = "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed"
CYCLES = "sm__cycles_elapsed.max"
DURATION = "gpu__time_duration.sum"
L2_BYTES = "lts__t_bytes.sum"
NAMES = ("fp4rt", "cuBLAS bf16")
NANOSECONDS = {"ns": 1, "us": 1e3, "ms": 1e6, "nsecond": 1, "usecond": 1e3, "msecond": 1e6}


def launch_all() -> None:
    """Each product once by each of the two, warmed up, with the profiler on for these alone."""
    import torch

    import fp4rt

    for m, n, k in PRODUCTS:
        quantized = fp4rt.quantize(torch.randn(n, k, device="cuda", dtype=torch.bfloat16))
        prepacked = fp4rt.prepack(quantized)
        dense = fp4rt.dequantize(quantized, "bfloat16").t()
        x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
        profile(partial(fp4rt.matmul, x, prepacked, out=out))
        profile(partial(torch.matmul, x, dense, out=out))


def profile(function: Callable[[], object]) -> None:
    """One call with the profiler on, after one without."""
    import cupy

    function()
    cupy.cuda.runtime.deviceSynchronize()
    cupy.cuda.profiler.start()
    function()
    cupy.cuda.runtime.deviceSynchronize()
    cupy.cuda.profiler.stop()


def counters(output: str) -> list[dict[str, float]]:
    """One dictionary a kernel, from ncu's comma-separated pages; memsets have no counters and are not in them."""
    lines = list(csv.reader(output.splitlines()))
    first = next(i for i, line in enumerate(lines) if line and line[0] == "ID")
    header, units = lines[first], lines[first + 1]
    found = []
    for line in lines[first + 2 :]:
        if len(line) == len(header):
            values = {name: float(line[header.index(name)].replace(",", "")) for name in (BUSY, CYCLES, L2_BYTES)}
            unit = units[header.index(DURATION)]
            values[DURATION] = float(line[header.index(DURATION)].replace(",", "")) * NANOSECONDS[unit]
            found.append(values)
    return found


def main() -> None:
    """Profile itself, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launch", action="store_true", help=argparse.SUPPRESS)
    if parser.parse_args().launch:
        launch_all()
        return
    need_gpu()
    need("torch")
    ncu = shutil.which("ncu")
    if ncu is None:
        raise SystemExit("gemm_profile needs Nsight Compute's `ncu` on the path")
    command = [ncu, "--profile-from-start", "off", "--clock-control", "none", "--csv", "--page", "raw", "--metrics"]
    command += [",".join((BUSY, CYCLES, DURATION, L2_BYTES)), sys.executable, "-m", "bench.gemm_profile", "--launch"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).resolve().parent.parent)
    if done.returncode:
        raise SystemExit(f"ncu failed with status {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    kernels = counters(done.stdout)
    cases = [(product, name) for product in PRODUCTS for name in NAMES]
    if len(kernels) != len(cases):
        raise SystemExit(f"ncu saw {len(kernels)} kernels, wanted {len(cases)}: one a product")
    rows = []
    for ((m, n, k), name), seen in zip(cases, kernels, strict=True):
        rows.append(
            Row(
                bench="gemm_profile",
                case=f"{name}, m = {m}, {n} x {k}",
                time_us=seen[DURATION] / 1e3,
                spread_us=0.0,
                rate=2 * m * n * k / seen[DURATION] / 1e3,
                unit="TFLOP/s",
                percent_of_bound=seen[BUSY],
                bound="tensor cores' cycles",
                notes={"cycles": seen[CYCLES], "l2_bytes": seen[L2_BYTES]},
            )
        )
        print_row(rows[-1])
    print(write_rows("gemm_profile", rows))


if __name__ == "__main__":
    main()
