"""``import fp4rt`` is light: NumPy at most, and quick."""

from __future__ import annotations

import json
import subprocess
import sys

HEAVY = ("cupy", "torch", "jax", "numba", "llvmlite", "ml_dtypes", "safetensors", "typer", "rich", "matplotlib")


def in_new_process(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout


def test_importing_the_package_imports_numpy_at_most() -> None:
    code = f"import sys, json, fp4rt; print(json.dumps([m for m in {HEAVY!r} if m in sys.modules]))"
    assert json.loads(in_new_process(code)) == []


def test_importing_the_package_takes_less_than_a_fifth_of_a_second() -> None:
    """The best of five: a busy machine only adds."""
    code = "import time; start = time.perf_counter(); import fp4rt; print(time.perf_counter() - start)"
    assert min(float(in_new_process(code)) for _ in range(5)) < 0.2


def test_every_public_name_exists_and_is_listed() -> None:
    code = "import fp4rt; print([n for n in fp4rt.__all__ if getattr(fp4rt, n, None) is None or n not in dir(fp4rt)])"
    assert in_new_process(code).strip() == "[]"


def test_an_unknown_name_is_an_attribute_error() -> None:
    code = "import fp4rt\ntry: fp4rt.quantise\nexcept AttributeError as error: print(error)"
    assert "quantise" in in_new_process(code)


def test_a_framework_that_is_not_imported_yet_is_named_with_its_import() -> None:
    code = (
        "import sys, fp4rt\n"
        "for name in ('torch', 'jax'):\n"
        "    try: getattr(fp4rt, name)\n"
        "    except AttributeError as error: print(error)\n"
        "print('torch' in sys.modules)"
    )
    torch, jax, imported = in_new_process(code).splitlines()
    assert "`import fp4rt.torch`" in torch
    assert "`import fp4rt.jax`" in jax
    assert imported == "False"


def test_quantizing_numpy_arrays_imports_no_other_array_library() -> None:
    code = (
        "import sys, numpy, fp4rt; q = fp4rt.quantize(numpy.ones((1, 16), 'f2')); fp4rt.matmul(q, q); "
        "print([m for m in ('cupy', 'torch', 'jax') if m in sys.modules])"
    )
    assert in_new_process(code).strip() == "[]"


def test_backends_say_what_is_usable_and_why_not() -> None:
    code = "import fp4rt; [print(s.name, s.usable, s.reason) for s in fp4rt.backends().values()]"
    cpu, cuda = in_new_process(code).splitlines()
    assert cpu.startswith("cpu True ")
    assert cuda.startswith("cuda ")
    assert len(cuda.split(" ", 2)[2]) > 10
