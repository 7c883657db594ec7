"""A bench's help needs none of the packages that it measures; a run without them says in one line what to install."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted(path.stem for path in (ROOT / "bench").glob("*.py") if "__main__" in path.read_text(encoding="utf-8"))
WITHOUT = """
import runpy, sys
missing, name, *sys.argv[1:] = sys.argv[1:]
sys.modules.update(dict.fromkeys(missing.split(",")))
runpy.run_module(f"bench.{name}", run_name="__main__", alter_sys=True)
"""


def run_without(missing: str, *arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """A bench where importing some modules fails."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", WITHOUT, missing, *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_needs_no_package_and_writes_no_file(name, tmp_path):
    done = run_without("torch,cupy,jax,matplotlib", name, "--help", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: ")
    assert list(tmp_path.iterdir()) == []


CUPY = "this bench needs a GPU: CuPy cannot be imported", "pip install 'fp4rt[cuda12]' or 'fp4rt[cuda13]'"
TORCH = "this bench needs torch: ", "pip install 'fp4rt[torch]'"
MATPLOTLIB = "this bench needs matplotlib: ", "pip install 'fp4rt[plot]'"


@pytest.mark.parametrize(
    "missing, command, said",
    [
        ("torch", ("cpu_quantize",), TORCH),
        ("torch", ("checkpoint_convert",), TORCH),
        ("matplotlib", ("plot_gemm",), MATPLOTLIB),
        ("cupy", ("gemm",), CUPY),
        ("cupy", ("gemm_models",), CUPY),
        ("cupy", ("gemm_profile",), CUPY),
        ("cupy", ("host_cost_cuda",), CUPY),
        ("cupy", ("host_cost_frameworks",), CUPY),
        ("cupy", ("isolation", "--device", "cuda"), CUPY),
        ("cupy", ("linear_backward",), CUPY),
        ("cupy", ("pool", "--device", "cuda"), CUPY),
        ("cupy", ("quantize_cuda",), CUPY),
    ],
)
def test_a_run_without_a_package_says_in_one_line_what_to_install(missing, command, said):
    done = run_without(missing, *command)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith(said[0])
    assert done.stderr.rstrip().endswith(said[1])
