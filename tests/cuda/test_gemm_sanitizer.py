"""compute-sanitizer finds nothing in any product kernel: no access out of bounds, no race in shared memory."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

SCRIPT = Path(__file__).with_name("sanitized_products.py")


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_the_sanitizer_finds_nothing(tool):
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("needs compute-sanitizer on the PATH")
    plain = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True)  # compiles, and judges
    assert plain.returncode == 0, plain.stdout + plain.stderr
    command = [sanitizer, "--tool", tool, "--error-exitcode", "9", sys.executable, str(SCRIPT), "--unjudged"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert plain.stdout.strip() in done.stdout, done.stdout[-4000:]  # as many products
    summary = "ERROR SUMMARY: 0 errors" if tool == "memcheck" else "RACECHECK SUMMARY: 0 hazards"
    assert summary in done.stdout, done.stdout[-4000:]
