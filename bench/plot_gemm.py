"""Draws ``bench/results/gemm_cuda.jsonl``: time against m for each weight, with the bound and cuBLAS.

    python -m bench.plot_gemm [OUT.svg]

Needs matplotlib (``pip install 'fp4rt[plot]'``).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from bench.make_tables import load_rows
from bench.needs import need
from bench.rows import RESULTS

__all__ = ["draw", "lines_of"]

KIND_COLORS = {"bf16": "tab:blue", "nvfp4": "tab:green", "bf16, not prepacked": "tab:purple"}


def lines_of(rows: list[dict[str, Any]], n: int, k: int) -> dict[str, list[tuple[int, float]]]:
    """Name of a line to its (m, microseconds), for one weight."""
    found: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        notes = row["notes"]
        if (notes["n"], notes["k"]) != (n, k):
            continue
        found.setdefault(notes["kind"], []).append((notes["m"], row["time_us"]))
        if notes["kind"] == "bf16":
            found.setdefault("cuBLAS bf16", []).append((notes["m"], notes["cublas_us"]))
            found.setdefault("bound", []).append((notes["m"], notes["bound_us"]))
    return {name: sorted(points) for name, points in found.items()}


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """One panel a weight, both axes logarithmic."""
    from matplotlib.figure import Figure

    weights = list(dict.fromkeys((row["notes"]["n"], row["notes"]["k"]) for row in rows))
    figure = Figure(figsize=(4 * len(weights), 4), layout="constrained")
    for panel, (n, k) in zip(figure.subplots(1, len(weights), squeeze=False)[0], weights, strict=True):
        for name, points in lines_of(rows, n, k).items():
            m, microseconds = zip(*points, strict=True)
            if name == "bound":
                panel.plot(m, microseconds, color="black", linestyle=":", label=name)
            elif name == "cuBLAS bf16":
                panel.plot(m, microseconds, color="tab:orange", marker="s", markersize=3, label=name)
            elif name in KIND_COLORS:
                panel.plot(m, microseconds, color=KIND_COLORS[name], marker="o", markersize=3, label=name)
        panel.set(xscale="log", yscale="log", xlabel="m", ylabel="time, us", title=f"{n} x {k}")
        panel.grid(alpha=0.3)
    figure.axes[0].legend()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?", metavar="OUT.svg", default=RESULTS / "gemm_cuda.svg")
    arguments = parser.parse_args()
    need("matplotlib")
    draw(load_rows("gemm_cuda"), arguments.out)


if __name__ == "__main__":
    main()
