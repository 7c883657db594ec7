"""Results written into the caller's memory: every byte of it, or, after any error, none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import fp4rt
from fp4rt.errors import DtypeError, Fp4rtError, LayoutError, ShapeError
from fp4rt.layout import LAYOUTS
from tests.cpu.comparison import DTYPES, assert_same_bits, assert_same_tensor

POISON = 0x7F
SHAPES = [(3, 48, None), (3, 50, 64), (1, 1, 16), (130, 80, 96), (7, 64, 256), (129, 7, 48)]


def poisoned(m: int, n: int, padded_n: int | None, layout: str) -> fp4rt.QuantizedTensor:
    padded_n = padded_n or n
    return fp4rt.QuantizedTensor(
        np.full((m, padded_n // 2), POISON, np.uint8),
        np.full(LAYOUTS[layout].shape(m, padded_n // 16), POISON, np.uint8),
        np.full(1, np.nan, np.float32),
        (m, n),
        layout,
        padded_n,
    )


def source(m: int, n: int) -> np.ndarray:
    return np.random.default_rng(m * n).standard_normal((m, n)).astype(np.float32)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("m", "n", "padded_n"), SHAPES)
def test_quantize_writes_every_byte_of_out_and_padding_is_zero(
    m: int, n: int, padded_n: int | None, layout: str
) -> None:
    x = source(m, n)
    out = poisoned(m, n, padded_n, layout)
    assert fp4rt.quantize(x, layout=layout, padded_n=padded_n, out=out) is out
    assert_same_tensor(out, fp4rt.quantize(x, layout=layout, padded_n=padded_n), "out")
    columns = (padded_n or n) // 16
    assert not out.data[:, (n + 1) // 2 :].any()
    valid = np.zeros((m, columns), np.uint8)
    valid[:, : -(-n // 16)] = 1
    assert not out.scales[LAYOUTS[layout].pack(valid) == 0].any()
    if n % 2:
        assert not (out.data[:, n // 2] >> 4).any()


@pytest.mark.parametrize("policy", ["poison", "empty", "covered", "zero"])
def test_nothing_shows_through_from_reused_memory(policy: Any) -> None:
    x = np.ones((3, 48), np.float32)
    pool = fp4rt.PaddedPool(fill=policy)
    for _ in range(20):
        dirty = [pool.allocate(size) for size in (72, 512, 4)]
        for buffer in dirty:
            buffer.numpy((buffer.nbytes,))[...] = POISON
        del dirty, buffer
        with fp4rt.use_pool(pool):
            q = fp4rt.quantize(x, 1.0)
        assert (q.data == 0x77).all()
        assert q.scales.nbytes == 512
        assert np.flatnonzero(q.scales).tolist() == [0, 1, 2, 16, 17, 18, 32, 33, 34]
        assert set(q.scales[q.scales != 0].tolist()) == {0x23}
        assert (q.dequantize() == 1.03125).all()
        del q
    assert pool.stats().reuses > 0


@pytest.mark.parametrize("target", LAYOUTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_relayout_writes_every_byte_of_out(layout: str, target: str) -> None:
    q = fp4rt.quantize(source(130, 50), layout=layout, padded_n=80)
    out = poisoned(130, 50, 80, target)
    assert fp4rt.relayout(q, target, out=out) is out
    assert_same_tensor(out, q.relayout(target), "out")
    assert not np.shares_memory(out.data, q.data)


def test_relayout_without_out_moves_scales_only() -> None:
    q = fp4rt.quantize(source(16, 64))
    moved = q.relayout("linear")
    assert moved.data is q.data
    assert moved.global_scale is q.global_scale
    assert not np.shares_memory(q.relayout("128x4").scales, q.scales)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dequantize_and_matmul_write_out(dtype: str) -> None:
    q = fp4rt.quantize(source(5, 33), padded_n=48)
    y = np.full((5, 33), np.nan, DTYPES[dtype])
    assert fp4rt.dequantize(q, dtype, out=y) is y
    assert_same_bits(y, q.dequantize(dtype), "dequantize")
    d = np.full((5, 5), np.nan, DTYPES[dtype])
    assert fp4rt.matmul(q, q, out_dtype=dtype, out=d) is d
    assert_same_bits(d, fp4rt.matmul(q, q, out_dtype=dtype), "matmul")


def read_only(array: np.ndarray) -> np.ndarray:
    array.setflags(write=False)
    return array


def replaced(out: fp4rt.QuantizedTensor, **arrays: np.ndarray) -> fp4rt.QuantizedTensor:
    parts = {"data": out.data, "scales": out.scales, "global_scale": out.global_scale, **arrays}
    return fp4rt.QuantizedTensor(**parts, shape=out.shape, layout=out.layout, padded_n=out.padded_n)


WRONG_OUTS = {
    "other rows": (lambda: poisoned(4, 50, 64, "128x4"), ShapeError, "shape (3, 50)"),
    "other columns": (lambda: poisoned(3, 51, 64, "128x4"), ShapeError, "shape (3, 50)"),
    "other padding": (lambda: poisoned(3, 50, 80, "128x4"), ShapeError, "padded_n = 64"),
    "other layout": (lambda: poisoned(3, 50, 64, "8x4"), LayoutError, "'128x4'"),
}


@pytest.mark.parametrize("case", WRONG_OUTS)
def test_a_wrong_out_is_an_error_and_nothing_is_written(case: str) -> None:
    make, error, text = WRONG_OUTS[case]
    out = make()
    with pytest.raises(error) as caught:
        fp4rt.quantize(source(3, 50), padded_n=64, out=out)
    assert text in str(caught.value)
    assert (out.data == POISON).all()
    assert (out.scales == POISON).all()
    assert np.isnan(out.global_scale).all()


@pytest.mark.parametrize("part", ["data", "scales", "global_scale"])
def test_a_read_only_out_is_an_error_and_nothing_is_written(part: str) -> None:
    out = poisoned(3, 50, 64, "128x4")
    locked = replaced(out, **{part: read_only(getattr(out, part).copy())})
    for call in (
        lambda: fp4rt.quantize(source(3, 50), padded_n=64, out=locked),
        lambda: fp4rt.relayout(fp4rt.quantize(source(3, 50), padded_n=64), "128x4", out=locked),
    ):
        with pytest.raises(ShapeError, match=f"out.{part} writable"):
            call()
    assert (locked.data == POISON).all()
    assert (locked.scales == POISON).all()
    assert np.isnan(locked.global_scale).all()


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: np.full((5, 34), 7, np.float32), ShapeError, "shape (5, 33)"),
        (lambda: np.full((5, 33), 7, np.float64), DtypeError, "float32"),
        (lambda: np.full((5, 33), 7, np.float16), DtypeError, "float32"),
        (lambda: np.full((33, 5), 7, np.float32).T, ShapeError, "C-contiguous"),
        (lambda: np.full((5, 66), 7, np.float32)[:, ::2], ShapeError, "C-contiguous"),
        (lambda: read_only(np.full((5, 33), 7, np.float32)), ShapeError, "writable"),
    ],
)
def test_a_wrong_array_as_out_is_an_error_and_nothing_is_written(make: Any, error: type[Fp4rtError], text: str) -> None:
    out = make()
    q = fp4rt.quantize(source(5, 33), padded_n=48)
    weight = fp4rt.quantize(source(33, 33), padded_n=48)
    for call in (lambda: fp4rt.dequantize(q, out=out), lambda: fp4rt.matmul(q, weight, out_dtype="float32", out=out)):
        with pytest.raises(error) as caught:
            call()
        assert text in str(caught.value)
        assert (out == 7).all()


def test_relayout_into_its_own_memory_is_an_error() -> None:
    q = fp4rt.quantize(source(128, 64))
    before = q.scales.copy()
    own = fp4rt.QuantizedTensor(q.data, q.scales, q.global_scale, q.shape, "8x4")
    with pytest.raises(ShapeError, match="memory of its own"):
        fp4rt.relayout(q, "8x4", out=own)
    assert_same_bits(q.scales, before, "scales")


@pytest.mark.parametrize("part", ["data", "scales"])
def test_relayout_whose_global_scale_would_lie_in_its_source_is_an_error(part: str) -> None:
    q = fp4rt.quantize(np.ones((8, 64), np.float32), layout="linear")
    parts = {"data": q.data.copy(), "scales": q.scales.copy()}
    source = fp4rt.QuantizedTensor(*parts.values(), q.global_scale, (8, 64), "linear")
    inside = parts[part].reshape(-1)[4:8].view(np.float32)
    out = fp4rt.QuantizedTensor(np.empty_like(q.data), np.empty((128, 4), np.uint8), inside, (8, 64), "128x4")
    with pytest.raises(ShapeError, match="memory of its own"):
        source.relayout("128x4", out=out)
    assert np.array_equal(parts[part], getattr(q, part))


def test_relayout_may_reuse_the_codes_of_its_source() -> None:
    q = fp4rt.quantize(source(128, 64))
    out = fp4rt.QuantizedTensor(q.data, np.empty_like(q.scales), q.global_scale, q.shape, "8x4")
    assert_same_tensor(fp4rt.relayout(q, "8x4", out=out), q.relayout("8x4"), "out")


def overlapping(case: str) -> tuple[Callable[[], Any], np.ndarray]:
    """A call whose out shares bytes with what it reads, and the memory of both."""
    memory = np.zeros(8192, np.uint8)
    x = memory[1024:5120].view(np.float32).reshape(16, 64)
    x[...] = source(16, 64)
    q = fp4rt.quantize(x, layout="linear")

    def out(data: int, scales: int) -> fp4rt.QuantizedTensor:
        parts = memory[data : data + 512].reshape(16, 32), memory[scales : scales + 64].reshape(16, 4)
        return fp4rt.QuantizedTensor(*parts, np.ones(1, np.float32), (16, 64), "linear")

    def dense(first: int, dtype: type = np.float32) -> np.ndarray:
        return memory[first:].view(dtype)[: 16 * 64].reshape(16, 64)

    a, square = dense(0, np.float16), fp4rt.quantize(source(64, 64))
    calls: dict[str, Callable[[], Any]] = {
        "codes over the last byte of x": lambda: fp4rt.quantize(x, layout="linear", out=out(5104, 0)),
        "scales over the first byte of x": lambda: fp4rt.quantize(x, layout="linear", out=out(0, 976)),
        "codes in a gap of x": lambda: fp4rt.quantize(x[::-1, ::8][:, :8], padded_n=64, layout="linear", out=narrow),
        "codes over scales": lambda: fp4rt.quantize(x, layout="linear", out=out(6000, 6500)),
        "codes over the global scale": lambda: fp4rt.quantize(x, memory[6000:6004].view(np.float32), out=first_tile),
        "dense over codes": lambda: fp4rt.dequantize(stored, out=dense(4096)),
        "product over a": lambda: fp4rt.matmul(a, square, out_dtype="float32", out=dense(2044)),
        "product over b": lambda: fp4rt.matmul(a, stored, out_dtype="float16", out=product),
        "product over the bias": lambda: fp4rt.matmul(a, square, out_dtype="float32", bias=x[15], out=dense(4096)),
    }
    memory[6000:6004].view(np.float32)[...] = 1
    stored = fp4rt.QuantizedTensor(memory[6144:6656].reshape(16, 32), q.scales, q.global_scale, (16, 64), "linear")
    product = memory[6655 - 511 :].view(np.float16)[:256].reshape(16, 16)
    narrow = fp4rt.QuantizedTensor(
        memory[1028:1540].reshape(16, 32), np.empty((16, 4), np.uint8), np.ones(1, np.float32), (16, 8), "linear", 64
    )
    first_tile = fp4rt.QuantizedTensor(
        memory[5600:6112].reshape(16, 32), np.empty((128, 4), np.uint8), np.ones(1, np.float32), (16, 64), "128x4"
    )
    return calls[case], memory


@pytest.mark.parametrize(
    "case",
    [
        "codes over the last byte of x",
        "scales over the first byte of x",
        "codes in a gap of x",
        "codes over scales",
        "codes over the global scale",
        "dense over codes",
        "product over a",
        "product over b",
        "product over the bias",
    ],
)
def test_out_that_shares_memory_with_what_is_read_is_an_error_and_nothing_is_written(case: str) -> None:
    call, memory = overlapping(case)
    before = memory.copy()
    with pytest.raises(ShapeError, match="memory of its own"):
        call()
    assert_same_bits(memory, before, "memory")


def test_empty_arrays_at_one_address_share_no_memory() -> None:
    memory = np.zeros(1024, np.uint8)
    bias = memory[:64].view(np.float32)
    empty = memory[16:16].view(np.float32).reshape(0, 16)
    weight = fp4rt.quantize(source(16, 16))
    out = fp4rt.QuantizedTensor(
        memory[16:16].reshape(0, 8), memory[16:16].reshape(0, 1), np.ones(1, np.float32), (0, 16), "linear"
    )
    assert fp4rt.quantize(empty, layout="linear", out=out) is out
    assert fp4rt.matmul(out, weight, bias=bias, out_dtype="float32", out=empty) is empty


def test_out_beside_what_is_read_is_fine() -> None:
    memory = np.zeros(8192, np.uint8)
    x = memory[1024:5120].view(np.float32).reshape(16, 64)
    x[...] = source(16, 64)
    data, scales = memory[512:1024].reshape(16, 32), memory[5120:5184].reshape(16, 4)
    scale = memory[5184:5188].view(np.float32)
    scale[...] = 2
    out = fp4rt.QuantizedTensor(data, scales, scale, x.shape, "linear")
    assert fp4rt.quantize(x, out.global_scale, layout="linear", out=out) is out
    assert_same_tensor(out, fp4rt.quantize(x, 2.0, layout="linear"), "out")


@pytest.mark.parametrize("part", ["data", "global_scale"])
def test_matmul_does_not_write_over_the_prepacked_weight_that_it_reads(part: str) -> None:
    weight = fp4rt.prepack(fp4rt.quantize(source(16, 256)))
    memory = getattr(weight, part).reshape(-1).view(np.uint8)
    before = memory.copy()
    out = memory[:4].view(np.float32).reshape(1, 1) if part == "global_scale" else memory[:64].view(np.float32)
    x = np.ones((1, 256), np.float16)
    with pytest.raises(ShapeError, match="memory of its own"):
        if part == "data":
            fp4rt.matmul(x, weight, out_dtype="float32", out=out.reshape(1, 16))
        else:
            narrow = fp4rt.PrepackedWeight(weight.data, weight.restored, weight.global_scale, (1, 256), "linear", 256)
            fp4rt.matmul(x, narrow, out_dtype="float32", out=out)
    np.testing.assert_array_equal(memory, before)
