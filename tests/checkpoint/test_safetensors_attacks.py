"""Broken and hostile safetensors files: one clear error each, naming the file; nothing is allocated for a lie."""

from __future__ import annotations

import json
import os
import resource
import time

import pytest

from fp4rt.checkpoint.dtypes import BITS, MAX_DIMENSIONS
from fp4rt.checkpoint.reader import TensorFile
from fp4rt.errors import CheckpointError


def header(**tensors):
    return json.dumps(tensors).encode()


def entry(dtype="U8", shape=(4,), offsets=(0, 4), **extra):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets), **extra}


BROKEN_HEADERS = {
    "not JSON": (b"{oops", b"", "not valid JSON"),
    "a list": (b"[1, 2]  ", b"", "must be a JSON object"),
    "not UTF-8": (b'{"\xff": 1}', b"", "not UTF-8"),
    "nested too deeply": (b'{"a":' + b"[" * 100_000, b"", "not valid JSON"),
    "a number of 10000 digits": (b'{"a": ' + b"9" * 10_000 + b"}", b"", "a number of 10000 digits"),
    "NaN": (b'{"a": NaN}', b"", "not valid JSON"),
    "unknown dtype": (header(a=entry("F7")), bytes(4), "unknown dtype"),
    "missing key": (b'{"a": {"dtype": "U8", "shape": [4]}}', bytes(4), "data_offsets"),
    "key too many": (header(a=entry(extra=1)), bytes(4), "wanted the keys"),
    "negative extent": (header(a=entry(shape=(-4,))), bytes(4), "shape"),
    "fractional extent": (header(a=entry(shape=(4.0,))), bytes(4), "shape"),
    "boolean extent": (header(a=entry(shape=(True, 4))), bytes(4), "shape"),
    "shape too small": (header(a=entry(shape=(3,))), bytes(4), "needs 3 bytes"),
    "shape of one byte": (header(a=entry(shape=(1,))), bytes(4), "needs 1 byte but"),
    "gigantic shape": (header(a=entry(shape=(2**62, 2**62))), bytes(4), "hold 4"),
    "product overflows to the right size": (header(a=entry(shape=(2**32, 2**32 + 1))), bytes(4), "hold 4"),
    "extent of 100 digits": (
        header(a=entry(shape=(0, 10**99), offsets=(0, 0))),
        b"",
        "shape must be a list of integers",
    ),
    "extent of 64 bits": (header(a=entry(shape=(0, 2**63), offsets=(0, 0))), b"", "from 0 to 9223372036854775807, got"),
    "offset of 64 bits": (header(a=entry(offsets=(0, 2**63))), bytes(4), "from 0 to 9223372036854775807, got"),
    "gigantic beside a 0": (
        header(a=entry(shape=(2**62, 2, 0), offsets=(0, 0))),
        b"",
        "beyond the 9223372036854775807",
    ),
    "a byte too many beside a 0": (header(a=entry("F64", (0, 2**60), (0, 0))), b"", "beyond the 9223372036854775807"),
    "too many dimensions": (header(a=entry("F32", [1] * 65)), bytes(4), "65 dimensions; an array has at most"),
    "offsets backwards": (header(a=entry(offsets=(4, 0))), bytes(4), "do not lie in"),
    "offset behind the data": (header(a=entry(shape=(8,), offsets=(0, 8))), bytes(4), "do not lie in"),
    "offset behind one byte": (header(a=entry()), bytes(1), "in the 1 byte of data"),
    "negative offset": (header(a=entry(offsets=(-4, 0))), bytes(4), "data_offsets"),
    "three offsets": (header(a=entry(offsets=(0, 2, 4))), bytes(4), "data_offsets"),
    "overlap": (header(a=entry(), b=entry(offsets=(2, 6))), bytes(6), "overlap"),
    "same bytes twice": (header(a=entry(), b=entry()), bytes(4), "overlap"),
    "hole": (header(a=entry(), b=entry(offsets=(6, 10))), bytes(10), "belong to no tensor"),
    "bytes left over": (header(a=entry()), bytes(5), "the data has 5 bytes"),
    "one byte left over": (header(a=entry(shape=(0,), offsets=(0, 0))), bytes(1), "the data has 1 byte$"),
    "metadata of numbers": (b'{"__metadata__": {"a": 1}}', b"", "__metadata__.*got 'a': 1"),
    "metadata that is a list": (b'{"__metadata__": ["a"]}', b"", "__metadata__"),
    "half a surrogate pair in a name": (header(**{"\ud800": entry()}), bytes(4), r"of UTF-8, got '\\ud800'"),
    "half a surrogate pair in a key of the metadata": (
        header(__metadata__={"\udfff": "a"}),
        b"",
        r"got '\\udfff': 'a'",
    ),
    "half a surrogate pair in the metadata": (header(__metadata__={"a": "\ud800"}), b"", r"got 'a': '\\ud800'"),
    "half a byte": (header(a=entry("F4", (3,), (0, 2))), bytes(2), "whole number of bytes"),
}


