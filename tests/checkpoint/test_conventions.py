"""CASES B03, B04, B22: scale conventions are explicit, and a missing or unusable scale is an error that names it."""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np
import pytest

import fp4rt
from fp4rt import checkpoint
from fp4rt.checkpoint.formats import decode_scale, encode_scale, storable_scale, swap_nibbles
from fp4rt.checkpoint.reader import TensorFile
from fp4rt.errors import CheckpointError, DtypeError
from fp4rt.format import FP32_MAX


def values(path, **options):
    return fp4rt.dequantize(checkpoint.load(path, "w", **options))[0].tolist()


def test_decode_scale_of_modelopt_is_a_multiplier(tmp_path, files):
    got = values(files.make(tmp_path / "x.safetensors", files.modelopt(0.25)))
    assert got == files.values
    assert [np.signbit(v) for v in got] == [np.signbit(v) for v in files.values]


def test_encode_scale_of_compressed_tensors_is_a_divisor(tmp_path, files):
    got = values(files.make(tmp_path / "x.safetensors", files.compressed_tensors(4.0)))
    assert got == files.values
    assert max(got) == 3


def test_modelopt_to_compressed_tensors_and_back_keeps_every_byte(tmp_path, files):
    source = files.make(tmp_path / "mo.safetensors", files.modelopt(0.25))
    checkpoint.convert(source, tmp_path / "ct.safetensors", "compressed-tensors")
    ct = TensorFile(tmp_path / "ct.safetensors")
    assert ct["w.weight_global_scale"].tolist() == [4.0]
    assert ct["w.weight_packed"].tobytes() == files.codes
    checkpoint.convert(tmp_path / "ct.safetensors", tmp_path / "back.safetensors", "modelopt")
    before, after = TensorFile(source), TensorFile(tmp_path / "back.safetensors")
    assert set(before) == set(after)
    for name in before:
        assert bytes(before.raw(name)) == bytes(after.raw(name))
        assert before.entry(name).shape == after.entry(name).shape
        assert before.entry(name).dtype == after.entry(name).dtype


@pytest.mark.parametrize("missing", ["w.weight_scale_2", "w.weight_scale"])
def test_missing_scale_of_modelopt_is_named(missing, tmp_path, files):
    tensors = files.modelopt()
    del tensors[missing]
    with pytest.raises(CheckpointError, match=f"'{missing}' is missing"):
        checkpoint.open(files.make(tmp_path / "x.safetensors", tensors))


@pytest.mark.parametrize(("tag", "shape"), [("F4", [1, 16]), ("I8", [1, 8])])
@pytest.mark.parametrize("form", ["modelopt", "compressed_tensors"])
def test_codes_are_taken_by_their_bytes(tag, shape, form, tmp_path, files):
    """As PyTorch's float4_e2m1fn_x2 is stored, two to a byte, and as int8."""
    tensors = getattr(files, form)()
    name = next(iter(tensors))
    tensors[name] = (tag, shape, files.codes)
    path = files.make(tmp_path / "x.safetensors", tensors)
    assert values(path) == files.values
    assert checkpoint.verify(path) == []
    checkpoint.convert(path, tmp_path / "y.safetensors", to="comfy")
    assert values(tmp_path / "y.safetensors", format="comfy") == files.values


def test_codes_of_another_dtype_are_named_with_it(tmp_path, files):
    tensors = {**files.modelopt(), "w.weight": ("I16", [1, 4], files.codes)}
    with pytest.raises(
        CheckpointError, match="'w.weight' is I16; wanted U8, F4 or I8; 'w.weight_scale_2' is its scale"
    ):
        checkpoint.open(files.make(tmp_path / "x.safetensors", tensors))


def test_other_quantizations_keep_their_dtypes(tmp_path, files):
    tensors = {"v.weight": ("F4", [1, 16], files.codes), "v.weight_scale": ("F8_E8M0", [1, 1], b"\x80")}
    tensors |= {"u.counts": ("I8", [1, 8], files.codes)}
    path = files.make(tmp_path / "x.safetensors", {**files.modelopt(), **tensors})
    checkpoint.convert(path, tmp_path / "y.safetensors", to="comfy")
    with TensorFile(tmp_path / "y.safetensors") as file:
        assert [(file.entry(n).dtype, list(file.entry(n).shape)) for n in tensors] == [t[:2] for t in tensors.values()]


def test_missing_codes_are_named(tmp_path, files):
    tensors = files.modelopt()
    del tensors["w.weight"]
    with pytest.raises(CheckpointError, match="'w.weight'.* is missing"):
        checkpoint.open(files.make(tmp_path / "x.safetensors", tensors))


