"""What a type checker sees of the package."""

from __future__ import annotations

import os

import pytest

api = pytest.importorskip("mypy.api", reason="needs mypy (the dev extra)")

PROGRAM = """
import fp4rt, fp4rt.compat
fp4rt.quantise()
fp4rt.compat.nothing
fp4rt.checkpoint.opens
fp4rt.quantize, fp4rt.PaddedPool, fp4rt.checkpoint.open, fp4rt.compat.vllm, fp4rt.errors.ShapeError
"""


def test_a_misspelt_name_is_found(tmp_path):
    options = ["--config-file", os.devnull, "--cache-dir", str(tmp_path), "--follow-imports=silent"]
    said, _, status = api.run([*options, "--ignore-missing-imports", "-c", PROGRAM])
    assert status == 1
    found = [line.split('"')[1] for line in said.splitlines() if "error:" in line]
    assert found == ["quantise", "nothing", "opens"]
