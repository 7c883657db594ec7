"""``fp4rt doctor``: what is usable here, and why not."""

from __future__ import annotations

import importlib
import os
import platform
from importlib import metadata
from typing import Annotated, Any

import typer

import fp4rt
from fp4rt.cache_folder import CACHE_VARIABLE, cache_folder, why_unwritable
from fp4rt.cli.console import failing, print_json
from fp4rt.errors import Fp4rtError
from fp4rt.sources import kernels_root, source_names

__all__ = ["doctor"]

PACKAGES = (
    *("numpy", "ml_dtypes", "numba", "safetensors", "typer", "rich", "matplotlib"),
    *("cupy-cuda12x", "cupy-cuda13x", "nvidia-cuda-nvrtc-cu12", "nvidia-cuda-nvrtc", "torch", "jax"),
)


@failing
def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print the facts as JSON.")] = False) -> None:
    """Show which backends are usable here and, where one is not, why and what to do. Exit status 1 if none is."""
    backends = [status._asdict() for status in fp4rt.backends().values()]
    facts = {
        "fp4rt": fp4rt.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "packages": {name: version for name in PACKAGES if (version := _version(name)) is not None},
        "threads": _threads(),
        "cache folder": f"{cache_folder()} ({CACHE_VARIABLE} = {os.environ.get(CACHE_VARIABLE, 'unset')})",
        "cache writable": _writable(),
        "CUDA sources": _sources(),
        **_cuda(),
    }
    if as_json:
        print_json({"backends": backends, **facts})
    else:
        for backend in backends:
            devices = f" on {', '.join(backend['devices'])}" if backend["devices"] else ""
            print(f"{backend['name']}: {'usable' if backend['usable'] else 'not usable'}{devices}: {backend['reason']}")
        for name, value in facts.items():
            print(f"{name}: {_text(value)}")
    if not any(backend["usable"] for backend in backends):
        raise typer.Exit(1)


def _threads() -> str:
    from fp4rt.cpu.threads import THREADS_VARIABLE, thread_count  # numba comes with it

    try:
        return f"{thread_count()} ({THREADS_VARIABLE} = {os.environ.get(THREADS_VARIABLE, 'unset')})"
    except Fp4rtError as error:
        return str(error)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _writable() -> str:
    """Whether compiled code can be kept."""
    problem = why_unwritable()
    return "yes" if problem is None else f"no: {problem}; set {CACHE_VARIABLE} to a folder that can be written"


def _cuda() -> dict[str, str]:
    """Driver, NVRTC, headers and devices, or why nothing is known: this command never fails for what it asks about."""
    try:
        facts = importlib.import_module("fp4rt.cuda.status").describe()
    except Exception as error:
        return {"CUDA": f"not available: {' '.join(str(error).splitlines())}"}
    return {f"CUDA {name}": _text(value) for name, value in facts.items()}


def _text(value: Any) -> str:
    """A plain value on one line."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {_text(item)}" for key, item in value.items()) or "none"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_text, value)) or "none"
    return " ".join(str(value).splitlines())


def _sources() -> str:
    try:
        return f"{kernels_root()} ({len(source_names())} files)"
    except Fp4rtError as error:
        return str(error)
