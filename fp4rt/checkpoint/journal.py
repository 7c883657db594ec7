"""What an unfinished run into a folder has done: a fingerprint of the run, and a record of every finished shard.

It lies in ``OUT/.fp4rt`` and goes away with the end of the run. There lie the finished shards, too, until all are: what
lay in OUT before stays whole and readable until then. A record counts only if the shard it speaks of is there with that
size and SHA-256; a shard without a record is written again.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fp4rt.checkpoint.folder import PUBLISHING, STATE_FOLDER, read_json
from fp4rt.checkpoint.plan import Plan
from fp4rt.checkpoint.report import ShardReport, jsonable, shard_from_json
from fp4rt.checkpoint.writer import CHUNK_BYTES, sync_folder, write_atomically
from fp4rt.errors import CheckpointError
from fp4rt.version import __version__

__all__ = ["Journal", "fingerprint", "sha256_of"]

RUN = "run.json"
RESULTS = "new"


class Journal:
    """The state folder of a run."""

    def __init__(self, target: Path, run: str, restart: bool = False) -> None:
        """Take up the state of ``target``, or start one; ``restart`` forgets the state of another run.

        Raises:
            CheckpointError: the folder holds the state of a run with other options or another source.
        """
        self.folder = target / STATE_FOLDER
        self.target = target
        self.results = self.folder / RESULTS
        path = self.folder / RUN
        known = read_json(path).get("fingerprint") if path.is_file() else None
        if known is not None and known != run and not restart:
            raise CheckpointError(
                f"{target}: holds the unfinished output of another run (other options, source or version); "
                "finish that run, or pass --overwrite"
            )
        if self.results.is_symlink():
            raise CheckpointError(f"{self.results}: is a link; remove it")
        if known != run:
            for record in self.folder.glob("*.json"):
                record.unlink()
            shutil.rmtree(self.results, ignore_errors=True)
        self.results.mkdir(exist_ok=True)
        if known != run:
            write_atomically(path, json.dumps({"fingerprint": run, "version": __version__}).encode())

    def finished(self, file: str) -> ShardReport | None:
        """The record of a shard that is complete and unharmed; None where it must be written.

        Raises:
            CheckpointError: the record itself is broken.
        """
        record, shard = self.folder / f"{file}.json", self.results / file
        if (self.folder / PUBLISHING).exists() and not shard.exists():
            shard = self.target / file
        if not record.is_file() or shard.is_symlink() or not shard.is_file():
            return None
        report = shard_from_json(read_json(record))
        if shard.stat().st_size != report.nbytes or sha256_of(shard) != report.sha256:
            return None
        report.resumed = True
        return report

    def record(self, report: ShardReport) -> None:
        """Note a finished shard."""
        table = {key: value for key, value in asdict(report).items() if key != "resumed"}
        write_atomically(self.folder / f"{report.file}.json", json.dumps(jsonable(table)).encode())

    def publish(self, files: Iterable[str], stale: Iterable[str]) -> None:
        """All shards are finished: remove what is ``stale`` in the target, in this order, and move them there."""
        (self.folder / PUBLISHING).touch()
        for name in stale:
            (self.target / name).unlink(missing_ok=True)
        for name in files:
            if (self.results / name).exists():  # else it was moved before an interruption
                os.replace(self.results / name, self.target / name)
        sync_folder(self.target)

    def close(self) -> None:
        """The run is complete, or refused: remove its state and what is not published, what names the run last."""
        (self.folder / PUBLISHING).unlink(missing_ok=True)
        for record in self.folder.glob("*.json"):
            if record.name != RUN:
                record.unlink()
        shutil.rmtree(self.folder)


def fingerprint(plan: Plan) -> str:
    """Names a run: what is done to every tensor, and which source it reads (sizes and times of its files)."""
    digest = hashlib.sha256(__version__.encode())
    for shard in plan.store.location.shards:
        status = os.stat(shard)
        digest.update(json.dumps([shard.name, status.st_size, status.st_mtime_ns]).encode())
    for job in plan.jobs:
        digest.update(repr((job.file, job.operations, sorted(job.metadata.items()))).encode())
    return digest.hexdigest()


def sha256_of(path: Path) -> str:
    """SHA-256 of a file."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def json_bytes(table: dict[str, Any]) -> bytes:
    """A JSON file as people read it; half a surrogate pair, which UTF-8 cannot hold, stays the escape that it was."""
    return (json.dumps(table, indent=2, ensure_ascii=False) + "\n").encode(errors="backslashreplace")