@pytest.mark.parametrize("missing", ["w.weight_global_scale", "w.weight_scale"])
def test_missing_scale_of_compressed_tensors_is_named(missing, tmp_path, files):
    tensors = files.compressed_tensors()
    del tensors[missing]
    with pytest.raises(CheckpointError, match=f"'{missing}' is missing"):
        checkpoint.open(files.make(tmp_path / "x.safetensors", tensors))


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf"), 1e-45, FP32_MAX])
def test_unusable_global_scale_is_named_with_its_value(bad, tmp_path, files):
    path = files.make(tmp_path / "x.safetensors", files.modelopt(bad))
    with pytest.raises(CheckpointError, match=re.escape(f"'w.weight_scale_2' is {np.float32(bad)};")):
        checkpoint.load(path, "w")
    findings = checkpoint.verify(path)
    assert [finding.severity for finding in findings] == ["error"]
    assert "w.weight_scale_2" in findings[0].message


@pytest.mark.parametrize("bad", [0.0, -0.0, -1.0, float("nan"), float("inf"), float("-inf"), 1e-40])
def test_so_is_one_of_compressed_tensors(bad, tmp_path, files):
    path = files.make(tmp_path / "x.safetensors", files.compressed_tensors(bad))
    with pytest.raises(CheckpointError, match=f"'w.weight_global_scale' is {np.float32(bad)}"):
        checkpoint.load(path, "w")
    (finding,) = checkpoint.verify(path)
    assert finding.severity == "error"
    assert "w.weight_global_scale" in finding.message
    for to in ("modelopt", "compressed-tensors", "fp32"):
        with pytest.raises(CheckpointError, match="'w.weight_global_scale' is"):
            checkpoint.convert(path, tmp_path / "y.safetensors", to)
        assert not (tmp_path / "y.safetensors").exists()


@pytest.mark.parametrize(
    "kind, name, bad", [("modelopt", "w.input_scale", 0.0), ("compressed_tensors", "w.input_global_scale", 1e-40)]
)
def test_unusable_input_scale_is_an_error_too(kind, name, bad, tmp_path, files):
    tensors = {**getattr(files, kind)(), name: ("F32", [], files.f32(bad))}
    path = files.make(tmp_path / "x.safetensors", tensors)
    for to in ("modelopt", "compressed-tensors"):
        with pytest.raises(CheckpointError, match=f"'{name}' is {np.float32(bad)}"):
            checkpoint.convert(path, tmp_path / "y.safetensors", to)
        assert not (tmp_path / "y.safetensors").exists()
    (finding,) = checkpoint.verify(path)
    assert finding.severity == "error"
    assert name in finding.message


@pytest.mark.parametrize("encode", [2.0**-127, 1.0, FP32_MAX])
def test_encode_scales_from_end_to_end_of_the_range_are_usable_in_either_convention(encode, tmp_path, files):
    path = files.make(tmp_path / "x.safetensors", files.compressed_tensors(encode))
    assert checkpoint.verify(path) == []
    checkpoint.convert(path, tmp_path / "y.safetensors", "modelopt")
    assert checkpoint.verify(tmp_path / "y.safetensors", "modelopt") == []
    loaded = checkpoint.load(tmp_path / "y.safetensors", "w", format="modelopt").global_scale[0]
    assert abs(float(loaded) / float(encode) - 1) <= 2.0**-21  # the decode scale of FP32_MAX is a subnormal of 22 bits


@pytest.mark.parametrize("form", ["modelopt", "compressed-tensors", "comfy"])
@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf"), 1e-40])
def test_save_refuses_a_global_scale_that_no_reader_takes(bad, form, tmp_path):
    scale = np.array([bad], np.float32)
    q = fp4rt.QuantizedTensor(np.zeros((1, 8), np.uint8), np.zeros((1, 1), np.uint8), scale, (1, 16), "linear")
    with pytest.raises(CheckpointError, match=f"the global scale of 'w' is {scale[0]}"):
        checkpoint.save(tmp_path / "x.safetensors", {"w": q}, format=form)
    assert not any(tmp_path.iterdir())


def test_doubled_decode_scale_doubles_every_value_exactly(tmp_path, files):
    one = values(files.make(tmp_path / "a.safetensors", files.modelopt(0.25)))
    two = values(files.make(tmp_path / "b.safetensors", files.modelopt(0.5)))
    assert two == [2 * v for v in one]
    assert max(two) == 6


@pytest.mark.parametrize("shape", [[], [1], [1, 1]])
@pytest.mark.parametrize("kind", ["modelopt", "compressed_tensors"])
def test_scalar_scales_are_read_in_any_shape(kind, shape, tmp_path, files):
    tensors = getattr(files, kind)()
    name = next(name for name in tensors if tensors[name][0] == "F32")
    tensors[name] = ("F32", shape, tensors[name][2])
    assert values(files.make(tmp_path / "x.safetensors", tensors)) == files.values


