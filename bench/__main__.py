"""Runs every bench that this machine can run, one process each, and says which were left out and why.

python -m bench [NAME ...]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import fp4rt

__all__ = ["BENCHES", "SUPPORT", "Bench"]

# Modules that measure nothing by themselves.
SUPPORT = (
    "__init__",
    "__main__",
    "checkpoint_model",
    "device_time",
    "host_time",
    "make_tables",
    "needs",
    "plot_gemm",
    "rows",
)


@dataclass(frozen=True)
class Bench:
    """A script of this folder; ``on_gpu`` are its arguments where a GPU is usable."""

    name: str
    needs_gpu: bool = False
    on_gpu: tuple[str, ...] = ()


BENCHES = (
    Bench("cpu_quantize"),
    Bench("checkpoint_convert"),
    Bench("isolation", on_gpu=("--device", "cuda")),
    Bench("pool", on_gpu=("--device", "cuda")),
    Bench("quantize_cuda", needs_gpu=True),
    Bench("gemm", needs_gpu=True),
    Bench("gemm_models", needs_gpu=True),
    Bench("gemm_profile", needs_gpu=True),
    Bench("linear_backward", needs_gpu=True),
    Bench("host_cost_cuda", needs_gpu=True),
    Bench("host_cost_frameworks", needs_gpu=True),
)


def main() -> int:
    """Run those named, or all; 1 where one failed."""
    known = [bench.name for bench in BENCHES]
    parser = argparse.ArgumentParser(
        prog="python -m bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"all without one: {', '.join(known)}")
    names = parser.parse_args().names
    unknown = sorted(set(names) - set(known))
    if unknown:
        parser.error(f"no bench called {', '.join(unknown)}; there are {', '.join(known)}")
    cuda = fp4rt.backends()["cuda"]
    failed = []
    for bench in BENCHES:
        if names and bench.name not in names:
            continue
        if bench.needs_gpu and not cuda.usable:
            print(f"{bench.name}: left out, it needs a GPU: {cuda.reason}", flush=True)
            continue
        arguments = bench.on_gpu if cuda.usable else ()
        print(f"{bench.name}: python -m bench.{bench.name} {' '.join(arguments)}", flush=True)
        root = Path(__file__).resolve().parent.parent
        if subprocess.run([sys.executable, "-m", f"bench.{bench.name}", *arguments], cwd=root).returncode != 0:
            failed.append(bench.name)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
