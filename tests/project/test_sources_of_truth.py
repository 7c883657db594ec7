"""What is said once stays said once: constants, index arithmetic; and nothing in the tree speaks of one machine."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

from fp4rt import format as fmt

ROOT = Path(__file__).resolve().parents[2]
TEXT_SUFFIXES = {
    ".py",
    ".cu",
    ".cuh",
    ".h",
    ".md",
    ".toml",
    ".txt",
    ".json",
    ".jsonl",
    ".yaml",
    ".yml",
    ".sh",
    ".cfg",
    ".ini",
    "",
}
SKIPPED_FOLDERS = {
    ".git",
    ".venv",
    "build",
    "dist",
    "out",
    "__pycache__",
    ".mypy_cache",
    ".pytest_cache",
    ".ruff_cache",
    ".hypothesis",
}

# Numbers that belong to fp4rt/format.py; elsewhere they are imported by name.
CONSTANTS = {fmt.AMAX_TARGET, fmt.E4M3_MAX, fmt.R6_BITS, float(fmt.R6)}
# The generated header says them in C; everything else in kernels_src includes it.
GENERATED_HEADER_FOLDER = "num"


def tree_files() -> list[Path]:
    """The files of the repository; in an unpacked sdist, where there is no git, whatever lies in the folder."""
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listing.returncode == 0 and listing.stdout:
        paths = [ROOT / name for name in listing.stdout.split("\0") if name]
    else:
        paths = [p for p in ROOT.rglob("*") if not SKIPPED_FOLDERS & set(p.relative_to(ROOT).parts)]
    return sorted(path for path in paths if path.is_file())


def numbers_in(path: Path) -> list[tuple[int, float]]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [
        (node.lineno, node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)) and not isinstance(node.value, bool)
    ]


def test_constants_of_the_format_are_written_once_in_python():
    again = [
        f"{path.relative_to(ROOT)}:{line} writes {value}"
        for path in sorted((ROOT / "fp4rt").rglob("*.py"))
        if path.name != "format.py"
        for line, value in numbers_in(path)
        if value in CONSTANTS
    ]
    assert again == []


def test_constants_of_the_format_are_written_once_in_the_kernels():
    spellings = re.compile(r"(?<![\w.])(?:448(?:\.0*)?f?|2688(?:\.0*)?f?|0x3[eE]2[aA]{4}[bB]u?)(?![\w.])")
    again = []
    for path in sorted((ROOT / "kernels_src").rglob("*")):
        if path.suffix not in (".cu", ".cuh", ".h") or path.parent.name == GENERATED_HEADER_FOLDER:
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            code = line.split("//")[0]
            if spellings.search(code):
                again.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert again == []


# (r % 32) * 16 and (r / 128) ... * 512: the heart of the 128x4 index; (r / 8) ... * 32: that of 8x4.
INDEX_ARITHMETIC = re.compile(r"%\s*32\)?\s*\*\s*16\b|//?\s*128\b[^;\n]*\*\s*512\b|//?\s*8\)[^;\n]*\*\s*32\b")


@pytest.mark.parametrize("folder, home", [("fp4rt", "layout.py"), ("kernels_src", "layout")])
def test_scale_index_arithmetic_lives_in_one_place(folder, home):
    elsewhere = []
    for path in sorted((ROOT / folder).rglob("*")):
        if path.suffix not in (".py", ".cu", ".cuh", ".h") or home in path.relative_to(ROOT).parts:
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            code = line.split("#")[0] if path.suffix == ".py" else line.split("//")[0]
            if INDEX_ARITHMETIC.search(code):
                elsewhere.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert elsewhere == []


@pytest.mark.parametrize(
    "line", ["((r / 128) * C4 + c / 4) * 512", "(r % 32) * 16", "((r // 8) * tiles + c // 4) * 32"]
)
def test_index_arithmetic_is_recognized(line):
    assert INDEX_ARITHMETIC.search(line)


def test_no_file_names_a_folder_of_somebodys_machine():
    homes = "|".join(["home", "root", "work", "farm", "Users"])
    machine_path = re.compile(rf"(?<![\w.~}})$*\]/-])/(?:{homes})/[\w.]")
    found = []
    for path in tree_files():
        if path.suffix not in TEXT_SUFFIXES:
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
            if machine_path.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:120]}")
    assert found == []


def test_every_python_file_says_what_it_is_for():
    silent = [
        str(path.relative_to(ROOT))
        for path in tree_files()
        if path.suffix == ".py"
        and path.stat().st_size
        and not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert silent == []