@pytest.mark.parametrize("dtype", ["F16", "BF16", "F64", "U8"])
def test_global_scale_of_another_dtype_is_refused(dtype, tmp_path, files):
    size = {"F64": 8, "U8": 1}.get(dtype, 2)
    tensors = {**files.modelopt(), "w.weight_scale_2": (dtype, [], bytes(size))}
    with pytest.raises(CheckpointError, match=rf"'w.weight_scale_2' is {dtype}; wanted F32"):
        checkpoint.open(files.make(tmp_path / "x.safetensors", tensors))


@pytest.mark.parametrize("tag", ["F8_E4M3", "U8"])
def test_scale_bytes_are_reinterpreted_and_never_converted(tag, tmp_path, files):
    """CASES B22: byte 0x38 is 1.0, whether the file calls it F8_E4M3 or U8."""
    tensors = {
        "w.weight": ("U8", [1, 8], b"\x77" * 8),
        "w.weight_scale": (tag, [1, 1], b"\x38"),
        "w.weight_scale_2": ("F32", [], files.f32(1.0)),
    }
    path = files.make(tmp_path / "x.safetensors", tensors)
    assert values(path) == [6.0] * 16
    checkpoint.convert(path, tmp_path / "y.safetensors", "compressed-tensors")
    written = TensorFile(tmp_path / "y.safetensors")
    assert written.entry("w.weight_scale").dtype == "F8_E4M3"
    assert bytes(written.raw("w.weight_scale")) == b"\x38"


@pytest.mark.parametrize("view", [np.uint8, np.int8, ml_dtypes.float8_e4m3fn])
def test_saved_scales_keep_their_bytes_whatever_dtype_holds_them(view, tmp_path):
    scales = np.array([[0x38]], np.uint8).view(view)
    q = fp4rt.QuantizedTensor(np.full((1, 8), 0x77, np.uint8), scales, np.ones(1, np.float32), (1, 16), "linear")
    checkpoint.save(tmp_path / "x.safetensors", {"w": q})
    assert bytes(TensorFile(tmp_path / "x.safetensors").raw("w.weight_scale")) == b"\x38"


@pytest.mark.parametrize("dtype", [np.int32, np.float64])
def test_scales_of_a_wrong_dtype_are_refused_naming_the_right_ones(dtype):
    with pytest.raises(DtypeError, match="float8_e4m3fn"):
        fp4rt.QuantizedTensor(
            np.zeros((1, 8), np.uint8), np.zeros((1, 1), dtype), np.ones(1, np.float32), (1, 16), "linear"
        )


def test_storable_scale_survives_any_number_of_conversions():
    """Every fp32 mantissa: after one trip through the decode convention nothing changes any more."""
    mantissas = np.arange(1 << 23, dtype=np.uint32)
    for exponent in (1, 100, 127, 128, 253):
        encode = (mantissas | np.uint32(exponent << 23)).view(np.float32)
        once = encode_scale(decode_scale(encode))
        assert np.array_equal(encode_scale(decode_scale(once)), once)
        decode = decode_scale(once)
        assert np.array_equal(decode_scale(encode_scale(decode)), decode)
        units = 1 if exponent < 253 else 2  # 1 / 2^126 is a subnormal, which has fewer bits
        assert np.abs(once.view(np.int32) - encode.view(np.int32)).max() <= units


def test_where_the_nearest_reciprocal_does_not_lead_back_no_other_does():
    """Every fp32 mantissa: beyond the root of 2 numbers lie closer than reciprocals, and some have none."""
    mantissas = np.arange(1 << 23, dtype=np.uint32)
    stored = (mantissas | np.uint32(127 << 23)).view(np.float32)
    nearest = encode_scale(stored)
    lost = decode_scale(nearest) != stored
    assert 0.17 < lost.mean() < 0.18
    assert stored[lost].min() > np.sqrt(2) > stored[~lost].min()
    for end in (0, 4):
        assert not np.any(decode_scale(np.nextafter(nearest, np.float32(end)))[lost] == stored[lost])


@pytest.mark.parametrize("encode", [FP32_MAX, 1e-38, 1.0, 3.3e38])
def test_storable_scale_is_finite_in_both_conventions(encode):
    stored = storable_scale(encode)
    assert np.isfinite(stored)
    assert stored > 0
    assert encode_scale(decode_scale(stored)) == stored
    assert abs(float(stored) / encode - 1) < 1e-6


def test_swapping_nibbles_twice_changes_nothing():
    data = np.arange(256, dtype=np.uint8)
    assert np.array_equal(swap_nibbles(swap_nibbles(data)), data)
    assert swap_nibbles(np.array([0x1F], np.uint8))[0] == 0xF1
    rows = np.arange(96, dtype=np.uint8).reshape(4, 24)
    for view in (rows, rows[:, :8], rows[::2], rows[:, 1:17], rows.reshape(-1)[1:89].reshape(11, 8)):
        assert np.array_equal(swap_nibbles(view), (view << 4) | (view >> 4))
