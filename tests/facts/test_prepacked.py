"""The prepacked layout: reversible to the byte, where its docstring says, in slabs."""

from __future__ import annotations

import numpy as np
import pytest

from fp4rt import prepacked
from fp4rt.errors import Fp4rtError, LayoutError
from fp4rt.format import BLOCK, E2M1, E4M3
from fp4rt.layout import ceil_div, round_up
from fp4rt.prepacked import PrepackedWeight, check_version, pack, tiles_shape, unpack

SHAPES = [(1, 16), (16, 256), (17, 48), (130, 80), (31, 7152), (48, 272), (3, 50), (5, 33)]


def random_weight(n: int, padded: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, (n, padded // 2), np.uint8)
    scales = rng.integers(0, 256, (n, padded // BLOCK), np.uint8)
    return data, scales


def without_padding(data: np.ndarray, scales: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    nibbles = np.stack([data & 15, data >> 4], axis=-1).reshape(len(data), -1)
    nibbles[:, k:] = 0
    scales = scales.copy()
    scales[:, ceil_div(k, BLOCK) :] = 0
    return nibbles[:, 0::2] | nibbles[:, 1::2] << 4, scales


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_unpack_gives_every_byte_back_whatever_the_scales_and_codes(n: int, k: int) -> None:
    padded = round_up(k, 32)
    data, scales = random_weight(n, padded)
    tiles, restored = pack(data, scales, k)
    assert tiles.shape == tiles_shape(n, k)
    got_data, got_scales = unpack(tiles, restored, n, k, padded)
    want_data, want_scales = without_padding(data, scales, k)
    np.testing.assert_array_equal(got_data, want_data)
    np.testing.assert_array_equal(got_scales, want_scales)


def test_padding_bytes_change_no_byte_of_the_packed_form() -> None:
    n, k, padded = 19, 72, 128
    data, scales = random_weight(n, padded)
    clean_data, clean_scales = without_padding(data, scales, k)
    for packed, clean in zip(pack(data, scales, k), pack(clean_data, clean_scales, k), strict=True):
        np.testing.assert_array_equal(packed, clean)


def test_slabs_are_invisible(monkeypatch: pytest.MonkeyPatch) -> None:
    n, k = 100, 512
    data, scales = random_weight(n, k)
    whole = pack(data, scales, k)
    monkeypatch.setattr(prepacked, "_SLAB_BYTES", 1)  # one row tile a slab
    for one, other in zip(whole, pack(data, scales, k), strict=True):
        np.testing.assert_array_equal(one, other)
    for one, other in zip(unpack(*whole, n, k, k), (data, scales), strict=True):
        np.testing.assert_array_equal(one, other)


def test_quantized_weights_need_no_records() -> None:
    data, scales = random_weight(32, 256)
    scales &= 0x7F
    data.reshape(32, -1, 8)[scales == 0] = 0
    _, restored = pack(data, scales, 256)
    assert restored.shape == (0, 16)


def test_records_are_sorted_and_name_row_column_scale_and_codes() -> None:
    data, scales = np.full((20, 32), 0x21, np.uint8), np.full((20, 4), 0x38, np.uint8)
    scales[2, 1] = 0xB8  # -1
    scales[18, 0] = 0x00
    scales[18, 3] = 0xFF  # NaN with a sign
    _, restored = pack(data, scales, 64)
    codes = "21" * 8
    assert [r.tobytes().hex() for r in restored] == [
        "02000000" + "b8010000" + codes,
        "12000000" + "00000000" + codes,
        "12000000" + "ff030000" + codes,
    ]


def decode_by_the_docstring(tiles: np.ndarray, row: int, column: int) -> tuple[int, int]:
    """(code, e5m3 byte) of one element, one bit at a time."""
    tile = tiles[column // 256, row // 16]
    rr, g = divmod(row % 16, 8)
    chunk, in_chunk = divmod(column % 256, 64)
    j, in_block = divmod(in_chunk, 16)
    kk, pair = divmod(in_block, 8)
    t, h = divmod(pair, 2)
    q = rr + 2 * kk
    sign, eem = {0: (15, 8), 1: (12, 5), 2: (14, 2), 3: (13, 11)}[q]  # the first bit of each
    word = int.from_bytes(tile[chunk * 512 + (4 * g + t) * 16 + 4 * j :][:4].tobytes(), "little")
    code = (word >> (sign + 16 * h) & 1) << 3
    for bit in range(3):
        code |= (word >> (eem - bit + 16 * h) & 1) << (2 - bit)
    pr, cc = divmod(chunk, 2)
    scales = int.from_bytes(tile[2048 + 128 * pr + 16 * g + 8 * cc + 4 * rr :][:4].tobytes(), "little")
    if j % 2:
        scales = (scales << 8 | scales >> 24) & 0xFFFFFFFF
    return code, scales >> (4 if j < 2 else 20) & 0xFF


def test_every_code_and_scale_lies_where_the_docstring_says() -> None:
    n, k = 32, 512
    data, scales = random_weight(n, k)
    scales = scales % 0x7E + 1  # positive, finite
    tiles, _ = pack(data, scales, k)
    rng = np.random.default_rng(1)
    for row, column in zip(rng.integers(0, n, 2000).tolist(), rng.integers(0, k, 2000).tolist(), strict=True):
        code, e5m3 = decode_by_the_docstring(tiles, row, column)
        assert code == data[row, column // 2] >> 4 * (column % 2) & 15
        assert (1 + (e5m3 & 7) / 8) * 2.0 ** ((e5m3 >> 3) - 22) == E4M3.values[scales[row, column // 16]]


def test_scale_bytes_are_bf16_and_fp16_numbers_as_the_kernels_read_them() -> None:
    table = prepacked._E5M3_OF_E4M3.astype(np.uint32)
    finite = np.arange(1, 0x7F)
    as_bf16 = ((table << 4 | 0x7000) << 16).view(np.float32).astype(np.float64)
    np.testing.assert_array_equal(as_bf16[finite], E4M3.values[finite].astype(np.float64) * 2.0**119)
    as_fp16 = (table << 7).astype(np.uint16).view(np.float16).astype(np.float64)
    np.testing.assert_array_equal(as_fp16[finite], E4M3.values[finite].astype(np.float64) * 2.0**7)
    assert as_fp16[0] == 0
    assert np.isnan([as_bf16[0x7F], as_fp16[0x7F]]).all()


def test_a_negative_scale_packs_as_negated_codes() -> None:
    data = np.arange(8, dtype=np.uint8)[None, :] * 0x11
    tiles, _ = pack(data, np.array([[0xC0]], np.uint8), 16)
    got = [decode_by_the_docstring(tiles, 0, column)[0] for column in range(16)]
    want = [-E2M1.values[data[0, column // 2] >> 4 * (column % 2) & 15] for column in range(16)]
    np.testing.assert_array_equal(E2M1.values[got], want)


def test_a_weight_of_another_version_is_refused() -> None:
    tiles, restored = pack(*random_weight(16, 256), 256)
    weight = PrepackedWeight(tiles, restored, np.ones(1, np.float32), (16, 256), "linear", 256, version=1)
    with pytest.raises(LayoutError, match=r"has layout version 1, this fp4rt reads version 2"):
        check_version(weight)


def test_a_prepacked_weight_is_frozen_and_takes_0_5625_byte_a_weight() -> None:
    tiles, restored = pack(*random_weight(64, 512), 512)
    weight = PrepackedWeight(tiles, restored[:0], np.ones(1, np.float32), (64, 512), "linear", 512)
    assert weight.nbytes == 64 * 512 * 9 // 16 + 4
    with pytest.raises(AttributeError, match="frozen"):
        weight.shape = (1, 1)


@pytest.mark.parametrize(
    "change, error",
    [
        ({"shape": (4096, 4096), "padded_n": 4096}, r"data of shape \(16, 256, 2304\), got \(1, 2, 2304\)"),
        ({"shape": (9, 9), "padded_n": 16}, r"data of shape \(1, 1, 2304\)"),
        ({"padded_n": 48}, "padded_n divisible by 16 and not below n = 64, got padded_n = 48"),
        ({"layout": "rows"}, "unknown scale layout 'rows'"),
        ({"data": np.zeros((1, 2, 2304), np.float32)}, "data as one of uint8, got float32"),
        ({"data": np.zeros((1, 2, 4608), np.uint8)[..., ::2]}, "data C-contiguous"),
        ({"restored": None}, "restored is a builtins.NoneType, not an array"),
        ({"restored": np.zeros((3, 8), np.uint8)}, r"restored of shape \(3, 16\), got \(3, 8\)"),
        ({"global_scale": np.ones(2, np.float32)}, "global_scale with one element"),
    ],
)
def test_arrays_that_are_no_such_weight_are_refused(change: dict[str, object], error: str) -> None:
    tiles, restored = pack(*random_weight(32, 64), 64)
    scale = np.ones(1, np.float32)
    parts = {"data": tiles, "restored": restored, "global_scale": scale, "shape": (32, 64), "layout": "linear"}
    PrepackedWeight(**parts, padded_n=64)
    with pytest.raises(Fp4rtError, match=error):
        PrepackedWeight(**{"padded_n": 64, **parts, **change})


def test_shape_and_columns_are_kept_as_integers() -> None:
    tiles, restored = pack(*random_weight(32, 64), 64)
    weight = PrepackedWeight(tiles, restored, np.ones(1, np.float32), [np.int64(32), 64.0], "linear", np.int32(64))
    assert weight.shape == (32, 64)
    assert {type(number) for number in (*weight.shape, weight.padded_n)} == {int}


def test_records_of_blocks_that_the_weight_does_not_have_are_refused() -> None:
    tiles, _ = pack(*random_weight(32, 64), 64)
    for row, column in ((32, 0), (0, 4), (2**32 - 1, 0)):
        record = np.array([row, column << 8, 0, 0], "<u4").view(np.uint8).reshape(1, 16)
        with pytest.raises(LayoutError, match=r"shape \(32, 64\) has records of blocks that it does not have"):
            unpack(tiles, record, 32, 64, 64)
