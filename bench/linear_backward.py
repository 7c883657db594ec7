"""A frozen layer's forward and backward pass in PyTorch: ``NVFP4Linear`` beside ``nn.Linear`` in bf16.

    python -m bench.linear_backward [--out FOLDER]

What trains is elsewhere, as with adapters: gradients of x alone are computed. The backward pass makes the weight anew
in bf16 and multiplies with cuBLAS. Both passes are captured in CUDA graphs (``torch.cuda.make_graphed_callables``), so
that the device's time shows; ``eager_us`` and ``eager_bf16_us`` in the notes are those of plain calls, in which few
tokens wait for the host. Each is measured in turns with the other, L2 emptied before.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.device_time import both_times, device_times
from bench.needs import need, need_gpu, optional
from bench.rows import RESULTS, Row, print_row, timing, write_rows

torch = optional("torch")

SHAPES = ((4096, 4096), (8192, 8192), (28672, 8192))
TOKENS = (1024, 4096)
REFERENCE = "nn.Linear bf16"


def step_of(layer: Any, x: Any, gradient: Any) -> Callable[[], None]:
    """One forward and backward pass."""

    def step() -> None:
        x.grad = None
        layer(x).backward(gradient)

    return step


def one_row(m: int, n: int, k: int) -> Row:
    """One shape."""
    import fp4rt.torch

    torch.manual_seed(0)
    twin = torch.nn.Linear(k, n, bias=False, device="cuda", dtype=torch.bfloat16).requires_grad_(False)
    layer = fp4rt.torch.NVFP4Linear.from_linear(twin).prepack()
    twin.weight.copy_(layer.weight().dequantize("bfloat16"))
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.randn(m, n, device="cuda", dtype=torch.bfloat16)
    own, other = step_of(layer, x, gradient), step_of(twin, x, gradient)
    other()
    expected = x.grad
    own()
    if not torch.equal(x.grad, expected):
        raise SystemExit(f"the gradient of {m} x {n} x {k} is wrong; nothing to measure")
    eager = [1e6 * statistics.median(device_times(step, 20)) for step in (own, other)]
    sample = x.detach().clone().requires_grad_()
    graphs = torch.cuda.make_graphed_callables((layer, twin), ((sample,), (sample,)))
    own, other = (step_of(graph, x, gradient) for graph in graphs)
    seconds, reference = both_times(own, other)
    microseconds, spread = timing(seconds)
    kept = sum(part.numel() * part.element_size() for part in layer.buffers())
    return Row(
        bench="linear_backward",
        case=f"forward and backward in a graph, m = {m}, {n} x {k}",
        time_us=microseconds,
        spread_us=spread,
        rate=4 * m * n * k / microseconds / 1e6,
        unit="TFLOP/s",
        ratio=1e6 * statistics.median(reference) / microseconds,
        reference=REFERENCE,
        notes={
            "weight_mb": round(kept / 1e6, 1),
            "bf16_weight_mb": round(n * k * 2 / 1e6, 1),
            "eager_us": round(eager[0], 1),
            "eager_bf16_us": round(eager[1], 1),
        },
    )


def main() -> None:
    """Measure and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    need_gpu()
    need("torch")
    rows = []
    for n, k in SHAPES:
        for m in TOKENS:
            rows.append(one_row(m, n, k))
            print_row(rows[-1])
    print(write_rows("linear_backward", rows, arguments.out))


if __name__ == "__main__":
    main()
