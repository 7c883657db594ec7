"""What a call costs on the host: the time until it returns, with the device idle in between.

    python -m bench.host_cost_cuda [--out FOLDER]

Everything is measured in one run, beside a bare ``RawKernel`` launch and torch's ``x * 2``. First calls are measured in
fresh processes: with an empty kernel cache and with a filled one, after ``import fp4rt`` and the making of x.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import fp4rt
from bench.host_time import HostRows
from bench.needs import need_gpu, optional
from bench.rows import RESULTS, Row, print_row, write_rows

cupy = optional("cupy")

FIRST_CALL = """
import time, cupy, fp4rt
x = cupy.zeros((256, 4096), cupy.float16)
cupy.cuda.Device().synchronize()
start = time.perf_counter()
q = fp4rt.quantize(x)
cupy.cuda.Device().synchronize()
print(time.perf_counter() - start)
"""


def arrays(q: fp4rt.QuantizedTensor) -> tuple[object, object, object]:
    """What a result's user may ask for: arrays are made then."""
    return q.data, q.scales, q.global_scale


def steady_rows() -> list[Row]:
    bench = HostRows(cupy.cuda.Device().synchronize)
    measure = bench.measure
    kernel = cupy.RawKernel('extern "C" __global__ void nothing(const float* x, float* y, int n) {}', "nothing")
    x, g = cupy.ones((64, 1024), cupy.float16), cupy.ones(1, cupy.float32)
    raw_args = (x, g, cupy.int32(1))
    raw = measure("RawKernel launch", lambda: kernel((1,), (32,), raw_args))
    q = fp4rt.quantize(x, g)
    measure("quantize(cupy, g, out=q)", lambda: fp4rt.quantize(x, g, out=q), raw)
    measure("quantize(cupy, 1.0, out=q)", lambda: fp4rt.quantize(x, 1.0, out=q), raw)
    measure("quantize(cupy, out=q)", lambda: fp4rt.quantize(x, out=q), raw)
    measure("quantize(cupy, g)", lambda: fp4rt.quantize(x, g), raw)
    measure("quantize(cupy, g), its arrays too", lambda: arrays(fp4rt.quantize(x, g)), raw)
    y = cupy.empty((64, 1024), cupy.float16)
    measure("dequantize(cupy, out=y)", lambda: fp4rt.dequantize(q, "float16", out=y), raw)
    try:
        import torch
    except ImportError:
        return bench.rows
    x_torch = torch.ones((64, 1024), dtype=torch.bfloat16, device="cuda")
    g_torch = torch.ones(1, device="cuda")
    double = measure("torch x * 2", lambda: x_torch * 2)
    measure("quantize(torch, g)", lambda: fp4rt.quantize(x_torch, g_torch), double)
    measure("quantize(torch, g), its arrays too", lambda: arrays(fp4rt.quantize(x_torch, g_torch)), double)
    q_torch = fp4rt.quantize(x_torch, g_torch)
    measure("quantize(torch, g, out=q)", lambda: fp4rt.quantize(x_torch, g_torch, out=q_torch), double)
    measure("quantize(torch)", lambda: fp4rt.quantize(x_torch), double)
    measure("dequantize(torch)", lambda: fp4rt.dequantize(q_torch, "bfloat16"), double)
    return bench.rows


def first_call_rows() -> list[Row]:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "FP4RT_CACHE_DIR": folder}
        for case in ("first call, empty kernel cache", "first call, filled kernel cache"):
            command = [sys.executable, "-c", FIRST_CALL]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
            rows.append(Row("host_cost", case, 1e6 * float(done.stdout), 0.0))
            print_row(rows[-1])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    need_gpu()
    rows = steady_rows() + first_call_rows()
    print(write_rows("host_cost_cuda", rows, arguments.out))


if __name__ == "__main__":
    main()
