"""Write one shard: what a worker does, in this process or on another machine.

Memory holds one layer and its result at a time; untouched tensors go from file to file in small pieces. The file
appears under its name only when it is complete and on the disk.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fp4rt.checkpoint.operations import Copy
from fp4rt.checkpoint.plan import ShardJob, operation_bytes
from fp4rt.checkpoint.report import ShardReport, TensorReport
from fp4rt.checkpoint.store import Store
from fp4rt.checkpoint.writer import TensorFileWriter

__all__ = ["write_shard"]

_lock = threading.Lock()
_stores: dict[str, Store] = {}  # guarded by _lock; the last source of this process, its headers read once


def write_shard(job: ShardJob, folder: str, name: str, progress: Callable[[int], None] | None = None) -> ShardReport:
    """Do a job.

    Args:
        job: what to write.
        folder: where.
        name: the file's name there.
        progress: called with the bytes of the source that were dealt with.

    Raises:
        CheckpointError: a tensor cannot be dealt with; the message names it.
        OSError: reading or writing failed. In either case no file and no temporary file is left.
    """
    store = _open(job.source)
    specs = [spec for operation in job.operations for spec in operation.specs()]
    rows: list[TensorReport] = []
    with TensorFileWriter(Path(folder, name), specs, job.metadata) as writer:
        for operation in job.operations:
            rows.append(_perform(operation, store, writer))
            if progress is not None:
                progress(operation_bytes(operation))
    return ShardReport(name, writer.nbytes, writer.sha256, rows)


def _perform(operation: Any, store: Store, writer: TensorFileWriter) -> TensorReport:
    arrays, row = operation.run(store)
    if isinstance(operation, Copy):
        writer.write(operation.spec.name, store.raw(operation.spec.name))
    for group in arrays:
        for tensor, data in group.items():
            writer.write(tensor, data)
    for tensor in operation.reads:
        store.release(tensor)
    report: TensorReport = row
    return report


def _open(path: str) -> Store:
    with _lock:
        store = _stores.get(path)
        if store is None or store.changed():
            _stores.clear()
            store = _stores[path] = Store(path)
        return store
