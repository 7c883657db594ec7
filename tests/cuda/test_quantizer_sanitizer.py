"""compute-sanitizer finds nothing in any quantizer kernel: no access out of bounds, no unset memory read, no race."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools.sanitize_cuda import TOOLS

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("tool", TOOLS)
def test_the_sanitizer_finds_nothing(tool):
    if shutil.which("compute-sanitizer") is None:
        pytest.skip("needs compute-sanitizer on the PATH")
    command = [sys.executable, "-m", "tools.sanitize_cuda", tool]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all clean" in done.stdout
