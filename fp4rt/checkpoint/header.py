"""The header of a safetensors file: parsed strictly, written canonically. Bytes only; no file is opened here.

A file is ``u64 header size | JSON header | data``. The header maps a name to dtype, shape and the half-open byte
range of its data; the ranges must tile the data exactly: no overlap, no hole, no byte left over. The optional
``__metadata__`` maps strings to strings.

Everything that a hostile or broken file can claim is checked before anything is allocated for it.

Source: safetensors README, "Format"; the limit of 100 MB is that of its Rust crate.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fp4rt.checkpoint.dtypes import BITS, MAX_DIMENSIONS
from fp4rt.errors import CheckpointError, counted

__all__ = [
    "HEADER_ALIGNMENT",
    "MAX_HEADER_BYTES",
    "SIZE_BYTES",
    "Header",
    "TensorEntry",
    "parse",
    "serialize",
]

SIZE_BYTES = 8
HEADER_ALIGNMENT = 8
MAX_HEADER_BYTES = 100_000_000
MAX_DIGITS = 100  # of a number; no size has as many, and the time to read one grows with their square
MAX_SIZE = 2**63 - 1  # of an extent, and of an array in bytes
METADATA_KEY = "__metadata__"


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a header: dtype tag, shape, and ``start``/``stop`` in bytes from the start of the data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor in the file."""
        return self.stop - self.start


@dataclass(frozen=True)
class Header:
    """Parsed header: tensors by name in the order of their data, metadata, and where the data starts in the file."""

    tensors: dict[str, TensorEntry]
    metadata: dict[str, str]
    data_start: int
    data_bytes: int


def tensor_bytes(dtype: str, shape: Iterable[int]) -> int | None:
    """Bytes that ``shape`` elements of ``dtype`` take; None if they are no whole number of bytes."""
    bits = BITS[dtype]
    for extent in shape:
        bits *= extent
    return None if bits % 8 else bits // 8


def parse(raw: bytes, file_bytes: int, where: str) -> Header:
    """Parse and check a header.

    Args:
        raw: the JSON bytes that follow the size field.
        file_bytes: size of the whole file.
        where: name of the file, for messages.

    Raises:
        CheckpointError: the header breaks a rule of the format; the message names the file and the rule.
    """
    table = _decode_json(raw, where)
    metadata = check_metadata(table.pop(METADATA_KEY, {}), where)
    data_start = SIZE_BYTES + len(raw)
    data_bytes = file_bytes - data_start
    entries = [_check_entry(name, value, data_bytes, where) for name, value in table.items()]
    entries.sort(key=lambda entry: (entry.start, entry.stop))
    _check_tiling(entries, data_bytes, where)
    return Header({entry.name: entry for entry in entries}, metadata, data_start, data_bytes)


def check_size_field(size: int, file_bytes: int, where: str) -> None:
    """Refuse a header size that the file cannot hold or that nobody writes.

    Raises:
        CheckpointError: the size is impossible.
    """
    claim = f"{where}: the header claims {counted(size, 'byte')}"
    if size > file_bytes - SIZE_BYTES:
        rest = counted(max(0, file_bytes - SIZE_BYTES), "follows", "follow")
        raise CheckpointError(
            f"{claim} but only {rest} its size field (file of {file_bytes} bytes); the file is truncated or is no "
            "safetensors file"
        )
    if size > MAX_HEADER_BYTES:
        raise CheckpointError(f"{claim}, more than the format's {MAX_HEADER_BYTES}")
    if size < 2:
        raise CheckpointError(f"{claim}; the shortest header is 2 bytes")


def serialize(entries: Iterable[TensorEntry], metadata: Mapping[str, str]) -> bytes:
    """Size field and header for ``entries``, padded with spaces so that the data starts at a multiple of 8."""
    table: dict[str, Any] = {}
    if metadata:
        table[METADATA_KEY] = dict(sorted(metadata.items()))
    for entry in entries:
        table[entry.name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [entry.start, entry.stop],
        }
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % HEADER_ALIGNMENT)
    return len(text).to_bytes(SIZE_BYTES, "little") + text