@pytest.mark.parametrize("case", BROKEN_HEADERS)
def test_broken_header_is_refused_naming_the_file(case, tmp_path, files):
    raw, data, message = BROKEN_HEADERS[case]
    path = files.with_header(tmp_path / "broken.safetensors", raw, data)
    with pytest.raises(CheckpointError, match=message) as error:
        TensorFile(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "shape, offsets",
    [([10**4299] * 400, (0, 4)), ([10**99] * 100_000, (0, 4)), ([2**62] * 100_000, (0, 4)), ([4], (0, 10**4299))],
    ids=["gigantic extents", "large extents", "dimensions", "offset"],
)
def test_gigantic_numbers_cost_no_time_and_no_screen(shape, offsets, tmp_path, files):
    path = files.with_header(tmp_path / "x.safetensors", header(a=entry(shape=shape, offsets=offsets)), bytes(4))
    before = time.process_time()
    with pytest.raises(CheckpointError, match=r"x\.safetensors") as error:
        TensorFile(path)
    assert time.process_time() - before < 2
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize(
    "dtype, shape",
    [
        ("F32", [1] * MAX_DIMENSIONS),
        ("F64", [0] * MAX_DIMENSIONS),
        ("U8", [0, 2**63 - 1]),
        ("BF16", [2**62 - 1, 0]),
        ("F64", [1, 2**60 - 1, 0]),
    ],
)
def test_the_largest_shapes_that_are_accepted_are_ones_that_numpy_takes(dtype, shape, tmp_path, files):
    data = bytes(0 if 0 in shape else BITS[dtype] // 8)
    raw = header(a=entry(dtype, shape, (0, len(data))))
    array = TensorFile(files.with_header(tmp_path / "x.safetensors", raw, data))["a"]
    assert array.shape == tuple(shape)


def test_duplicate_name_is_refused(tmp_path, files):
    one = json.dumps(entry(shape=(2,), offsets=(0, 2))), json.dumps(entry(shape=(2,), offsets=(2, 4)))
    raw = f'{{"a": {one[0]}, "a": {one[1]}}}'.encode()
    with pytest.raises(CheckpointError, match="'a' twice"):
        TensorFile(files.with_header(tmp_path / "x.safetensors", raw, bytes(4)))


@pytest.mark.parametrize("claimed", [2**63 - 1, 2**64 - 1, 101_000_000, 200])
def test_header_length_beyond_the_file_is_refused_without_allocating(claimed, tmp_path, files):
    path = files.with_header(tmp_path / "x.safetensors", header(a=entry()), bytes(4), claimed)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError, match="claims"):
        TensorFile(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # kB


def test_header_length_beyond_the_format_is_refused_though_the_file_has_it(tmp_path):
    path = tmp_path / "x.safetensors"
    with open(path, "wb") as file:  # sparse: takes no room
        file.write((100_000_001).to_bytes(8, "little"))
        file.truncate(200_000_000)
    with pytest.raises(CheckpointError, match="more than the format's"):
        TensorFile(path)


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9])
def test_file_too_short_for_a_header_is_refused(length, tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"\x10" + bytes(max(0, length - 1)) if length else b"")
    with pytest.raises(CheckpointError, match=r"x\.safetensors"):
        TensorFile(path)


@pytest.mark.parametrize(
    "claimed, rest, message",
    [
        (1, b"{}", "claims 1 byte; the shortest"),
        (2, b"{", "claims 2 bytes but only 1 follows"),
        (1, b"", "claims 1 byte but only 0 follow"),
    ],
)
def test_a_header_of_one_byte_is_counted_in_the_singular(claimed, rest, message, tmp_path, files):
    with pytest.raises(CheckpointError, match=message):
        TensorFile(files.with_header(tmp_path / "x.safetensors", b"", rest, claimed))
    (tmp_path / "x.safetensors").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="1 byte is too few"):
        TensorFile(tmp_path / "x.safetensors")


@pytest.mark.parametrize("missing", [1, 3, 12, 13])
def test_truncated_file_is_refused(missing, tmp_path, files):
    path = files.make(tmp_path / "x.safetensors", files.modelopt())
    path.write_bytes(path.read_bytes()[:-missing])
    with pytest.raises(CheckpointError, match="do not lie in"):
        TensorFile(path)


def test_hostile_name_cannot_flood_the_message(tmp_path, files):
    raw = header(**{"\x1b[31m" * 100_000: entry("F7")})
    with pytest.raises(CheckpointError) as error:
        TensorFile(files.with_header(tmp_path / "x.safetensors", raw, bytes(4)))
    assert len(str(error.value)) < 1000
    assert "\x1b" not in str(error.value)


def test_what_is_no_regular_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "fifo.safetensors")
    descriptor = os.open(tmp_path / "fifo.safetensors", os.O_RDWR)  # so that opening for reading does not wait
    try:
        with pytest.raises(CheckpointError, match="not a regular file"):
            TensorFile(tmp_path / "fifo.safetensors")
    finally:
        os.close(descriptor)
