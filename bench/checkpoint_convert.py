"""Checkpoint conversion: speed and peak memory beside a copy of the same bytes through safetensors on the same disk.

    python -m bench.checkpoint_convert [MODEL] [--work FOLDER] [--gigabytes 4.2] [--jobs 2] [--case quantize ...]

MODEL is a checkpoint; without it one is made (``bench.checkpoint_model``). Every case runs in a process of its own, so
that its peak memory is its own. Both sides end with the data on the disk (fsync). The copy is that of the larger of
what a case reads and what it writes, and ``rate`` counts those bytes; ``ratio`` is the time of the copy over the own
time: 1.0 means as fast as copying. ``notes`` hold processor seconds and peak memory of both.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.checkpoint_model import POOL, Size, tensors, write_model
from bench.needs import need
from bench.rows import Row, print_row, write_rows

MEGABYTE = 1e6
CASES = ("quantize", "to compressed-tensors", "to comfy", "to modelopt", "dequantize")


def copy_folder(source: Path, target: Path) -> None:
    """What is compared with: every shard loaded and saved by safetensors, then synced."""
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    target.mkdir()
    for shard in sorted(source.glob("*.safetensors")):
        with safe_open(shard, "pt") as file:
            metadata = file.metadata()
        save_file(load_file(shard), target / shard.name, metadata)
        descriptor = os.open(target / shard.name, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def run_case(case: str, source: Path, target: Path, jobs: int) -> None:
    """One case, in this process; prints seconds, peak memory and bytes written as JSON."""
    from fp4rt import checkpoint

    if case == "copy":
        import safetensors.torch  # noqa: F401  not part of the copy

    started, cpu = time.perf_counter(), time.process_time()
    if case == "copy":
        copy_folder(source, target)
    elif case == "quantize":
        checkpoint.quantize(source, target, jobs=jobs)
    elif case == "dequantize":
        checkpoint.dequantize(source, target, "bf16", jobs=jobs)
    else:
        checkpoint.convert(source, target, case.removeprefix("to "), jobs=jobs)
    seconds = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    cpu = time.process_time() - cpu
    print(json.dumps({"seconds": seconds, "cpu": cpu, "peak": peak, "written": folder_bytes(target)}))


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*.safetensors"))


def measure(case: str, source: Path, target: Path, jobs: int) -> dict[str, float]:
    """One case in a process of its own."""
    shutil.rmtree(target, ignore_errors=True)
    command = [sys.executable, "-m", "bench.checkpoint_convert", "--one", case, str(source), str(target), str(jobs)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def largest_tensor(model: Path) -> int:
    from fp4rt import checkpoint

    with checkpoint.open(model) as opened:
        return max(array.nbytes for array in opened.values())


def main() -> None:
    if sys.argv[1:2] == ["--one"]:
        run_case(sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]), int(sys.argv[5]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--work", type=Path, help="folder for results; a temporary one by default")
    parser.add_argument("--gigabytes", type=float, default=4.2)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--case", action="append", choices=CASES)
    parser.add_argument("--name", default="checkpoint_convert")
    arguments = parser.parse_args()
    need("torch")  # safetensors copies through it
    with tempfile.TemporaryDirectory(dir=arguments.work) as folder:
        work = Path(folder)
        model = arguments.model or make_model(work / "model", arguments.gigabytes)
        rows = []
        source = model
        for case in CASES:
            target = work / case.replace(" ", "-")
            result = measure(case, source, target, arguments.jobs)
            if arguments.case is None or case in arguments.case:
                larger = max(source, target, key=folder_bytes)
                reference = measure("copy", larger, work / "copy", 1)
                shutil.rmtree(work / "copy")
                rows.append(make_row(case, source, larger, result, reference))
                print_row(rows[-1])
            if source != model:
                shutil.rmtree(source)
            source = target
    write_rows(arguments.name, rows)


def make_model(folder: Path, gigabytes: float) -> Path:
    layers = 2
    while sum(spec.nbytes for spec in tensors(Size(layers))) < gigabytes * 1e9:
        layers += 1
    return write_model(folder, Size(layers), 5, POOL)


def make_row(case: str, source: Path, larger: Path, result: dict[str, float], reference: dict[str, float]) -> Row:
    nbytes = folder_bytes(larger)
    return Row(
        "checkpoint",
        f"{case}, {folder_bytes(source) / 1e9:.2f} -> {result['written'] / 1e9:.2f} GB",
        result["seconds"] * 1e6,
        0.0,
        rate=nbytes / result["seconds"] / MEGABYTE,
        unit="MB/s",
        ratio=reference["seconds"] / result["seconds"],
        reference="safetensors copy of the same bytes",
        notes={
            "cpu_s": round(result["cpu"], 1),
            "copy_cpu_s": round(reference["cpu"], 1),
            "peak_MB": round(result["peak"] / MEGABYTE),
            "copy_peak_MB": round(reference["peak"] / MEGABYTE),
            "largest_tensor_MB": round(largest_tensor(source) / MEGABYTE),
            "copy_MB_per_s": round(nbytes / reference["seconds"] / MEGABYTE),
        },
    )


if __name__ == "__main__":
    main()
