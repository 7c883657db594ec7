"""Every function of the library writes every byte that it returns, over random shapes, on the CPU."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fp4rt
from fp4rt import coverage
from fp4rt.layout import LAYOUTS

DTYPES = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)]

matrices = st.tuples(st.integers(0, 280), st.integers(1, 200), st.integers(0, 5), st.sampled_from(DTYPES))
layouts = st.sampled_from(sorted(LAYOUTS))


def matrix(m: int, n: int, dtype: np.dtype) -> np.ndarray:
    return np.random.default_rng(m * 1000 + n).normal(size=(m, n)).astype(dtype)


def padded(n: int, more: int) -> int:
    return -(-n // 16) * 16 + 16 * more


@settings(max_examples=40, deadline=None)
@given(matrices, layouts, st.sampled_from([None, 1.0, 0.003]))
def test_quantize_covers_its_outputs(matrix_, layout, scale):
    m, n, more, dtype = matrix_
    x, padded_n = matrix(m, n, dtype), padded(n, more)
    out = fp4rt.quantize(x, scale, layout=layout, padded_n=padded_n)
    coverage.check(
        lambda out: fp4rt.quantize(x, scale, layout=layout, padded_n=padded_n, out=out), out
    ).raise_if_broken()


@settings(max_examples=20, deadline=None)
@given(matrices, layouts)
def test_quantize_covers_what_it_allocates(matrix_, layout):
    m, n, more, dtype = matrix_
    x = matrix(max(m, 1), n, dtype)
    coverage.check(lambda: fp4rt.quantize(x, layout=layout, padded_n=padded(n, more))).raise_if_broken()


@settings(max_examples=20, deadline=None)
@given(matrices, layouts, layouts)
def test_relayout_covers_its_outputs(matrix_, before, after):
    m, n, more, dtype = matrix_
    q = fp4rt.quantize(matrix(m, n, dtype), layout=before, padded_n=padded(n, more))
    out = fp4rt.quantize(matrix(m, n, dtype), layout=after, padded_n=padded(n, more))
    coverage.check(lambda out: fp4rt.relayout(q, after, out=out), out).raise_if_broken()


@settings(max_examples=20, deadline=None)
@given(matrices, layouts, st.sampled_from(DTYPES))
def test_dequantize_covers_its_output(matrix_, layout, result):
    m, n, more, dtype = matrix_
    q = fp4rt.quantize(matrix(m, n, dtype), layout=layout, padded_n=padded(n, more))
    out = np.empty((m, n), result)
    coverage.check(lambda out: fp4rt.dequantize(q, result.name, out=out), out).raise_if_broken()


@settings(max_examples=10, deadline=None)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 80), layouts, st.sampled_from(DTYPES))
def test_matmul_covers_its_output(m, n, k, layout, result):
    a = fp4rt.quantize(matrix(m, k, DTYPES[2]), layout=layout, padded_n=padded(k, 0))
    b = fp4rt.quantize(matrix(n, k, DTYPES[2]), layout=layout, padded_n=padded(k, 1))
    out = np.empty((m, n), result)
    coverage.check(lambda out: fp4rt.matmul(a, b, out_dtype=result.name, out=out), out).raise_if_broken()


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_a_torch_call_is_covered_too(layout):
    torch = pytest.importorskip("torch", reason="needs torch")
    x = torch.randn(37, 80, dtype=torch.bfloat16)
    coverage.check(lambda out: fp4rt.quantize(x, layout=layout, out=out), fp4rt.quantize(x, layout=layout))
    coverage.check(lambda: fp4rt.quantize(x, layout=layout)).raise_if_broken()
