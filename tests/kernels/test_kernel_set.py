"""No kernel is forgotten: what tests and ``fp4rt compile`` build is all that there is."""

from __future__ import annotations

import ast
from pathlib import Path

from fp4rt.cuda import kernel_set
from fp4rt.sources import source_names

CUDA = Path(kernel_set.__file__).resolve().parent


def test_every_module_with_kernel_specs_is_listed():
    defined = {
        ".".join(("fp4rt.cuda", *path.relative_to(CUDA).with_suffix("").parts))
        for path in CUDA.rglob("*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and node.name == "kernel_specs"
    }
    assert len(defined) >= 7
    assert defined == set(kernel_set._LAUNCHERS)


def test_every_source_of_a_kernel_is_launched():
    sources = {name for name in source_names() if name.endswith(".cu")}
    assert {spec.source for spec in kernel_set.all_kernels()} == sources
