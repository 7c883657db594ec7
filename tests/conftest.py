"""Skips the tests marked ``gpu`` where no CUDA device is usable, and says why; ``--require-gpu`` fails instead."""

from __future__ import annotations

import os

import pytest

MOST_PROCESSES_A_GPU = 4
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # JAX would take the GPU from the other processes

pytest_plugins = ["fp4rt.coverage.pytest_plugin"]  # an installed fp4rt brings it as an entry point


def _why_no_gpu() -> str | None:
    """Why no CUDA device is usable here, or None where one is."""
    try:
        import cupy
    except ImportError as error:
        return f"needs a CUDA device: cupy is not importable ({error})"
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"needs a CUDA device: {error}"
    return None if count else "needs a CUDA device: the driver lists none"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Processes of ``-n auto``: each has its own context on the GPU, if there is one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores if _why_no_gpu() else min(cores, MOST_PROCESSES_A_GPU)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--require-gpu", action="store_true", help="fail where no CUDA device is usable")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    required = config.getoption("--require-gpu")
    reason = _why_no_gpu() if gpu_items or required else None
    if reason is None:
        return
    if required:
        raise pytest.UsageError(reason)
    for item in gpu_items:
        item.add_marker(pytest.mark.skip(reason=reason))
