"""hf_quant_config.json beside a single file: its readers look for this one name, so a folder describes one model."""

from __future__ import annotations

import os
from pathlib import Path

from fp4rt.checkpoint.detect import detect, read_configuration
from fp4rt.checkpoint.folder import QUANT_CONFIG, SUFFIX
from fp4rt.checkpoint.formats import MODELOPT
from fp4rt.checkpoint.store import Store
from fp4rt.errors import CheckpointError

__all__ = ["check_beside", "describes_alone", "refuse_existing"]

LISTED = 4


def check_beside(target: Path, content: bytes, overwrite: bool) -> Path:
    """The configuration's place beside the file ``target``; it may be written with ``content``.

    Raises:
        CheckpointError: another one is there that describes another file of the folder, or that may not be replaced.
    """
    beside = target.parent / QUANT_CONFIG
    if beside.is_file() and beside.read_bytes() == content:
        return beside
    if os.path.lexists(beside):
        described = _described(target)
        if described:
            raise CheckpointError(
                f"{beside}: exists already, {described}, and would have to say something else for "
                f"{target.name}; write {target.name} to a folder of its own"
            )
    refuse_existing(beside, overwrite)
    return beside


def describes_alone(target: Path) -> bool:
    """Whether a configuration lies beside the file ``target`` that describes it and no other."""
    beside = target.parent / QUANT_CONFIG
    return target.is_file() and beside.is_file() and not _described(target)


def refuse_existing(path: Path, overwrite: bool) -> None:
    """A file is replaced where that was asked for, a folder never.

    Raises:
        CheckpointError: it is there.
    """
    if path.is_dir():
        raise CheckpointError(f"{path}: is a folder")
    if os.path.lexists(path) and not overwrite:
        raise CheckpointError(
            f"{path}: exists already; name another file, or overwrite it (overwrite=True, --overwrite)"
        )


def _described(target: Path) -> str:
    """Which other files the configuration describes, in words; those that cannot be read only where no other does."""
    described, unclear = [], []
    for path in sorted(target.parent.glob(f"*{SUFFIX}")):
        if path.name == target.name:
            continue
        try:
            if path.stat().st_size == 0:
                continue
            store = Store(path)
            try:
                if detect(store, read_configuration(store)) is MODELOPT:
                    described.append(path.name)
            finally:
                store.close()
        except (CheckpointError, OSError):
            unclear.append(path.name)
    if described:
        return f"describes {_listed(described)}"
    return f"may describe {_listed(unclear)} (not readable as a checkpoint)" if unclear else ""


def _listed(names: list[str]) -> str:
    return ", ".join(names[:LISTED]) + (", ..." if len(names) > LISTED else "")
