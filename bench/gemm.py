"""Products with NVFP4 weights on a CUDA device, beside cuBLAS's bf16 product of the same shape in the same run.

    python -m bench.gemm [--quick] [--no-write]
    python -m bench.gemm --shape 6144 4096 --shape 4096 14336 --tokens 1 16 256 4096

``rate`` counts 2 m n k operations; ``gb_per_s`` in the notes counts the weight's bytes. The bound is the larger of the
time to read the weight once, at the rate of a kernel that only reads, and of the operations at the rate of cuBLAS's
8192 x 8192 x 8192 product; both are measured first. L2 is emptied before every call; what a call needs beside its
kernel (NVFP4 activations to bf16, say) is part of its time. Results are of the activations' type, with NVFP4 ones bf16.

A case and cuBLAS run in turns, each as ``triton.testing.do_bench`` runs it: 25 ms of calls unmeasured, then 100 ms.
Long products come to the card's power limit, and each is measured at the clocks that its own load leaves: the fewer
joules, the faster. ``ratio_call_by_call`` in the notes is what remains where single calls of the two alternate and both
run at the same clocks.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import fp4rt
from bench.device_time import both_times, device_times, in_turns, read_bandwidth
from bench.needs import need, need_gpu, optional
from bench.rows import Row, print_row, timing, write_rows
from fp4rt.cuda.gemm.hopper_choice import choose_hopper
from fp4rt.cuda.kernel import device_attribute, device_target

torch = optional("torch")

SHAPES = ((28672, 8192), (8192, 28672), (8192, 8192), (4096, 4096))
TOKENS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096, 8192)
FEWER_TOKENS = (1, 8, 16, 32, 64, 128, 256, 1024, 4096)
POWERS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
UNPACKED_TOKENS = (1, 8, 16, 64)
CUBLAS = "cuBLAS bf16"
_MULTIPROCESSORS = 16  # cudaDeviceAttr
ALTERNATIONS = 24
LONG_TOKENS = 256  # from here on, products are long enough for the power limit
REST_SECONDS = 1.0  # before the small products of the next shape: they recover from the last one's long products


@dataclass(frozen=True)
class Kind:
    """Which operands: ``prepacked`` weights or plain ones, activations of ``a_type``."""

    name: str
    a_type: str
    prepacked: bool
    tokens: tuple[int, ...]


KINDS = (
    Kind("bf16", "bfloat16", True, TOKENS),
    Kind("fp16", "float16", True, FEWER_TOKENS),
    Kind("nvfp4", "nvfp4", True, POWERS),
    Kind("bf16, not prepacked", "bfloat16", False, UNPACKED_TOKENS),
)


@dataclass(frozen=True)
class Bounds:
    """Bytes and operations a second of this card, as measured."""

    read: float
    operations: float

    def microseconds(self, m: int, n: int, k: int) -> float:
        """Shortest time of a product."""
        return 1e6 * max(n * k * 9 / 16 / self.read, 2 * m * n * k / self.operations)


def measure_bounds() -> Bounds:
    """Reading 4 GB, and cuBLAS on 8192 x 8192 x 8192 random numbers."""
    size = 8192
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    seconds = statistics.median(device_times(lambda: torch.matmul(a, b, out=out), 20))
    return Bounds(read_bandwidth(), 2 * size**3 / seconds)


def compile_ahead(shapes: tuple[tuple[int, int], ...], kinds: tuple[Kind, ...]) -> None:
    """The Hopper kernels of all cases, in as many threads as there are cores."""
    target = device_target(0)
    if target.number != 90:
        return
    multiprocessors = device_attribute(_MULTIPROCESSORS, 0)
    specs = {
        choose_hopper(m, n, k, multiprocessors, nvfp4=kind.a_type == "nvfp4")[0]
        .for_product(m, n, k, multiprocessors)
        .spec("float16" if kind.a_type == "float16" else "bfloat16")
        for n, k in shapes
        for kind in kinds
        for m in kind.tokens
    }
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda spec: spec.compile(target.name), specs))


def call_by_call(product: Callable[[], object], twin: Callable[[], object]) -> float:
    """The ratio of both where their calls alternate."""
    own, reference = in_turns(product, twin, rounds=ALTERNATIONS, repeats=1, warmup=0)
    return round(statistics.median(reference) / statistics.median(own), 2)


def cases(n: int, k: int, kinds: tuple[Kind, ...], bounds: Bounds) -> Iterator[Row]:
    """Every m and kind of one weight; long products last, as clocks stay low for a while after them."""
    torch.manual_seed(0)
    quantized = fp4rt.quantize(torch.randn(n, k, device="cuda", dtype=torch.bfloat16), layout="128x4")
    prepacked = fp4rt.prepack(quantized)
    dense = fp4rt.dequantize(quantized, "bfloat16").t()
    for m in sorted({m for kind in kinds for m in kind.tokens}):
        for kind in kinds:
            if m in kind.tokens:
                yield one_case(kind, m, n, k, prepacked if kind.prepacked else quantized, dense, bounds)


def one_case(kind: Kind, m: int, n: int, k: int, weight: Any, dense: Any, bounds: Bounds) -> Row:
    """One product and its cuBLAS twin."""
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    dtype = "bfloat16" if kind.a_type == "nvfp4" else kind.a_type
    out, twin_out = (torch.empty(m, n, device="cuda", dtype=getattr(torch, each)) for each in (dtype, "bfloat16"))
    a = fp4rt.quantize(x) if kind.a_type == "nvfp4" else x.to(getattr(torch, kind.a_type))

    def product() -> None:
        fp4rt.matmul(a, weight, out_dtype=dtype, out=out)

    def twin() -> None:
        torch.matmul(x, dense, out=twin_out)

    product()
    twin()
    error = float((out.float() - twin_out.float()).norm() / twin_out.float().norm())
    limit = 0.2 if kind.a_type == "nvfp4" else 0.01  # NVFP4 activations differ from the bf16 ones of the twin
    if not error < limit:
        raise SystemExit(f"{kind.name} {m} x {n} x {k} is wrong: {error} from cuBLAS's product; nothing to measure")
    seconds, reference = both_times(product, twin)
    alternating = {"ratio_call_by_call": call_by_call(product, twin)} if m >= LONG_TOKENS else {}
    microseconds, spread = timing(seconds)
    explanation = fp4rt.explain(a, weight)
    return Row(
        bench="gemm",
        case=f"{kind.name}, m = {m}, {n} x {k}",
        time_us=microseconds,
        spread_us=spread,
        rate=2 * m * n * k / microseconds / 1e6,
        unit="TFLOP/s",
        percent_of_bound=100 * bounds.microseconds(m, n, k) / microseconds,
        bound="reading the weight or multiplying",
        ratio=1e6 * statistics.median(reference) / microseconds,
        reference=CUBLAS,
        notes={
            "kind": kind.name,
            "m": m,
            "n": n,
            "k": k,
            "gb_per_s": n * k * 9 / 16 / microseconds / 1e3,
            "cublas_us": 1e6 * statistics.median(reference),
            "bound_us": bounds.microseconds(m, n, k),
            "kernel": f"{explanation.kernel} {explanation.tile}",
            **alternating,
        },
    )


def measure(shapes: tuple[tuple[int, int], ...], kinds: tuple[Kind, ...]) -> list[Row]:
    """All rows, printed as they come; of one weight kind by kind."""
    compile_ahead(shapes, kinds)
    bounds = measure_bounds()
    print(f"reads {bounds.read / 1e9:.0f} GB/s, multiplies {bounds.operations / 1e12:.0f} TFLOP/s")
    rows: list[Row] = []
    names = [kind.name for kind in kinds]
    for n, k in shapes:
        time.sleep(REST_SECONDS)
        found = []
        for row in cases(n, k, kinds, bounds):
            print_row(row)
            found.append(row)
        rows += sorted(found, key=lambda row: names.index(str(row.notes["kind"])))
    return rows


def positive(text: str) -> int:
    """An argument that counts something."""
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one shape, few m; nothing is written then")
    parser.add_argument(
        "--shape",
        nargs=2,
        type=positive,
        action="append",
        metavar=("N", "K"),
        help="a weight to measure instead of the four; may be given several times, and nothing is written then",
    )
    parser.add_argument("--tokens", nargs="+", type=positive, metavar="M", help="these m; nothing is written then")
    parser.add_argument("--no-write", action="store_true", help="leave bench/results/ as it is")
    arguments = parser.parse_args()
    need_gpu()
    need("torch")
    shapes: tuple[tuple[int, int], ...] = SHAPES
    kinds: tuple[Kind, ...] = KINDS
    if arguments.quick:
        shapes = ((4096, 4096),)
        kinds = tuple(replace(kind, tokens=(1, 64)) for kind in kinds)
    if arguments.shape:
        shapes = tuple((n, k) for n, k in arguments.shape)
    if arguments.tokens:
        kinds = tuple(replace(kind, tokens=tuple(arguments.tokens)) for kind in kinds)
    rows = measure(shapes, kinds)
    if not (arguments.no_write or arguments.quick or arguments.shape or arguments.tokens):
        print(write_rows("gemm_cuda", rows))


if __name__ == "__main__":
    main()
