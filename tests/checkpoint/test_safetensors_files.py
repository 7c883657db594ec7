"""Reading and writing single files without torch: every dtype, every offset, all or nothing."""

from __future__ import annotations

import errno
import hashlib
import json
import os

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

import fp4rt
from fp4rt import checkpoint
from fp4rt.checkpoint.dtypes import BITS, numpy_dtype
from fp4rt.checkpoint.reader import TensorFile
from fp4rt.checkpoint.writer import TensorFileWriter, TensorSpec
from fp4rt.errors import CheckpointError, DtypeError


def b41(files):
    """CASES B41: a 0-d F32 at the odd offset 9, and BF16 behind it."""
    bf16 = np.array([1.5, -2], ml_dtypes.bfloat16).tobytes()
    return {**files.modelopt(), "norm.weight": ("BF16", [2], bf16)}


def test_float8_and_bfloat16_are_read_at_odd_offsets(tmp_path, files):
    with TensorFile(files.make(tmp_path / "x.safetensors", b41(files))) as file:
        assert file.entry("w.weight_scale_2").start == 9
        assert file["w.weight_scale_2"].shape == ()
        assert file["w.weight_scale_2"] == np.float32(0.25)
        assert file["w.weight_scale"].dtype == ml_dtypes.float8_e4m3fn
        assert file["w.weight_scale"].view(np.uint8)[0, 0] == 0x40
        assert file["norm.weight"].astype(np.float32).tolist() == [1.5, -2]


def test_round_trip_keeps_every_byte_and_dtype(tmp_path, files):
    source = TensorFile(files.make(tmp_path / "x.safetensors", b41(files), {"format": "pt"}))
    specs = [TensorSpec(name, source.entry(name).dtype, source.entry(name).shape) for name in source]
    with TensorFileWriter(tmp_path / "y.safetensors", specs, source.metadata) as writer:
        for spec in specs:
            writer.write(spec.name, source.raw(spec.name))
    copy = TensorFile(tmp_path / "y.safetensors")
    assert set(copy) == set(source)
    assert copy.metadata == {"format": "pt"}
    for name in source:
        assert (copy.entry(name).dtype, copy.entry(name).shape) == (source.entry(name).dtype, source.entry(name).shape)
        assert bytes(copy.raw(name)) == bytes(source.raw(name))
    assert hashlib.sha256((tmp_path / "y.safetensors").read_bytes()).hexdigest() == writer.sha256
    assert writer.nbytes == (tmp_path / "y.safetensors").stat().st_size


@pytest.mark.parametrize("tag", [tag for tag in BITS if numpy_dtype(tag) is not None])
def test_every_dtype_is_read_as_its_bits(tag, tmp_path, files):
    data = bytes(range(1, 25)) if tag != "BOOL" else bytes([0, 1] * 12)
    count = 24 * 8 // BITS[tag]
    file = TensorFile(files.make(tmp_path / "x.safetensors", {"pad": ("U8", [1], b"\0"), "x": (tag, [count], data)}))
    assert file["x"].shape == (count,)
    assert file["x"].tobytes() == data
    assert not file["x"].flags.writeable


def test_files_of_the_safetensors_package_are_read(tmp_path):
    arrays = {"a": np.arange(12, dtype=np.int64).reshape(3, 4), "b": np.float16([1.5]), "empty": np.zeros((0, 3))}
    safetensors.numpy.save_file(arrays, tmp_path / "x.safetensors", {"k": "v"})
    with TensorFile(tmp_path / "x.safetensors") as file:
        assert dict(file.metadata) == {"k": "v"}
        for name, array in arrays.items():
            np.testing.assert_array_equal(file[name], array)


def test_the_safetensors_package_reads_our_files(tmp_path):
    specs = [TensorSpec("odd", "U8", (3,)), TensorSpec("s", "F32", ()), TensorSpec("big", "F32", (4, 4))]
    with TensorFileWriter(tmp_path / "x.safetensors", specs, {}) as writer:
        writer.write("odd", b"abc")
        writer.write("s", np.float32(7))
        writer.write("big", np.eye(4, dtype=np.float32))
    loaded = safetensors.numpy.load_file(tmp_path / "x.safetensors")
    assert loaded["s"] == 7
    assert loaded["odd"].tobytes() == b"abc"
    np.testing.assert_array_equal(loaded["big"], np.eye(4))


