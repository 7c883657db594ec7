"""The CPU backend: quantize, dequantize and the rest, in elements a second, beside the same job in eager PyTorch.

    python -m bench.cpu_quantize [--quick] [--no-write]

``rate`` counts matrix elements. The PyTorch job is the specification's steps over whole tensors, checked to give the
same bytes, with as many threads; "numpy reference" is the readable pipeline of ``fp4rt.cpu.reference``. Rows "memory
..." run in a process of their own: ``peak_over_output`` in their notes is the rise of the resident set during one
call over the bytes of its result (target: at most 1.2).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import fp4rt
from bench.needs import need
from bench.rows import Row, print_row, time_host, timing, write_rows
from fp4rt.cpu import reference
from fp4rt.cpu.threads import thread_count
from fp4rt.format import E2M1, R6
from fp4rt.layout import LAYOUTS

SHAPES = ((4096, 4096), (4096, 14336), (8192, 8192))
SMALL, SMALL_REPEATS = (128, 384), 500  # a short text in a small model; what a call costs beside its work
DTYPES: dict[str, Any] = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
GLOBAL_SCALE = np.float32(512)
TORCH = "eager PyTorch"
DENSE = "PyTorch's dense bf16 product"


def matrix(m: int, n: int, dtype: str) -> np.ndarray:
    """Normal values; made in place, so that making them leaves no peak of memory behind."""
    rows = np.random.default_rng(0).standard_normal((16, n), np.float32).astype(DTYPES[dtype])
    x = np.empty((m, n), DTYPES[dtype])
    for first in range(0, m, len(rows)):
        x[first : first + len(rows)] = rows
    return x


def torch_quantize(x: Any, global_scale: float, layout: str) -> tuple[Any, Any]:
    """The steps of ``fp4rt.format`` in eager PyTorch: (data, scales)."""
    import torch

    m, n = x.shape
    blocks = x.float().view(m, n // 16, 16)
    v = blocks.abs().amax(-1)
    t = global_scale * (v * float(R6))
    scales = t.clamp(max=448).to(torch.float8_e4m3fn)
    scale = scales.float()
    enc = torch.where(scale == 0, 0.0, 1 / (scale * (1 / torch.tensor(global_scale))))
    a = (blocks * enc[..., None]).abs()
    code = (a > 0.25).to(torch.uint8)
    for tie, inclusive in ((0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False)):
        code += (a >= tie) if inclusive else (a > tie)
    code |= torch.signbit(blocks).to(torch.uint8) << 3
    code *= (scale != 0)[..., None]
    pairs = code.view(m, n // 2, 2)
    return pairs[..., 0] | pairs[..., 1] << 4, torch_layout(scales.view(torch.uint8), layout)


def torch_layout(scales: Any, layout: str) -> Any:
    """Row-major scales to a layout; the shapes here need no padding."""
    m, columns = scales.shape
    if layout == "128x4":
        return scales.view(m // 128, 4, 32, columns // 4, 4).permute(0, 3, 2, 1, 4).contiguous().view(m, columns)
    if layout == "8x4":
        return scales.view(m // 8, 8, columns // 4, 4).permute(0, 2, 1, 3).contiguous().view(m, columns)
    return scales


def torch_dequantize(data: Any, scales: Any, global_scale: float) -> Any:
    """Linear scales; bfloat16 out."""
    import torch

    m = data.shape[0]
    values = torch.from_numpy(E2M1.values.copy())
    codes = torch.stack([data & 15, data >> 4], -1).view(m, -1).int()
    block_scale = scales.view(torch.float8_e4m3fn).float() / global_scale
    return (values[codes].view(m, -1, 16) * block_scale[..., None]).view(m, -1).to(torch.bfloat16)


def as_torch(x: np.ndarray) -> Any:
    import torch

    return torch.from_numpy(x.view(f"i{x.itemsize}")).view(getattr(torch, x.dtype.name))


def measure(
    case: str,
    elements: int,
    function: Callable[[], object],
    repeats: int,
    beside: float | None = None,
    reference: str = TORCH,
) -> Row:
    function()
    started = time.process_time()
    seconds = time_host(function, repeats, warmup=0)
    cpu_us = (time.process_time() - started) * 1e6 / repeats
    time_us, spread_us = timing(seconds)
    return Row(
        "cpu_quantize",
        case,
        time_us,
        spread_us,
        rate=elements / time_us,
        unit="M elements/s",
        ratio=None if beside is None else beside / time_us,
        reference=None if beside is None else reference,
        notes={
            "threads": thread_count(),
            "best_us": min(seconds) * 1e6,
            "M_elements_per_cpu_second": round(elements / cpu_us),  # what other processes take away does not count
        },
    )


def quantize_rows(m: int, n: int, dtype: str, layouts: list[str], repeats: int) -> Iterator[Row]:
    x = matrix(m, n, dtype)
    foreign = as_torch(x)
    for layout in layouts:
        q = fp4rt.quantize(x, GLOBAL_SCALE, layout=layout)
        data, scales = torch_quantize(foreign, float(GLOBAL_SCALE), layout)
        if not (np.array_equal(q.data, data.numpy()) and np.array_equal(q.scales, scales.numpy())):
            raise SystemExit(f"the PyTorch job and ours differ at {m} x {n} {dtype} {layout}: nothing to compare")
        job = partial(torch_quantize, foreign, float(GLOBAL_SCALE), layout)
        beside, _ = timing(time_host(job, max(3, repeats // 4), 1))
        name = f"{m} x {n} {dtype} {layout}"
        yield measure(
            f"quantize {name}", m * n, partial(fp4rt.quantize, x, GLOBAL_SCALE, layout=layout), repeats, beside
        )
    yield measure(
        f"quantize {m} x {n} {dtype} {layouts[0]}, automatic scale", m * n, partial(fp4rt.quantize, x), repeats
    )


def other_rows(m: int, n: int, repeats: int) -> Iterator[Row]:
    x = matrix(m, n, "bfloat16")
    q = fp4rt.quantize(x, GLOBAL_SCALE, layout="linear")
    job = partial(torch_dequantize, as_torch(q.data.view(np.uint8)), as_torch(q.scales), float(GLOBAL_SCALE))
    if not np.array_equal(job().float().numpy(), q.dequantize("float32")):  # these values are exact in bfloat16
        raise SystemExit("the PyTorch dequantize and ours differ: nothing to compare")
    beside, _ = timing(time_host(job, max(3, repeats // 4), 1))
    for dtype in DTYPES:
        own = beside if dtype == "bfloat16" else None
        yield measure(f"dequantize {m} x {n} to {dtype}", m * n, partial(q.dequantize, dtype), repeats, own)
    yield measure(f"relayout {m} x {n} linear to 128x4", m * n, partial(q.relayout, "128x4"), repeats)
    yield measure(f"global scale {m} x {n} bfloat16", m * n, partial(fp4rt.global_scale, x), repeats)
    yield measure(f"error report {m} x {n} bfloat16", m * n, partial(fp4rt.quantization_error, x, q), repeats)
    yield product_row(x[:64], x, repeats)
    widened, layout = reference.widen(x.view(np.uint16), "bfloat16"), LAYOUTS["128x4"]
    job = partial(reference.quantize, widened, GLOBAL_SCALE, layout, n)
    yield measure(f"numpy reference quantize {m} x {n}", m * n, job, 1)


def product_row(a: np.ndarray, b: np.ndarray, repeats: int) -> Row:
    """a (m, k) times quantized b (n, k)."""
    weight, activations = as_torch(b), as_torch(a)
    beside, _ = timing(time_host(lambda: activations @ weight.T, max(3, repeats // 4), 1))
    case = f"matmul {len(a)} x {len(b)} x {b.shape[1]}, rate in weights"
    return measure(case, b.size, partial(fp4rt.matmul, a, fp4rt.quantize(b)), repeats, beside, DENSE)


def small_rows() -> Iterator[Row]:
    yield from quantize_rows(*SMALL, "bfloat16", ["128x4"], SMALL_REPEATS)
    yield product_row(matrix(*SMALL, "bfloat16")[:8], matrix(SMALL[1], SMALL[1], "bfloat16"), SMALL_REPEATS)


def resident_bytes(key: str) -> int:
    """A figure of /proc/self/status: VmRSS (now) or VmHWM (the highest so far)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"/proc/self/status has no {key}; memory can be measured on Linux only")


