"""Write coverage on a device: planted faults are found, and the library's kernels are silent over random shapes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fp4rt
from fp4rt import coverage
from fp4rt.coverage import Output
from fp4rt.layout import LAYOUTS
from fp4rt.pool import data_tag, scale_tag

pytestmark = pytest.mark.gpu

cupy = pytest.importorskip("cupy", reason="needs cupy")

TAGS = {name: scale_tag(name, 150, 80, 96) for name in LAYOUTS}
DTYPES = ("float16", "float32")


@pytest.fixture(params=["cupy", "torch"])
def library(request):
    if request.param == "torch":
        torch = pytest.importorskip("torch", reason="needs torch")
        if not torch.cuda.is_available():
            pytest.skip("needs torch with CUDA")
    return request.param


def empty(shape: tuple[int, ...], library: str):
    if library == "cupy":
        return cupy.empty(shape, cupy.uint8)
    torch = pytest.importorskip("torch")
    return torch.empty(shape, dtype=torch.uint8, device="cuda")


WRITE = cupy.RawKernel(
    """
extern "C" __global__ void write(unsigned char* out, const unsigned char* values, long long size, long long skipped,
                                 long long outside) {
    for (long long i = threadIdx.x; i < size; i += blockDim.x)
        if (i != skipped) out[i] = values[i];
    if (threadIdx.x == 0 && outside != 0) out[outside] = 0xA5;
}
""",
    "write",
)


def kernel(tag, skipped: int = -1, outside: int = 0):
    """0x38 to the valid part and 0 to the padding, but for one byte; and one byte elsewhere."""
    values = cupy.asarray(np.where(tag.padding_mask(), 0, 0x38).astype(np.uint8))

    def run(out) -> None:
        pointer = out.data_ptr() if hasattr(out, "data_ptr") else out.data.ptr
        arguments = (np.uint64(pointer), values, np.int64(tag.nbytes), np.int64(skipped), np.int64(outside))
        WRITE((1,), (256,), arguments)

    return run


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@pytest.mark.parametrize("part", ["padding", "valid part"])
def test_one_missed_byte_is_found_with_its_row_and_column(library, layout, part):
    tag = TAGS[layout]
    output = Output(empty(tag.physical, library), tag, "scales")
    offset = int(np.flatnonzero(tag.padding_mask() == (part == "padding"))[7])
    found = coverage.check(kernel(tag, offset), output)["scales"].missed
    assert (found.count, found.first.offset, found.first.padding) == (1, offset, part == "padding")
    assert (found.first.row, found.first.column) == tag.coordinates(offset)
    assert coverage.check(kernel(tag), output)


@pytest.mark.parametrize("offset", [-1, -4096, 2048, 2048 + 4095])
def test_a_write_outside_is_found(library, offset):
    tag = TAGS["128x4"]
    output = Output(empty(tag.physical, library), tag, "scales")
    assert coverage.check(kernel(tag, outside=offset), output)["scales"].outside == (1, offset)


def test_work_on_a_stream_of_its_own_is_waited_for():
    stream, tag = cupy.cuda.Stream(non_blocking=True), TAGS["8x4"]

    def run(out) -> None:
        with stream:
            kernel(tag)(out)

    assert coverage.check(run, Output(cupy.empty(tag.physical, cupy.uint8), tag))


def test_gap_and_overlap_of_two_writers_are_named(library):
    def rows(first: int, end: int):
        def write(out) -> None:
            out[first:end] = 1

        return write

    output = empty((10, 8), library)
    assert coverage.check_partition({"decode": rows(0, 4), "prefill": rows(4, 10)}, output)
    gap = coverage.check_partition({"decode": rows(0, 4), "prefill": rows(5, 10)}, output)
    assert "gap: no writer of decode, prefill writes 8 bytes" in gap.between[0]
    overlap = coverage.check_partition({"decode": rows(0, 5), "prefill": rows(4, 10)}, output)
    assert "overlap: decode and prefill both write 8 bytes" in overlap.between[0]
    assert "(row 4, column 0)" in overlap.between[0]


def test_strided_device_arrays_are_checked_with_their_gaps():
    base = cupy.empty((6, 8), cupy.uint16)

    def run(out) -> None:
        out[:] = 1

    assert coverage.check(run, base[:, :5])
    assert coverage.check(lambda out: out[:, 1:].fill(1), base[:, :5])["output"].missed.count == 12


# The library's kernels.

shapes = st.tuples(st.integers(0, 700), st.integers(1, 700), st.integers(0, 5), st.sampled_from(DTYPES))
layouts = st.sampled_from(sorted(LAYOUTS))
many = settings(max_examples=60, deadline=None)


def matrix(m: int, n: int, dtype: str):
    return cupy.asarray(np.random.default_rng(m * 1000 + n).normal(size=(m, n)).astype(dtype))


def padded(n: int, more: int) -> int:
    return -(-n // 16) * 16 + 16 * more


@many
@given(shapes, layouts, st.sampled_from([None, 1.0]))
def test_quantize_covers_its_outputs(shape, layout, scale):
    m, n, more, dtype = shape
    x, padded_n = matrix(m, n, dtype), padded(n, more)
    out = fp4rt.quantize(x, scale, layout=layout, padded_n=padded_n)
    coverage.check(
        lambda out: fp4rt.quantize(x, scale, layout=layout, padded_n=padded_n, out=out), out
    ).raise_if_broken()
    if m:
        coverage.check(lambda: fp4rt.quantize(x, scale, layout=layout, padded_n=padded_n)).raise_if_broken()


@many
@given(shapes, layouts, layouts)
def test_relayout_covers_its_outputs(shape, before, after):
    m, n, more, dtype = shape
    q = fp4rt.quantize(matrix(m, n, dtype), layout=before, padded_n=padded(n, more))
    out = fp4rt.quantize(matrix(m, n, dtype), layout=after, padded_n=padded(n, more))
    coverage.check(lambda out: fp4rt.relayout(q, after, out=out), out).raise_if_broken()


@many
@given(shapes, layouts, st.sampled_from(DTYPES))
def test_dequantize_covers_its_output(shape, layout, result):
    m, n, more, dtype = shape
    q = fp4rt.quantize(matrix(m, n, dtype), layout=layout, padded_n=padded(n, more))
    out = cupy.empty((m, n), result)
    coverage.check(lambda out: fp4rt.dequantize(q, result, out=out), out).raise_if_broken()


@many
@given(st.integers(1, 150), st.integers(1, 150), st.integers(1, 300), layouts, st.sampled_from(DTYPES))
def test_matmul_covers_its_output(m, n, k, layout, result):
    a = fp4rt.quantize(matrix(m, k, "float32"), layout=layout, padded_n=padded(k, 0))
    b = fp4rt.quantize(matrix(n, k, "float32"), layout=layout, padded_n=padded(k, 1))
    out = cupy.empty((m, n), result)
    coverage.check(lambda out: fp4rt.matmul(a, b, out_dtype=result, out=out), out).raise_if_broken()


@pytest.mark.parametrize("n, padded_n", [(48, 64), (80, 96), (7152, 7168)])
@pytest.mark.parametrize("m", [128, 150, 64])
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_the_published_shapes_are_covered(layout, m, n, padded_n):
    x = matrix(m, n, "float16")
    out = fp4rt.quantize(x, layout=layout, padded_n=padded_n)
    verdict = coverage.check(lambda out: fp4rt.quantize(x, layout=layout, padded_n=padded_n, out=out), out)
    verdict.raise_if_broken()
    assert verdict["data"].tag == data_tag(m, n, padded_n)
