"""One safetensors file, memory-mapped and lazy: a tensor costs nothing until its bytes are touched.

Needs no torch. Views are read-only, zero-copy, in the file's own byte order (little endian), at any offset.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType

import numpy as np

from fp4rt.checkpoint import header
from fp4rt.checkpoint.dtypes import numpy_dtype
from fp4rt.checkpoint.header import Header, TensorEntry, printable
from fp4rt.errors import CheckpointError, counted

__all__ = ["TensorFile"]


class TensorFile(Mapping[str, np.ndarray]):
    """A safetensors file as a mapping from name to read-only NumPy array.

    F8_E4M3, BF16 and the other dtypes that NumPy lacks come back as the ml_dtypes dtype of the same bits; the packed
    sub-byte dtypes (F4, F6) as flat uint8. Closing the file invalidates the arrays.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open ``path`` and check its header; no tensor is read.

        Raises:
            CheckpointError: the file is no safetensors file, is truncated, or its header breaks a rule.
            OSError: the file cannot be opened.
        """
        self.path = Path(path)
        self._map: mmap.mmap | None = None
        descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise CheckpointError(f"{self.path}: not a regular file")
            self.header = _read_header(descriptor, status.st_size, str(self.path))
            self._map = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
        finally:
            os.close(descriptor)

    @property
    def metadata(self) -> dict[str, str]:
        """The ``__metadata__`` of the header."""
        return self.header.metadata

    def entry(self, name: str) -> TensorEntry:
        """Dtype, shape and byte range of a tensor.

        Raises:
            CheckpointError: the file has no such tensor.
        """
        entry = self.header.tensors.get(name)
        if entry is None:
            raise CheckpointError(f"{self.path}: no tensor named {printable(name)}")
        return entry

    def raw(self, name: str) -> memoryview:
        """The bytes of a tensor, read-only, not copied."""
        entry = self.entry(name)
        if self._map is None:
            raise CheckpointError(f"{self.path}: the file is closed")
        start = self.header.data_start + entry.start
        return memoryview(self._map)[start : start + entry.nbytes]

    def __getitem__(self, name: str) -> np.ndarray:
        entry = self.header.tensors.get(name)
        if entry is None:
            raise KeyError(name)
        data = np.frombuffer(self.raw(name), np.uint8)
        dtype = numpy_dtype(entry.dtype)
        return data if dtype is None else data.view(dtype).reshape(entry.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self.header.tensors)

    def __len__(self) -> int:
        return len(self.header.tensors)

    def __contains__(self, name: object) -> bool:
        return name in self.header.tensors

    def release(self, name: str) -> None:
        """Let the system drop the pages of a tensor from memory; reading it again brings them back."""
        entry = self.entry(name)
        first = -(-(self.header.data_start + entry.start) // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (self.header.data_start + entry.stop) // mmap.PAGESIZE * mmap.PAGESIZE
        if self._map is not None and last > first and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED, first, last - first)

    def close(self) -> None:
        """Give up the mapping; it goes away when the last array on it dies."""
        mapping, self._map = self._map, None
        if mapping is not None:
            with contextlib.suppress(BufferError):  # arrays of the user still look at it and keep it alive
                mapping.close()

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _read_header(descriptor: int, file_bytes: int, where: str) -> Header:
    field = os.pread(descriptor, header.SIZE_BYTES, 0)
    if len(field) < header.SIZE_BYTES:
        found = counted(file_bytes, "byte is", "bytes are")
        raise CheckpointError(f"{where}: {found} too few for a safetensors file, which starts with an 8-byte size")
    size = int.from_bytes(field, "little")
    header.check_size_field(size, file_bytes, where)
    raw = os.pread(descriptor, size, header.SIZE_BYTES)
    if len(raw) != size:
        raise CheckpointError(f"{where}: the file became shorter while its header was read")
    return header.parse(raw, file_bytes, where)
