"""Recorded outputs of vLLM's reference: every scale byte, every magnitude, every dequantized value, all layouts."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

import fp4rt
from fp4rt.cpu import reference
from fp4rt.layout import LAYOUTS
from tests.cpu.comparison import DTYPES, assert_same_bits
from tests.golden.vectors import SOURCE, cases, files_of_kind, magnitudes


def files_with_values() -> list[Path]:
    """Files that recorded dequantized values."""
    files = files_of_kind("quant", "quant_multi_gs")
    return [path for path in files if any(key.endswith(f"{SOURCE}/dequant") for key in np.load(path).files)]


def test_there_are_vectors_of_every_kind() -> None:
    assert len(files_of_kind("quant")) == 12
    assert len(files_of_kind("quant_multi_gs")) == 15
    assert len(files_of_kind("layout")) == 1
    assert len(files_with_values()) == 23


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("path", files_of_kind("quant", "quant_multi_gs"), ids=lambda path: path.stem)
def test_scales_and_magnitudes_equal_the_recorded_ones(path: Path, layout: str) -> None:
    for what, x, scale, outputs in cases(path):
        q = fp4rt.quantize(x, scale, layout=layout)
        m, n = x.shape
        assert_same_bits(LAYOUTS[layout].unpack(q.scales, m, n // 16), outputs["sf"], f"{what}, scales")
        if f"sf_{layout}" in outputs:
            assert_same_bits(q.scales, outputs[f"sf_{layout}"], f"{what}, scales in {layout}")
        assert_same_bits(magnitudes(q.data), magnitudes(outputs["packed"]), f"{what}, magnitudes")
        codes, recorded = reference.unpack_codes(q.data), reference.unpack_codes(outputs["packed"])
        nonzero = (recorded & 7) != 0
        assert_same_bits(codes[nonzero], recorded[nonzero], f"{what}, signs of codes that are not zero")


@pytest.mark.parametrize("path", files_with_values(), ids=lambda path: path.stem)
def test_dequantized_values_equal_the_recorded_ones(path: Path) -> None:
    for what, x, scale, outputs in cases(path):
        if "dequant" not in outputs:
            continue
        y = fp4rt.dequantize(fp4rt.quantize(x, scale))
        differ = np.argwhere(~((y == outputs["dequant"]) | (np.isnan(y) & np.isnan(outputs["dequant"]))))
        assert not len(differ), f"{what}: {len(differ)} values differ, first at {differ[0]}"


@pytest.mark.parametrize("path", files_of_kind("quant"), ids=lambda path: path.stem)
def test_automatic_global_scale_is_the_rounded_quotient_of_the_recorded_amax(path: Path) -> None:
    """The recorded scale is 2688 * (1 / amax), rounded twice, and up to one unit away; the quotient is the contract."""
    file = np.load(path)
    x = file["x_bits"].view(DTYPES[json.loads(file["meta"].item())["dtype"]])
    quotient = Fraction(2688) / Fraction(float(file["amax"]))
    got = fp4rt.global_scale(x)[0]
    error = abs(Fraction(float(got)) - quotient)
    for neighbour in (np.nextafter(got, np.float32(0)), np.nextafter(got, np.float32(np.inf))):
        assert error <= abs(Fraction(float(neighbour)) - quotient)


def test_layout_vectors_in_every_direction() -> None:
    (path,) = files_of_kind("layout")
    file = np.load(path)
    for i, (m, columns) in enumerate(file["shapes"].tolist()):
        linear = file[f"s{i}/sf"]
        recorded = {"linear": linear, "128x4": file[f"s{i}/swizzled_128x4"], "8x4": file[f"s{i}/swizzled_8x4"]}
        data = np.zeros((m, columns * 8), np.uint8)
        for source in LAYOUTS:
            shape = LAYOUTS[source].shape(m, columns)
            q = fp4rt.QuantizedTensor(
                data, recorded[source].reshape(shape), np.ones(1, np.float32), (m, columns * 16), source
            )
            for target in LAYOUTS:
                moved = fp4rt.relayout(q, target)
                wanted = recorded[target].reshape(LAYOUTS[target].shape(m, columns))
                assert_same_bits(moved.scales, wanted, f"({m}, {columns}) {source} to {target}")
