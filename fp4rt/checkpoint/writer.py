"""A safetensors file written tensor by tensor: the header first, then the data as it comes.

What must hold: every name, dtype and shape is known before the first byte of data. The file grows under a temporary
name in its own folder, is synced and renamed at the end, so that no reader ever sees half a file and a full disk or
an exception leaves nothing behind.

Order of the data: tensors whose size is a multiple of 8 bytes in the caller's order, then the others by falling
element size. So every tensor lies at a multiple of its element size, as torch needs it, without holding more back
than a few scalars.
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np

from fp4rt.checkpoint import header
from fp4rt.checkpoint.dtypes import BITS
from fp4rt.checkpoint.header import TensorEntry, printable
from fp4rt.errors import CheckpointError

__all__ = ["CHUNK_BYTES", "TensorFileWriter", "TensorSpec", "partial_path", "sync_folder", "write_atomically"]

CHUNK_BYTES = 8 << 20
ALIGNMENT = 8


@dataclass(frozen=True)
class TensorSpec:
    """Name, dtype tag and shape of a tensor to come."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor in the file."""
        nbytes = header.tensor_bytes(self.dtype, self.shape)
        if nbytes is None:
            raise CheckpointError(f"{printable(self.name)}: {self.shape} of {self.dtype} is no whole number of bytes")
        return nbytes

    @property
    def streams(self) -> bool:
        """Whether the tensor may be written where the caller has it, without spoiling the alignment of others."""
        return self.nbytes % ALIGNMENT == 0


def partial_path(path: Path) -> Path:
    """The temporary name under which ``path`` grows."""
    return path.with_name(f".{path.name}.partial")


def data_order(specs: Iterable[TensorSpec]) -> list[TensorSpec]:
    """The order in which the data of ``specs`` follows each other in the file."""
    specs = list(specs)
    streaming = [spec for spec in specs if spec.streams]
    rest = [spec for spec in specs if not spec.streams]
    return streaming + sorted(rest, key=lambda spec: -BITS[spec.dtype])


class TensorFileWriter:
    """Writes one file; use it as a context manager. Leaving it by an exception removes the temporary file.

    After a clean exit ``sha256`` and ``nbytes`` describe the whole file, and ``path`` exists.
    """

    def __init__(self, path: str | os.PathLike[str], specs: Iterable[TensorSpec], metadata: Mapping[str, str]) -> None:
        """Create the temporary file beside ``path`` and write the header.

        Raises:
            CheckpointError: a name occurs twice, or the disk has no room for the file.
            OSError: the file cannot be created.
        """
        self.path = Path(path)
        self.sha256 = ""
        self.nbytes = 0
        entries = _place(data_order(specs))
        self._awaited = {entry.name: entry for entry in entries}
        self._order = deque(self._awaited)
        self._held: dict[str, memoryview] = {}
        _check_room(self.path, entries[-1].stop if entries else 0)
        self._hash = hashlib.sha256()
        self._hasher = ThreadPoolExecutor(1, thread_name_prefix="fp4rt-sha256")
        self._partial = partial_path(self.path)
        self._descriptor = _create(self._partial)
        try:
            self._append(memoryview(header.serialize(entries, metadata)))
        except BaseException:
            self._discard()
            raise

    def write(self, name: str, data: np.ndarray | bytes | memoryview) -> None:
        """Take the bytes of a tensor; they are written at once where the order allows it, else kept until then.

        Raises:
            CheckpointError: the name is not expected, came already, or the size does not fit.
        """
        view = _bytes_of(data)
        entry = self._awaited.pop(name, None)
        if entry is None:
            raise CheckpointError(f"{self.path}: tensor {printable(name)} was not announced, or came twice")
        if view.nbytes != entry.nbytes:
            raise CheckpointError(f"{self.path}: {printable(name)} needs {entry.nbytes} bytes, got {view.nbytes}")
        self._held[name] = view
        while self._order and self._order[0] in self._held:
            self._append(self._held.pop(self._order.popleft()))

    def _append(self, view: memoryview) -> None:
        """Write a tensor; another thread hashes it meanwhile."""
        chunks = [view[start : start + CHUNK_BYTES] for start in range(0, view.nbytes, CHUNK_BYTES)]
        hashed = [self._hasher.submit(self._hash.update, chunk) for chunk in chunks]
        try:
            for chunk in chunks:
                written = 0
                while written < chunk.nbytes:
                    written += os.write(self._descriptor, chunk[written:])
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from None
        finally:
            wait(hashed)
        self.nbytes += view.nbytes

    def commit(self) -> None:
        """Sync, rename to the final name, and sync the folder.

        Raises:
            CheckpointError: an announced tensor never came.
        """
        if self._order:
            raise CheckpointError(f"{self.path}: tensor {printable(self._order[0])} was never written")
        os.fsync(self._descriptor)
        os.close(self._descriptor)
        self._descriptor = -1
        self._hasher.shutdown()
        os.replace(self._partial, self.path)
        sync_folder(self.path.parent)
        self.sha256 = self._hash.hexdigest()

    def _discard(self) -> None:
        self._hasher.shutdown()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            self._partial.unlink(missing_ok=True)

    def __enter__(self) -> TensorFileWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.commit()
        finally:
            self._discard()


def write_atomically(path: Path, content: bytes) -> None:
    """Write a small file under a temporary name, sync it and rename it."""
    partial = partial_path(path)
    descriptor = _create(partial)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make a rename in ``folder`` durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _create(path: Path) -> int:
    """Open a new file for writing; what lay there, a link included, is gone and was not followed."""
    path.unlink(missing_ok=True)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)


def _place(specs: Iterable[TensorSpec]) -> list[TensorEntry]:
    """Byte ranges of tensors that follow each other."""
    entries: list[TensorEntry] = []
    seen: set[str] = set()
    position = 0
    for spec in specs:
        if spec.name == header.METADATA_KEY:
            raise CheckpointError(f"no tensor can be called {printable(spec.name)}, the header's own key; rename it")
        if spec.name in seen:
            raise CheckpointError(f"two tensors would be written under the name {printable(spec.name)}")
        seen.add(spec.name)
        entries.append(TensorEntry(spec.name, spec.dtype, spec.shape, position, position + spec.nbytes))
        position += spec.nbytes
    return entries


def _check_room(path: Path, nbytes: int) -> None:
    """Refuse before any work what the disk cannot hold."""
    status = os.statvfs(path.parent)
    free = status.f_bavail * status.f_frsize
    if nbytes > free:
        raise CheckpointError(f"{path}: needs {nbytes} bytes but the disk has {free} free")


def _bytes_of(data: np.ndarray | bytes | memoryview) -> memoryview:
    if isinstance(data, np.ndarray):
        return memoryview(np.ascontiguousarray(data).reshape(-1).view(np.uint8))
    return memoryview(data).cast("B")
