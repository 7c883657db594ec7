"""All tensors of a checkpoint by name, over however many files; opened on first use, nothing copied."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fp4rt.checkpoint.folder import Location, locate
from fp4rt.checkpoint.formats import FORMATS, LayerName
from fp4rt.checkpoint.header import TensorEntry, printable
from fp4rt.checkpoint.reader import TensorFile
from fp4rt.errors import CheckpointError
from fp4rt.format import CODES_PER_BYTE

__all__ = ["Store"]

# Codes of NVFP4 by other names of their bytes: PyTorch's float4_e2m1fn_x2, which files count in single codes, and int8.
CODES_PER_ELEMENT = {"F4": CODES_PER_BYTE, "I8": 1}


class Store(Mapping[str, np.ndarray]):
    """The tensors of one file or of all shards of a folder, as read-only arrays by name.

    Codes beside a global scale are U8 here, also where the file calls their bytes F4 or I8.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open every shard and check that index and shards agree.

        Raises:
            CheckpointError: a file is broken, a tensor lies in two shards, or the index and the shards differ.
        """
        self.location: Location = locate(path)
        self.reaches: dict[Any, float] = {}  # what quantizing has found of its weights, by name, method and expert
        self._state = self._files_state()
        self.files: dict[str, TensorFile] = {}
        self._home: dict[str, TensorFile] = {}
        try:
            for shard in self.location.shards:
                self._add(TensorFile(shard))
            self._check_index()
            self._codes = {name: entry for name in self._home if (entry := self._entry_of_codes(name)) is not None}
        except BaseException:
            self.close()
            raise

    def _files_state(self) -> list[tuple[int, int, int]]:
        stats = [os.stat(shard) for shard in self.location.shards]
        return [(status.st_ino, status.st_size, status.st_mtime_ns) for status in stats]

    def changed(self) -> bool:
        """Whether a file was replaced or written to since it was opened."""
        try:
            return self._files_state() != self._state
        except FileNotFoundError:
            return True

    def _add(self, file: TensorFile) -> None:
        self.files[file.path.name] = file
        for name in file:
            if name in self._home:
                raise CheckpointError(
                    f"{self.location.path}: tensor {printable(name)} lies in two shards, "
                    f"{self._home[name].path.name} and {file.path.name}"
                )
            self._home[name] = file

    def _check_index(self) -> None:
        index, weight_map = self.location.index, self.location.weight_map
        if index is None:
            return
        for name, shard in weight_map.items():
            if name not in self._home or self._home[name].path.name != shard:
                raise CheckpointError(f"{index}: tensor {printable(name)} is not in {shard}, where the index puts it")
        for name, file in self._home.items():
            if name not in weight_map:
                raise CheckpointError(f"{index}: tensor {printable(name)} of {file.path.name} is not in the index")

    @property
    def path(self) -> Path:
        """What the user named."""
        return self.location.path

    def file_of(self, name: str) -> TensorFile:
        """The file that holds a tensor.

        Raises:
            CheckpointError: no file does.
        """
        file = self._home.get(name)
        if file is None:
            raise CheckpointError(f"{self.path}: no tensor named {printable(name)}")
        return file

    def entry(self, name: str) -> TensorEntry:
        """Dtype, shape and size of a tensor."""
        return self._codes.get(name) or self.file_of(name).entry(name)

    def _entry_of_codes(self, name: str) -> TensorEntry | None:
        entry = self._home[name].entry(name)
        count = CODES_PER_ELEMENT.get(entry.dtype)
        if count is None or not entry.shape or entry.shape[-1] % count != 0:
            return None
        layers = ((LayerName.of_data(name, form), form) for form in FORMATS.values())
        if not any(layer is not None and layer.global_scale(form) in self._home for layer, form in layers):
            return None
        return replace(entry, dtype="U8", shape=(*entry.shape[:-1], entry.shape[-1] // count))

    def raw(self, name: str) -> memoryview:
        """The bytes of a tensor."""
        return self.file_of(name).raw(name)

    def release(self, name: str) -> None:
        """Let the system drop a tensor's pages."""
        self.file_of(name).release(name)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(file.header.data_bytes for file in self.files.values())

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._home:
            raise KeyError(name)
        codes = self._codes.get(name)
        if codes is not None:
            return np.frombuffer(self.raw(name), np.uint8).reshape(codes.shape)
        return self._home[name][name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._home)

    def __len__(self) -> int:
        return len(self._home)

    def __contains__(self, name: object) -> bool:
        return name in self._home

    def close(self) -> None:
        """Close every file."""
        for file in self.files.values():
            file.close()
