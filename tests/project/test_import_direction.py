"""Imports point only down: every ``import`` of the package and every ``#include`` of the kernels is checked."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "fp4rt"
KERNELS = ROOT / "kernels_src"

# Rooms of the package from the ground up; a room may import from lower levels and from itself, not from its neighbours.
LEVELS = (
    ("errors", "version", "cache_folder"),
    ("format", "fp32", "device"),
    ("layout", "sources"),
    ("interop", "pool"),
    ("backend", "tensor_checks"),
    ("tensor",),
    ("prepacked", "coverage"),
    ("cpu", "cuda"),
    ("arguments",),
    ("api",),
    ("checkpoint",),
    ("torch", "jax"),
    ("compat",),
    ("cli",),
    ("__main__",),
)
LEVEL_OF = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}
# The objects' own methods (q.dequantize, q.relayout) call api when they are called; nothing goes upward at import time.
ALLOWED_UPWARD = {("tensor", "api"), ("prepacked", "api")}

# What a room may import from outside the standard library, beside numpy and ml_dtypes.
THIRD_PARTY = {
    "cpu": {"numba"},
    "cuda": {"cupy", "cupy_backends", "cuda"},
    "checkpoint": {"safetensors", "tomli", "tomllib"},  # tomllib is the standard library's from 3.11 on
    "compat": {"torch"},
    "torch": {"torch"},
    "jax": {"jax", "jaxlib"},
    "coverage": {"pytest"},
    "cli": {"typer", "click", "rich", "matplotlib"},
}
EVERYWHERE = {"numpy", "ml_dtypes"}

INCLUDE_LEVELS = (("num",), ("ptx",), ("layout",), ("mma",), ("block",), ("kernels",))
INCLUDE_LEVEL_OF = {room: level for level, rooms in enumerate(INCLUDE_LEVELS) for room in rooms}


def python_files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def room_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[0]


def imported_modules(path: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import but those for type checkers; ``from fp4rt import x`` gives ``fp4rt.x``."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    type_checking = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if id(node) in type_checking:
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import; write the absolute name"
            assert node.module is not None
            if node.module == "fp4rt":
                yield from ((node.lineno, f"fp4rt.{alias.name}") for alias in node.names)
            else:
                yield node.lineno, node.module


def test_every_room_of_the_package_has_a_level():
    rooms = {room_of(path) for path in python_files()} - {"__init__"}
    assert rooms - set(LEVEL_OF) == set()


def test_imports_of_the_package_point_only_down():
    upward = []
    for path in python_files():
        room = room_of(path)
        if room == "__init__":  # lazy exports: its names are imported when they are used
            continue
        for line, name in imported_modules(path):
            if not name.startswith("fp4rt."):
                continue
            target = name.split(".")[1]
            if target == room or target.startswith("__"):
                continue
            if LEVEL_OF[target] >= LEVEL_OF[room] and (room, target) not in ALLOWED_UPWARD:
                upward.append(f"{path.relative_to(ROOT)}:{line} imports fp4rt.{target}")
    assert upward == []


def test_third_party_packages_stay_in_their_rooms():
    strangers = []
    for path in python_files():
        allowed = EVERYWHERE | THIRD_PARTY.get(room_of(path), set())
        for line, name in imported_modules(path):
            package = name.split(".")[0]
            if package != "fp4rt" and package not in sys.stdlib_module_names and package not in allowed:
                strangers.append(f"{path.relative_to(ROOT)}:{line} imports {package}")
    assert strangers == []


def test_the_package_module_imports_only_the_version():
    names = {name for _, name in imported_modules(PACKAGE / "__init__.py") if name.startswith("fp4rt")}
    assert names == {"fp4rt.version"}


def included_files(path: Path) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        match = re.match(r'\s*#\s*include\s+"([^"]+)"', line)
        if match:
            yield number, match[1]


def kernel_files() -> list[Path]:
    return sorted(path for path in KERNELS.rglob("*") if path.suffix in (".cu", ".cuh", ".h"))


def test_includes_of_the_kernels_point_only_down():
    upward = []
    for path in kernel_files():
        room = path.relative_to(KERNELS).parts[0]
        for line, name in included_files(path):
            target = name.split("/")[0]
            assert (KERNELS / name).is_file(), f"{path.relative_to(ROOT)}:{line} includes {name}, which does not exist"
            if target != room and INCLUDE_LEVEL_OF[target] >= INCLUDE_LEVEL_OF[room]:
                upward.append(f"{path.relative_to(ROOT)}:{line} includes {name}")
    assert upward == []


def test_no_kernel_file_includes_itself_in_a_circle():
    includes = {p.relative_to(KERNELS).as_posix(): [n for _, n in included_files(p)] for p in kernel_files()}

    def visit(name: str, path: tuple[str, ...]) -> None:
        if name in path:
            pytest.fail(f"circle: {' -> '.join((*path, name))}")
        for child in includes.get(name, ()):
            visit(child, (*path, name))

    for name in includes:
        visit(name, ())


def test_a_kernel_job_is_included_by_nobody():
    jobs = [
        f"{p.relative_to(ROOT)}:{line}"
        for p in kernel_files()
        for line, name in included_files(p)
        if name.endswith(".cu")
    ]
    assert jobs == []


@pytest.mark.parametrize(
    "source, expected", [("import a.b", ["a.b"]), ("from fp4rt import api, errors", ["fp4rt.api", "fp4rt.errors"])]
)
def test_the_reader_of_imports_sees_every_spelling(tmp_path, source, expected):
    (tmp_path / "module.py").write_text(f"def f():\n    {source}\n")
    assert [name for _, name in imported_modules(tmp_path / "module.py")] == expected


def test_the_reader_of_imports_passes_over_imports_for_type_checkers(tmp_path):
    (tmp_path / "module.py").write_text(
        "if TYPE_CHECKING:\n    from fp4rt.api import quantize\nelse:\n    import fp4rt.cpu\n"
    )
    assert [name for _, name in imported_modules(tmp_path / "module.py")] == ["fp4rt.cpu"]
