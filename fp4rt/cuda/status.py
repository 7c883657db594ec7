"""What of CUDA is usable here and, where something is not, why: for ``fp4rt.backends()`` and ``fp4rt doctor``.

Nothing here raises, compiles or creates a CUDA context.
"""

from __future__ import annotations

from typing import Any

from fp4rt.backend import BackendStatus
from fp4rt.cuda.arch import Target, choose_target
from fp4rt.cuda.compiler import nvrtc_version, supported_archs, system_headers_of
from fp4rt.cuda.kernel import device_capability
from fp4rt.errors import Fp4rtError

__all__ = ["describe", "status"]

_INSTALL = "pip install 'fp4rt[cuda12]' or 'fp4rt[cuda13]'"


def status() -> BackendStatus:
    """Whether the CUDA backend can run here."""
    try:
        import cupy
    except Exception as error:  # what an import of CuPy raises depends on what is broken
        return BackendStatus("cuda", False, f"CuPy cannot be imported ({error}); {_INSTALL}")
    runtime = cupy.cuda.runtime
    try:
        count = runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:  # cudaErrorInsufficientDriver, cudaErrorNoDevice, ...
        return BackendStatus("cuda", False, f"no usable CUDA driver or device: {error}; host arrays run on the CPU")
    if count == 0:
        return BackendStatus("cuda", False, "the CUDA driver lists no device; host arrays run on the CPU")
    usable, reasons = [], []
    for index in range(count):
        try:
            usable.append(f"cuda:{index}")
            reasons.append(f"cuda:{index} {_target(index).name}")
        except Fp4rtError as error:
            usable.pop()
            reasons.append(f"cuda:{index}: {error}")
    return BackendStatus("cuda", bool(usable), "; ".join(reasons), tuple(usable))


def describe() -> dict[str, Any]:
    """Driver, NVRTC, headers and devices, as plain values; a part that is missing says why.

    Returns:
        ``driver``, ``runtime``, ``cupy``, ``nvrtc``: versions, or the reason that there is none. ``archs``: numbers
        that NVRTC compiles for. ``headers``: toolkit headers that the kernels include. ``devices``: per device its
        name, target and the kernels built for it. ``warnings``: what works here and may not elsewhere, with the remedy.
    """
    return {
        **_versions(),
        "headers": sorted({h for spec in _all_specs() for h in system_headers_of(spec.source)}) or "none needed",
        "devices": _devices(),
        "warnings": _warnings(),
    }


def _target(index: int) -> Target:
    return choose_target(device_capability(index), supported_archs(), nvrtc_version())


def _versions() -> dict[str, Any]:
    found: dict[str, Any] = {}
    try:
        found["nvrtc"] = ".".join(map(str, nvrtc_version()))
        found["archs"] = list(supported_archs())
    except Fp4rtError as error:
        found["nvrtc"], found["archs"] = str(error), []
    try:
        import cupy
    except Exception as error:  # what an import of CuPy raises depends on what is broken
        return {"driver": "unknown without CuPy", "runtime": "unknown", "cupy": f"{error}; {_INSTALL}", **found}
    runtime = cupy.cuda.runtime
    try:
        number = runtime.driverGetVersion()
        found["driver"] = f"CUDA {number // 1000}.{number % 1000 // 10}" if number else "none installed"
    except runtime.CUDARuntimeError as error:
        found["driver"] = str(error)
    number = runtime.runtimeGetVersion()
    found["runtime"], found["cupy"] = f"CUDA {number // 1000}.{number % 1000 // 10}", cupy.__version__
    return found


def _warnings() -> list[str]:
    """CuPy loads the newest NVRTC among the wheels, whoever brought it and whatever CUDA CuPy is built for."""
    try:
        import cupy

        (major, minor), runtime = nvrtc_version(), cupy.cuda.runtime.runtimeGetVersion() // 1000
    except Exception:  # as above
        return []
    if major == runtime:
        return []
    return [
        f"NVRTC {major}.{minor} compiles and CuPy runs on CUDA {runtime}: a driver older than CUDA {major} may refuse "
        f"the kernels; another package, such as PyTorch, has brought this NVRTC: install that package for CUDA "
        f"{runtime}, or pip uninstall cupy-cuda{runtime}x and pip install 'fp4rt[cuda{major}]'"
    ]


def _devices() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for name in status().devices:
        index = int(name.partition(":")[2])
        target = _target(index)
        specs = _all_specs()
        found.append(
            {
                "device": name,
                "name": _device_name(index),
                "target": target.name,
                "kernels": {str(spec): spec.built_for(target) for spec in specs},
            }
        )
    return found


def _device_name(index: int) -> str:
    import cupy

    name = cupy.cuda.runtime.getDeviceProperties(index)["name"]
    return name.decode() if isinstance(name, bytes) else str(name)


def _all_specs() -> tuple[Any, ...]:
    from fp4rt.cuda.kernel_set import all_kernels

    return all_kernels()
