"""The folder of compiled kernels: used where it can be, and never a reason to fail."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fp4rt.cpu.kernels import compiled

WORK = """
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import numpy, fp4rt
    scales = numpy.array([[1, 2, 3]], numpy.uint8)
    codes, one = numpy.zeros((1, 24), numpy.uint8), numpy.ones(1, numpy.float32)
    q = fp4rt.QuantizedTensor(codes, scales, one, (1, 48), "linear")
    assert fp4rt.relayout(q, "8x4").scales.reshape(-1)[:4].tolist() == [1, 2, 3, 0]  # the kernel that compiles fastest
for warning in caught:
    print(warning.category.__name__, warning.message)
"""


def run(folder: Path) -> list[str]:
    """Warnings of a fresh process that works with this cache folder."""
    result = subprocess.run(
        [sys.executable, "-c", WORK],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "FP4RT_CACHE_DIR": str(folder)},
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def assert_one_warning(lines: list[str], folder: Path) -> None:
    assert len(lines) == 1, lines
    assert str(folder) in lines[0]
    assert "FP4RT_CACHE_DIR" in lines[0]


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    assert run(folder) == []
    return folder


def entries(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.nbc"))


def test_kernels_are_kept_and_found_again(filled: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in entries(filled)}
    assert before
    assert run(filled) == []
    assert {path: path.stat().st_mtime_ns for path in entries(filled)} == before


@pytest.mark.parametrize("suffix", ["nbc", "nbi"])
def test_a_truncated_entry_is_made_anew(filled: Path, suffix: str) -> None:
    damaged = sorted(filled.rglob(f"*.{suffix}"))
    assert damaged
    for path in damaged:
        path.write_bytes(path.read_bytes()[:100])
    assert run(filled) == []
    assert all(path.stat().st_size > 100 for path in filled.rglob("*.nb?"))
    assert run(filled) == []


def zeroed(data: bytes) -> bytes:
    """As a file looks whose page was not yet on the disk when the power went."""
    return data[:4096] + bytes(4096) + data[8192:]


def changed(data: bytes) -> bytes:
    code = data.index(b"\x7fELF") + 0x48  # behind the header of the object file
    return data[:code] + bytes([data[code] ^ 0x55]) + data[code + 1 :]


def cut_by_one(data: bytes) -> bytes:
    return data[:-1]


@pytest.mark.parametrize("damage", [zeroed, changed, cut_by_one])
def test_machine_code_that_was_damaged_on_the_disk_is_not_run(filled: Path, damage: Any) -> None:
    damaged = {path: damage(path.read_bytes()) for path in entries(filled)}
    assert damaged
    for path, data in damaged.items():
        path.write_bytes(data)
    assert run(filled) == []
    for path, data in damaged.items():
        assert path.read_bytes() != data


def test_a_file_where_the_folder_should_be_costs_one_warning(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    folder.write_text("not a folder")
    assert_one_warning(run(folder), folder)


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="needs a user whom file modes stop (not root)")
def test_a_read_only_folder_costs_one_warning(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o500)
    assert_one_warning(run(folder), folder)


def test_a_folder_that_cannot_be_made_costs_one_warning() -> None:
    folder = Path("/proc/no-such-place")
    if not folder.parent.is_dir():
        pytest.skip("needs /proc, where nobody can make a folder")
    assert_one_warning(run(folder), folder)


def test_the_digest_covers_every_file_that_kernels_take_constants_from() -> None:
    kernels, below = Path(compiled.__file__).parent, set()
    for path in kernels.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("fp4rt."):
                below.add(str(node.module).removeprefix("fp4rt."))
    below = {name for name in below if not name.startswith("cpu.kernels")} - {"cache_folder"}  # a place, no constant
    assert {f"{name}.py" for name in below} == set(compiled.BELOW)
