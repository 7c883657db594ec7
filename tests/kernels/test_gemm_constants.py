"""Numbers that a kernel and its launch both have: a launch of another shape would write past the result."""

from __future__ import annotations

import re

import pytest

from fp4rt.cuda.gemm import matmul as _  # noqa: F401  the package's attribute is the function
from fp4rt.sources import read_source


def constant(source, name):
    """Value of ``constexpr ... name = expression;`` where the expression is made of numbers and earlier constants."""
    values = {}
    for found, expression in re.findall(r"constexpr \w+ (\w+) = ([\w *]+);", read_source(source)):
        values[found] = eval(expression, {"__builtins__": {}}, values) if not expression.startswith("0x") else None
    return values[name]


@pytest.mark.parametrize(
    "source, name, module, python_name",
    [
        ("kernels/gemm_finish.cu", "THREADS", "matmul", "FINISH_THREADS"),
        ("kernels/gemm_finish.cu", "BLOCK_COLUMNS", "selection", "FINISH_COLUMNS"),
        ("kernels/gemm_reference.cu", "THREADS", "selection", "REFERENCE_THREADS"),
        ("kernels/dequantize_activations.cu", "THREADS", "passes", "THREADS"),
        ("kernels/prepacked_values.cu", "RECORD_THREADS", "prepack", "RECORD_THREADS"),
        ("block/shared_decoding.cuh", "DECODING_WARPS", "hopper_prefill", "DECODING_WARPS"),
        ("block/shared_decoding.cuh", "ITEM_TOKENS", "hopper_prefill", "ITEM_TOKENS"),
    ],
)
def test_kernel_and_launch_agree(source, name, module, python_name):
    import sys

    assert constant(source, name) == getattr(sys.modules[f"fp4rt.cuda.gemm.{module}"], python_name)


def test_kinds_of_operands_agree():
    from fp4rt.cuda.gemm.portable import KINDS

    text = read_source("block/gemm_arguments.cuh") + read_source("num/constants.cuh")
    found = {name: int(value) for name, value in re.findall(r"\b(FLOAT16|BFLOAT16|NVFP4|PREPACKED) = (\d+)", text)}
    assert found == {name.upper(): value for name, value in KINDS.items()}