def _decode_json(raw: bytes, where: str) -> dict[str, Any]:
    """The header's JSON object, without duplicate keys."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) != len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise CheckpointError(f"{where}: the header has the key {printable(twice)} twice")
        return table

    def refuse_constant(name: str) -> Any:
        raise ValueError(f"{name} is no JSON number")

    def integer(digits: str) -> int:
        if len(digits) > MAX_DIGITS:
            raise CheckpointError(f"{where}: the header has a number of {len(digits)} digits; no size has as many")
        return int(digits)

    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{where}: the header is not UTF-8 (byte {error.start}); no name can be read") from None
    try:
        table = json.loads(text, object_pairs_hook=unique, parse_int=integer, parse_constant=refuse_constant)
    except (ValueError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise CheckpointError(f"{where}: the header is not valid JSON: {reason}") from None
    if not isinstance(table, dict):
        raise CheckpointError(f"{where}: the header must be a JSON object, got {type(table).__name__}")
    return table


def check_metadata(metadata: Any, where: str) -> dict[str, str]:
    """The metadata, after checking that a header can hold it.

    Raises:
        CheckpointError: it is no mapping of strings to strings.
    """
    wanted = f"{where}: {METADATA_KEY} must map strings to strings of UTF-8"
    if not isinstance(metadata, Mapping):
        raise CheckpointError(f"{wanted}, got {printable(metadata)}")
    for key, value in metadata.items():
        if not (_is_text(key) and _is_text(value)):
            raise CheckpointError(f"{wanted}, got {printable(key)}: {printable(value)}")
    return dict(metadata)


def check_name(name: Any, where: str) -> None:
    """Refuse a tensor's name that a header cannot hold.

    Raises:
        CheckpointError: it is no string of UTF-8.
    """
    if not _is_text(name):
        raise CheckpointError(f"{where}: a tensor's name must be a string of UTF-8, got {printable(name)}")


def _check_entry(name: str, value: Any, data_bytes: int, where: str) -> TensorEntry:
    """One entry, its range inside the data and as long as dtype and shape say."""
    check_name(name, where)
    label = f"{where}: tensor {printable(name)}"
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{label}: wanted the keys dtype, shape and data_offsets, got {_keys(value)}")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise CheckpointError(f"{label}: unknown dtype {printable(dtype)}; known are {', '.join(BITS)}")
    if not isinstance(shape, list) or not all(_is_size(extent) for extent in shape):
        raise CheckpointError(f"{label}: shape must be a list of integers from 0 to {MAX_SIZE}, got {printable(shape)}")
    if len(shape) > MAX_DIMENSIONS:
        raise CheckpointError(f"{label}: shape has {len(shape)} dimensions; an array has at most {MAX_DIMENSIONS}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_size(offset) for offset in offsets):
        raise CheckpointError(
            f"{label}: data_offsets must be two integers from 0 to {MAX_SIZE}, got {printable(offsets)}"
        )
    start, stop = offsets
    if start > stop or stop > data_bytes:
        raise CheckpointError(
            f"{label}: data_offsets [{start}, {stop}] do not lie in the {counted(data_bytes, 'byte')} of data; "
            "the file is truncated or its header lies"
        )
    if not _is_countable(dtype, shape):
        raise CheckpointError(
            f"{label}: shape {printable(shape)} of {dtype} is beyond the {MAX_SIZE} bytes of an array; data_offsets "
            f"[{start}, {stop}] hold {stop - start}"
        )
    wanted = tensor_bytes(dtype, shape)
    if wanted != stop - start:
        needed = "a whole number of bytes" if wanted is None else counted(wanted, "byte")
        raise CheckpointError(
            f"{label}: shape {printable(shape)} of {dtype} needs {needed} but data_offsets [{start}, {stop}] hold "
            f"{stop - start}"
        )
    return TensorEntry(name, dtype, tuple(shape), start, stop)


def _check_tiling(entries: list[TensorEntry], data_bytes: int, where: str) -> None:
    """The sorted ranges follow each other from 0 to the end of the data."""
    position = 0
    previous = ""
    for entry in entries:
        if entry.start < position:
            raise CheckpointError(
                f"{where}: the data of {printable(previous)} and {printable(entry.name)} overlap at byte {entry.start}"
            )
        if entry.start > position:
            raise CheckpointError(
                f"{where}: bytes {position} to {entry.start} of the data belong to no tensor (before "
                f"{printable(entry.name)})"
            )
        position, previous = entry.stop, entry.name
    if position != data_bytes:
        size = counted(data_bytes, "byte")
        raise CheckpointError(f"{where}: the tensors end at byte {position} but the data has {size}")


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_SIZE


def _is_text(value: Any) -> bool:
    """Whether UTF-8 can hold a string: not where it has half a surrogate pair, which JSON can spell."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_countable(dtype: str, shape: list[int]) -> bool:
    """Whether an array may have this shape; the extents beside a 0 are bounded too, as NumPy wants them."""
    bits = BITS[dtype]
    for extent in shape:
        bits *= extent or 1
        if bits > 8 * MAX_SIZE:
            return False
    return True


def _keys(value: Any) -> str:
    return printable(sorted(value)) if isinstance(value, dict) else type(value).__name__


def printable(value: Any, limit: int = 120) -> str:
    """``repr`` of a value of a file, short and on one line, so that a hostile name cannot flood a terminal."""
    text = ascii(value)
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"