def test_every_tensor_lies_at_a_multiple_of_its_element_size(tmp_path):
    specs = [
        TensorSpec("three", "U8", (3,)),
        TensorSpec("f64", "F64", (2,)),
        TensorSpec("scalar", "F32", ()),
        TensorSpec("five", "U8", (5,)),
        TensorSpec("half", "BF16", (3,)),
        TensorSpec("i64", "I64", (1,)),
    ]
    with TensorFileWriter(tmp_path / "x.safetensors", specs, {}) as writer:
        for spec in specs:
            writer.write(spec.name, bytes(spec.nbytes))
    file = TensorFile(tmp_path / "x.safetensors")
    assert file.header.data_start % 8 == 0
    for entry in file.header.tensors.values():
        assert entry.start % (BITS[entry.dtype] // 8) == 0, entry


def test_arrays_outlive_a_closed_file(tmp_path, files):
    file = TensorFile(files.make(tmp_path / "x.safetensors", files.modelopt()))
    array = file["w.weight"]
    file.close()
    assert array.tobytes() == files.codes


def specs_of_one():
    return [TensorSpec("x", "U8", (4,))]


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def test_exception_leaves_no_file(tmp_path):
    with pytest.raises(RuntimeError, match="stop"), TensorFileWriter(tmp_path / "x.safetensors", specs_of_one(), {}):
        assert names_in(tmp_path) == [".x.safetensors.partial"]
        raise RuntimeError("stop")
    assert names_in(tmp_path) == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_full_disk_leaves_no_file_and_the_old_one_whole(code, tmp_path, monkeypatch):
    (tmp_path / "x.safetensors").write_bytes(b"old")
    real = os.write

    def failing(descriptor, data):
        if len(data) == 4:
            raise OSError(code, os.strerror(code))
        return real(descriptor, data)

    monkeypatch.setattr(os, "write", failing)
    with (
        pytest.raises(OSError, match=os.strerror(code)),
        TensorFileWriter(tmp_path / "x.safetensors", specs_of_one(), {}) as writer,
    ):
        writer.write("x", b"data")
    assert names_in(tmp_path) == ["x.safetensors"]
    assert (tmp_path / "x.safetensors").read_bytes() == b"old"


def test_disk_without_room_is_refused_before_any_byte(tmp_path):
    with pytest.raises(CheckpointError, match="has .* free"):
        TensorFileWriter(tmp_path / "x.safetensors", [TensorSpec("x", "U8", (1 << 60,))], {})
    assert names_in(tmp_path) == []


@pytest.mark.parametrize(
    "write, message",
    [
        (lambda writer: writer.write("y", b"data"), "not announced"),
        (lambda writer: (writer.write("x", b"data"), writer.write("x", b"data")), "came twice"),
        (lambda writer: writer.write("x", b"data!"), "needs 4 bytes, got 5"),
        (lambda writer: None, "never written"),
    ],
)
def test_writer_refuses_what_was_not_announced(write, message, tmp_path):
    with (
        pytest.raises(CheckpointError, match=message),
        TensorFileWriter(tmp_path / "x.safetensors", specs_of_one(), {}) as writer,
    ):
        write(writer)
    assert names_in(tmp_path) == []


def test_two_tensors_of_one_name_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="two tensors"):
        TensorFileWriter(tmp_path / "x.safetensors", specs_of_one() * 2, {})


def test_planted_link_is_replaced_and_not_followed(tmp_path):
    outside = tmp_path / "outside"
    outside.write_bytes(b"precious")
    folder = tmp_path / "out"
    folder.mkdir()
    for name in ("x.safetensors", ".x.safetensors.partial"):
        (folder / name).symlink_to(outside)
    with TensorFileWriter(folder / "x.safetensors", specs_of_one(), {}) as writer:
        writer.write("x", b"data")
    assert outside.read_bytes() == b"precious"
    assert not (folder / "x.safetensors").is_symlink()
    assert names_in(folder) == ["x.safetensors"]


def test_header_is_compact_json_in_utf8(tmp_path):
    with TensorFileWriter(tmp_path / "x.safetensors", [TensorSpec("gewichtäß", "U8", (4,))], {"b": "2", "a": "1"}) as w:
        w.write("gewichtäß", b"data")
    raw = (tmp_path / "x.safetensors").read_bytes()
    size = int.from_bytes(raw[:8], "little")
    assert list(json.loads(raw[8 : 8 + size])["__metadata__"]) == ["a", "b"]
    assert list(TensorFile(tmp_path / "x.safetensors")) == ["gewichtäß"]


@pytest.mark.parametrize("path", [None, 3, [], b"x"])
def test_a_place_that_is_no_path_is_refused(path):
    for call in (checkpoint.open, checkpoint.verify):
        with pytest.raises(DtypeError, match="a checkpoint needs its place as a path, got"):
            call(path)
    with pytest.raises(DtypeError, match="save needs path as a path, got"):
        checkpoint.save(path, {})


def test_things_that_are_no_tensors_are_refused(tmp_path):
    with pytest.raises(DtypeError, match="save needs tensors as a mapping from names to tensors, got None"):
        checkpoint.save(tmp_path / "a.safetensors", None)
    weight = fp4rt.quantize(np.ones((16, 64), np.float32))
    with pytest.raises(DtypeError, match=r"got PrepackedWeight; \.unpack\(\) gives back"):
        checkpoint.save(tmp_path / "a.safetensors", {"a": fp4rt.prepack(weight)})
    with pytest.raises(DtypeError, match=r"fuse needs parts\[1\] as a QuantizedTensor, got ndarray"):
        checkpoint.fuse([weight.relayout("linear"), np.ones(3)])
    assert not list(tmp_path.iterdir())
