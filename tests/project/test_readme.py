"""The README is true: its example runs, its commands exist and run, its tables are made from the results."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def shell_commands() -> list[list[str]]:
    lines = [line for block in blocks("sh") for line in block.splitlines()]
    return [words for words in (shlex.split(line, comments=True) for line in lines) if words]


def table_rows(heading: str) -> list[list[str]]:
    section = README.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line.startswith("|")
    ]
    return rows[2:]


def run_python(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "120"}
    return subprocess.run([sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True)


def test_python_example_runs(tmp_path):
    for block in blocks("python"):
        done = run_python("-c", block, cwd=tmp_path)
        assert done.returncode == 0, done.stderr


def test_python_example_fits_in_ten_lines():
    code = [line for line in blocks("python")[0].splitlines() if line.strip()]
    assert len(code) <= 10


def test_every_make_command_has_a_target():
    in_table = [shlex.split(cell.strip("`")) for row in table_rows("Commands") for cell in row[:1]]
    targets = {words[1] for words in [*shell_commands(), *in_table] if words[0] == "make"}
    assert {"demo", "test", "test-gpu", "bench", "tables", "lint"} <= targets
    for target in sorted(targets):
        done = subprocess.run(["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_every_fp4rt_command_line_runs(tmp_path):
    rng = np.random.default_rng(0)
    layer = {"layer.weight": rng.standard_normal((64, 128), np.float32), "layer.bias": np.zeros(64, np.float32)}
    (tmp_path / "model").mkdir()
    save_file(layer, tmp_path / "model" / "model.safetensors")
    commands = [words[1:] for words in shell_commands() if words[0] == "fp4rt"]
    assert len(commands) >= 3
    for arguments in commands:
        done = run_python("-m", "fp4rt", *arguments, cwd=tmp_path)
        assert done.returncode == 0, f"fp4rt {shlex.join(arguments)}\n{done.stdout}\n{done.stderr}"


def test_table_of_commands_names_every_subcommand(tmp_path):
    done = run_python("-m", "fp4rt", "--help", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    listed = {row[0].strip("`").split()[1] for row in table_rows("Commands") if row[0].startswith("`fp4rt ")}
    offered = set(re.findall(r"^\W*([a-z][\w-]*)\s{2,}", done.stdout.split("Commands", 1)[1], re.MULTILINE))
    assert listed == offered


def test_table_of_environment_variables_is_complete():
    listed = {name for row in table_rows("Environment variables") for name in re.findall(r"`([A-Z0-9_]+)`", row[0])}
    read = set()
    for path in (ROOT / "fp4rt").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        read |= set(re.findall(r"environ(?:\.get\(|\[)\s*\"([A-Z0-9_]+)\"", text))
        read |= set(re.findall(r"_VARIABLE\s*=\s*\"([A-Z0-9_]+)\"", text))
        read |= set(re.findall(r"[\"'`](FP4RT_[A-Z0-9_]+)[\"'`]", text))
    assert read <= listed


def test_map_names_every_room():
    fence = next(block for block in blocks("text") if block.startswith("fp4rt/"))
    for room in sorted((ROOT / "fp4rt").iterdir()):
        name = room.name
        if name in ("__init__.py", "__pycache__", "py.typed", "kernels_src"):
            continue
        assert re.search(rf"(?<![\w.]){re.escape(name)}(?![\w.])", fence), f"{name} is missing from the map"
    for folder in sorted(path for path in (ROOT / "kernels_src").iterdir() if path.is_dir()):
        assert f"  {folder.name}/" in fence, f"kernels_src/{folder.name} is missing from the map"
    for folder in ("bench", "examples", "tests", "tools"):
        assert f"\n{folder}/" in fence, f"{folder} is missing from the map"


def test_performance_tables_are_those_of_the_results():
    done = run_python("-m", "bench.make_tables", "--check", cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_links_lead_to_files():
    targets = set(re.findall(r"\]\(([^)#:]+)\)", README))
    assert [target for target in sorted(targets) if not (ROOT / target).exists()] == []
