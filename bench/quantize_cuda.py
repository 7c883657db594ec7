"""Global scale, quantize and dequantize on a CUDA device, beside what bounds them, in one run.

    python -m bench.quantize_cuda [--out FOLDER] [--quick]

Reading a row: the bytes of a case are those it needs (input, data and scales, padding included); ``ratio`` compares
with a device-to-device copy that moves as many, or with what the row names. The two are measured in turns.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import fp4rt
from bench.device_time import copy_of, device_times, in_turns, read_bandwidth
from bench.needs import need_gpu, optional
from bench.rows import RESULTS, Row, print_row, timing, write_rows
from fp4rt.layout import LAYOUTS, block_columns, data_shape

cupy = optional("cupy")

COPY = "copy of the same bytes"
KINDS = {"fp16": np.float16, "bf16": ml_dtypes.bfloat16, "fp32": np.float32}
NAMES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
LARGE = [(8192, 28672, 28672), (8192, 8192, 8192), (8192, 7152, 7168), (4096, 8192, 8192)]
SMALL = [(1, 7168), (16, 7168), (64, 7168), (1, 8192), (16, 8192), (64, 8192)]
PADDED = [(64, 7152, 7168), (150, 80, 96), (4096, 7152, 7168), (8192, 7152, 7168)]
AUTOMATIC = [(512, 8192), (1024, 8192), (2048, 8192), (8192, 8192), (8192, 28672)]
ROUNDS = 5


def normal(m: int, n: int, kind: str) -> Any:
    """Normal numbers on the device; made on the host once, repeated beyond a few million."""
    rng = np.random.default_rng(1)
    few = rng.standard_normal((min(m, 1024), n), np.float32).astype(KINDS[kind])
    bits = cupy.asarray(few.view(np.uint16 if few.itemsize == 2 else np.uint32))
    return cupy.tile(bits, (-(-m // len(few)), 1))[:m].copy().view(few.dtype)


def row(case: str, seconds: list[float], **columns: Any) -> Row:
    time_us, spread_us = timing(seconds)
    return Row("quantize_cuda", case, time_us, spread_us, **columns)


def beside_copy(case: str, function: Callable[[], object], nbytes: int) -> Row:
    own, copied = in_turns(function, copy_of(nbytes), rounds=ROUNDS)
    own_s, copy_s = statistics.median(own), statistics.median(copied)
    return row(case, own, rate=nbytes / own_s / 1e9, unit="GB/s", ratio=copy_s / own_s, reference=COPY)


def quantized_bytes(m: int, padded_n: int, layout: str) -> int:
    rows, row_bytes = data_shape(m, padded_n)
    return rows * row_bytes + LAYOUTS[layout].nbytes(m, block_columns(padded_n))


def shape_text(m: int, n: int, padded_n: int) -> str:
    return f"{m}x{n}" + (f"->{padded_n}" if padded_n != n else "")


def given_scale() -> Any:
    return cupy.asarray(np.array([500.0], np.float32))


def quantize_rows() -> Iterator[Row]:
    g = given_scale()
    for kind, (m, n, padded_n) in product(("bf16", "fp16", "fp32"), LARGE):
        x = normal(m, n, kind)
        for layout in LAYOUTS:
            q = fp4rt.quantize(x, g, layout=layout, padded_n=padded_n)
            case = f"quantize {kind} {shape_text(m, n, padded_n)} {layout}"
            nbytes = x.nbytes + quantized_bytes(m, padded_n, layout)
            call = partial(fp4rt.quantize, x, g, layout=layout, padded_n=padded_n, out=q)
            yield beside_copy(case, call, nbytes)


def dequantize_rows() -> Iterator[Row]:
    for (m, n), layout in product([(8192, 8192), (8192, 28672)], LAYOUTS):
        q = fp4rt.quantize(normal(m, n, "bf16"), layout=layout)
        for kind in ("bf16", "fp16", "fp32"):
            y = cupy.empty((m, n), KINDS[kind])
            nbytes = y.nbytes + quantized_bytes(m, n, layout)
            case = f"dequantize {kind} {m}x{n} {layout}"
            yield beside_copy(case, partial(fp4rt.dequantize, q, NAMES[kind], out=y), nbytes)


def global_scale_rows() -> Iterator[Row]:
    bound = read_bandwidth()
    yield row("read only, 4 GiB", [(4 << 30) / bound], rate=bound / 1e9, unit="GB/s")
    for kind, (m, n) in product(("bf16", "fp16", "fp32"), [(8192, 28672), (8192, 8192)]):
        x = normal(m, n, kind)
        seconds = device_times(partial(fp4rt.global_scale, x), 40 * ROUNDS)
        rate = x.nbytes / statistics.median(seconds)
        percent = 100 * rate / bound
        columns = {"rate": rate / 1e9, "unit": "GB/s", "percent_of_bound": percent, "bound": "read bandwidth"}
        yield row(f"global_scale {kind} {m}x{n}", seconds, **columns)


def small_rows() -> Iterator[Row]:
    empty = cupy.RawKernel('extern "C" __global__ void empty() {}', "empty")
    g = given_scale()
    for (m, n), layout in product(SMALL, LAYOUTS):
        x = normal(m, n, "bf16")
        q = fp4rt.quantize(x, g, layout=layout)
        call = partial(fp4rt.quantize, x, g, layout=layout, out=q)
        own, nothing = in_turns(call, partial(empty, (1,), (32,), ()), rounds=ROUNDS)
        above = 1e6 * (statistics.median(own) - statistics.median(nothing))
        notes = {"above_empty_us": round(above, 2), "empty_us": round(1e6 * statistics.median(nothing), 2)}
        yield row(f"quantize bf16 {m}x{n} {layout}", own, notes=notes)


def padded_rows() -> Iterator[Row]:
    g = given_scale()
    for m, n, padded_n in PADDED:
        x = normal(m, n, "bf16")
        fused, plain = fp4rt.quantize(x, g, padded_n=padded_n), fp4rt.quantize(x, g)
        pad = _pad(plain.data, padded_n // 2)

        def in_two_steps(x: Any = x, plain: Any = plain, pad: Callable[[], object] = pad) -> None:
            fp4rt.quantize(x, g, out=plain)
            pad()

        call = partial(fp4rt.quantize, x, g, padded_n=padded_n, out=fused)
        own, apart = in_turns(call, in_two_steps, rounds=ROUNDS)
        ratio = statistics.median(apart) / statistics.median(own)
        case = f"quantize bf16 {shape_text(m, n, padded_n)} 128x4, padding written by the kernel"
        yield row(case, own, ratio=ratio, reference="quantize, then copy into a padded buffer")


def _pad(data: Any, row_bytes: int) -> Callable[[], object]:
    """Codes into a buffer with longer rows, zeros behind them: by torch, as serving engines do it, or by CuPy."""
    try:
        import torch
    except ImportError:
        padded = cupy.empty((data.shape[0], row_bytes), np.uint8)

        def by_cupy() -> None:
            padded[:, : data.shape[1]] = data
            padded[:, data.shape[1] :] = 0

        return by_cupy
    return partial(torch.nn.functional.pad, torch.as_tensor(data, device="cuda"), (0, row_bytes - data.shape[1]))


def automatic_rows() -> Iterator[Row]:
    """The whole call, and its two parts with the cache emptied before each; what they add up to is the reference."""
    for m, n in AUTOMATIC:
        x = normal(m, n, "bf16")
        g, q = fp4rt.global_scale(x), fp4rt.quantize(x)
        calls = partial(fp4rt.quantize, x, out=q), partial(fp4rt.global_scale, x), partial(fp4rt.quantize, x, g, out=q)
        whole, amax, given = in_turns(*calls, rounds=ROUNDS)
        medians = [1e6 * statistics.median(seconds) for seconds in (whole, amax, given)]
        notes = {
            "amax_us": round(medians[1], 2),
            "quantize_from_memory_us": round(medians[2], 2),
            "quantize_after_amax_us": round(medians[0] - medians[1], 2),
        }
        case = f"quantize bf16 {m}x{n} 128x4, automatic global scale"
        ratio = (medians[1] + medians[2]) / medians[0]
        yield row(case, whole, ratio=ratio, reference="amax + quantize, each from memory", notes=notes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    options = parser.parse_args()
    need_gpu()
    if options.quick:
        global ROUNDS
        ROUNDS = 1
    rows = []
    for part in (small_rows, quantize_rows, dequantize_rows, global_scale_rows, padded_rows, automatic_rows):
        for found in part():
            rows.append(found)
            print_row(found)
        cupy.get_default_memory_pool().free_all_blocks()
    print(write_rows("quantize_cuda", rows, options.out))


if __name__ == "__main__":
    main()
