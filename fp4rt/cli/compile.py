"""``fp4rt compile``: build the CUDA kernels ahead of time; needs NVRTC, no GPU."""

from __future__ import annotations

import contextlib
import importlib
import time
from typing import Annotated

import typer

from fp4rt.cache_folder import cache_folder
from fp4rt.cli.console import add, failing, note, print_json, print_table, table, usage

__all__ = ["compile_kernels"]


@failing
def compile_kernels(
    arch: Annotated[
        list[str] | None, typer.Option("--arch", metavar="ARCH", help="Target, as sm_90a; several are allowed.")
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="List registers and spills of every kernel.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON.")] = False,
) -> None:
    """Compile every kernel into the cache folder, so that no first call waits. Default: all architectures."""
    targets = importlib.import_module("fp4rt.cuda.arch")
    compiler = importlib.import_module("fp4rt.cuda.compiler")
    kernel_set = importlib.import_module("fp4rt.cuda.kernel_set")
    supported, version = compiler.supported_archs(), compiler.nvrtc_version()
    with usage() if arch else contextlib.nullcontext():  # the default may be more than an old NVRTC knows
        chosen = [targets.parse_target(name, supported, version) for name in arch or targets.COMPILED_ARCHS]
    rows = []
    for target in chosen:
        started = time.monotonic()
        specs = kernel_set.kernels_for(target)
        for spec in specs:
            for resources in spec.compile(target.name, must_keep=True).resources():
                rows.append(
                    {
                        "arch": target.name,
                        "kernel": str(spec),
                        "entry": resources.entry,
                        "registers": resources.registers,
                        "spill_bytes": resources.spill_bytes,
                        "shared_bytes": resources.shared_bytes,
                    }
                )
        note(f"{target.name}: {len(specs)} kernels in {time.monotonic() - started:.1f} s, in {cache_folder()}")
    if as_json:
        print_json(rows)
    elif verbose:
        headings = ("registers", "spill_bytes", "shared_bytes")
        result = table("", [("arch", "left"), ("kernel", "left"), *((text, "right") for text in headings)])
        for row in rows:
            add(result, str(row["arch"]), str(row["kernel"]), *(str(row[heading]) for heading in headings))
        print_table(result)
