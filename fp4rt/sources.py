"""Where the CUDA sources are: beside the package in a checkout, inside it in an installed wheel.

``kernels_src/`` stands beside ``fp4rt/`` in the repository and in the sdist (so an editable install finds it there);
the wheel carries it as ``fp4rt/kernels_src/``. Names are relative to it: ``"kernels/quantize.cu"``.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from fp4rt.errors import CompileError

__all__ = ["SOURCE_SUFFIXES", "kernels_root", "read_source", "source_names"]

SOURCE_SUFFIXES = (".cu", ".cuh", ".h", ".inc")


@cache
def kernels_root() -> Path:
    """The folder ``kernels_src``.

    Raises:
        CompileError: neither place has it; names both and the remedy.
    """
    package = Path(__file__).resolve().parent
    installed, checkout = package / "kernels_src", package.parent / "kernels_src"
    for folder in (installed, checkout):
        if folder.is_dir():
            return folder
    raise CompileError(
        f"the CUDA sources are missing: looked for {installed} (wheel) and {checkout} (checkout); reinstall fp4rt"
    )


@cache
def source_names() -> tuple[str, ...]:
    """Every source and header, sorted, relative to :func:`kernels_root`."""
    root = kernels_root()
    return tuple(sorted(p.relative_to(root).as_posix() for p in root.rglob("*") if p.suffix in SOURCE_SUFFIXES))


@cache
def read_source(name: str) -> str:
    """Text of one source or header, e.g. ``"num/e4m3.cuh"``.

    Raises:
        CompileError: there is no such file; names it and what there is.
    """
    path = kernels_root() / name
    if name not in source_names():
        raise CompileError(f"no CUDA source {name!r} in {path.parent}; there are: {', '.join(source_names())}")
    return path.read_text(encoding="utf-8")