def measure_memory(dtype: str, m: int, n: int, automatic: bool) -> dict[str, int]:
    """In a fresh process: how far the resident set rises above what stood before the call."""
    fp4rt.quantize(np.ones((256, n), DTYPES[dtype]), None if automatic else GLOBAL_SCALE)  # compiles
    x = matrix(m, n, dtype)
    before = resident_bytes("VmHWM")
    if before - resident_bytes("VmRSS") > 1 << 20:
        raise SystemExit("an earlier peak of memory would hide that of the call")
    q = fp4rt.quantize(x, None if automatic else GLOBAL_SCALE)
    return {"rise": resident_bytes("VmHWM") - before, "output": q.nbytes}


def memory_rows(m: int, n: int) -> Iterator[Row]:
    for dtype in DTYPES:
        for automatic in (False, True):
            command = [
                sys.executable,
                "-m",
                "bench.cpu_quantize",
                "--memory",
                dtype,
                str(m),
                str(n),
                str(int(automatic)),
            ]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            found = json.loads(done.stdout)
            case = f"memory quantize {m} x {n} {dtype}" + (", automatic scale" if automatic else "")
            notes = {"peak_over_output": round(found["rise"] / found["output"], 3), **found}
            yield Row(
                "cpu_quantize", case, 0.0, 0.0, rate=found["rise"] / found["output"], unit="of the output", notes=notes
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one shape, few repeats")
    parser.add_argument("--no-write", action="store_true", help="print only")
    parser.add_argument("--memory", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.memory:
        dtype, m, n, automatic = arguments.memory
        print(json.dumps(measure_memory(dtype, int(m), int(n), automatic == "1")))
        return
    need("torch").set_num_threads(thread_count())
    repeats = 5 if arguments.quick else 15
    rows: list[Row] = []

    def keep(found: Iterator[Row]) -> None:
        for row in found:
            print_row(row)
            rows.append(row)

    for m, n in SHAPES[:1] if arguments.quick else SHAPES:
        for dtype in DTYPES:
            keep(quantize_rows(m, n, dtype, ["128x4", "linear", "8x4"] if (m, n) == SHAPES[0] else ["128x4"], repeats))
    keep(other_rows(*SHAPES[0], repeats))
    keep(small_rows())
    keep(memory_rows(8192, 8192))
    if not arguments.no_write:
        print(write_rows("cpu_quantize", rows))


if __name__ == "__main__":
    main()
