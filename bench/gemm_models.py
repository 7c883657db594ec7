"""Products with the weights of real models, measured as bench.gemm measures its four sizes; fewer m.

    python -m bench.gemm_models [--no-write]

Layers that read the same input are one weight, as serving engines join them: "qkv", "gate and up". "1/8" is one of
eight parts of a layer, as tensor parallelism cuts it.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from bench.gemm import KINDS, measure
from bench.needs import need, need_gpu
from bench.rows import write_rows

WEIGHTS = {
    (6144, 4096): "Llama 3.1 8B qkv",
    (28672, 4096): "Llama 3.1 8B gate and up",
    (4096, 14336): "Llama 3.1 8B down",
    (128256, 4096): "Llama 3.1 8B head",
    (1280, 8192): "Llama 3.1 70B qkv, 1/8",
    (7168, 8192): "Llama 3.1 70B gate and up, 1/8",
    (8192, 3584): "Llama 3.1 70B down, 1/8",
    (10240, 5120): "Qwen3 32B qkv",
    (5120, 8192): "Qwen3 32B o",
    (51200, 5120): "Qwen3 32B gate and up",
    (5120, 25600): "Qwen3 32B down",
    (5760, 2880): "gpt-oss 20B expert, gate and up",
    (2880, 2880): "gpt-oss 20B expert, down",
    (2112, 7168): "DeepSeek V3 q and kv, down",
    (4096, 7168): "DeepSeek V3 expert, gate and up",
    (7168, 2048): "DeepSeek V3 expert, down",
}
TOKENS = {"bf16": (1, 16, 64, 256, 1024, 4096), "nvfp4": (1, 64, 1024)}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-write", action="store_true", help="leave bench/results/ as it is")
    arguments = parser.parse_args()
    need_gpu()
    need("torch")
    kinds = tuple(replace(kind, tokens=TOKENS[kind.name]) for kind in KINDS if kind.name in TOKENS)
    names = {f"{n} x {k}": f"{name}, {n} x {k}" for (n, k), name in WEIGHTS.items()}
    rows = [
        replace(row, bench="gemm_models", notes={"weight": names[row.case.split(", ")[-1]], **row.notes})
        for row in measure(tuple(WEIGHTS), kinds)
    ]
    if not arguments.no_write:
        print(write_rows("gemm_models_cuda", rows))


if __name__ == "__main__":
    main()
