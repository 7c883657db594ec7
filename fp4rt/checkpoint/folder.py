"""Where a checkpoint lies: one safetensors file, or a folder with shards, an index, configuration and a tokenizer.

Nothing outside the folder is ever read through it: index entries are bare file names, and a symbolic link is followed
only to a place inside the folder, or into the ``blobs`` of the Hugging Face cache that the folder is a snapshot of.

Source: transformers, ``model.safetensors.index.json`` (``weight_map``: tensor name -> file name).
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp4rt.checkpoint.header import printable
from fp4rt.checkpoint.kinds import check_kinds
from fp4rt.errors import CheckpointError, counted

__all__ = [
    "CONFIG",
    "QUANT_CONFIG",
    "Location",
    "check_parent",
    "companions",
    "locate",
    "read_configuration_file",
    "read_json",
]

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
CONFIG = "config.json"
QUANT_CONFIG = "hf_quant_config.json"
STATE_FOLDER = ".fp4rt"  # of an unfinished run
PUBLISHING = "publishing"  # in it, while finished files take the place of what lay there before
MAX_JSON_BYTES = 200_000_000
# Other copies of the weights; they would carry the model that was just converted along unconverted.
OTHER_WEIGHTS = (
    *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack"),
    *(".onnx", ".onnx_data", ".gguf", ".ot"),
)


@dataclass(frozen=True)
class Location:
    """The files of a checkpoint.

    Attributes:
        path: what the user named: a file, or a folder.
        folder: the folder that holds it.
        shards: paths of the safetensors files, sorted by name.
        index: path of the index, None where there is none.
        weight_map: tensor name -> shard name, as the index says; empty without an index.
        total_size: bytes of all tensors, as the index says; None where it says nothing.
    """

    path: Path
    folder: Path
    shards: tuple[Path, ...]
    index: Path | None
    weight_map: dict[str, str]
    total_size: Any = None

    @property
    def is_folder(self) -> bool:
        """Whether the user named a folder, so that configuration and tokenizer belong to the checkpoint."""
        return self.path != self.shards[0]


def check_parent(path: Path) -> None:
    """The folder that a file is written to is there.

    Raises:
        CheckpointError: it is not.
    """
    if not path.parent.is_dir():
        raise CheckpointError(f"{path}: the folder {path.parent} does not exist")


def locate(path: str | os.PathLike[str]) -> Location:
    """Find the files of a checkpoint; nothing but the index is read.

    Raises:
        CheckpointError: there is no checkpoint, several without an index, a shard is missing, an entry of the index or
            a link leaves the folder, or a run was interrupted while it replaced one.
    """
    check_kinds("a checkpoint", ("its place", path, (str, os.PathLike), "a path"))
    path = Path(path)
    if path.is_file():
        if path.name.endswith(INDEX_SUFFIX):
            return _sharded(path.parent, path.parent, path)
        return Location(path, path.parent, (path,), None, {})
    if not path.is_dir():
        what = "is neither a file nor a folder" if os.path.lexists(path) else "no such file or folder"
        raise CheckpointError(f"{path}: {what}")
    if (path / STATE_FOLDER / PUBLISHING).exists():
        raise CheckpointError(
            f"{path}: an unfinished run has replaced a part of what lay here; finish it by the same command"
        )
    indices = sorted(path.glob(f"*{INDEX_SUFFIX}"))
    if len(indices) > 1:
        raise CheckpointError(f"{path}: several indices: {_names(indices)}; name the one to read")
    if indices:
        return _sharded(path, path, indices[0])
    files = sorted(path.glob(f"*{SUFFIX}"))
    if len(files) != 1:
        found = f"{len(files)} safetensors files ({_names(files)}) and no index" if files else "no safetensors file"
        raise CheckpointError(f"{path}: {found}; wanted one file, or shards with *{INDEX_SUFFIX}")
    check_link(files[0], path)
    return Location(path, path, (files[0],), None, {})


def _sharded(path: Path, folder: Path, index: Path) -> Location:
    check_link(index, folder)
    table = read_json(index)
    weight_map = table.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{index}: wanted weight_map, an object of tensor name -> file name")
    if not weight_map:
        raise CheckpointError(f"{index}: weight_map is empty")
    shards = []
    for name in sorted(set(weight_map.values())):
        check_shard_name(name, index)
        shard = folder / name
        if not shard.is_file():
            raise CheckpointError(f"{index}: the shard {name} is missing; it holds {_tensor_of(weight_map, name)}")
        check_link(shard, folder)
        shards.append(shard)
    metadata = table.get("metadata")
    total_size = metadata.get("total_size") if isinstance(metadata, dict) else None
    return Location(path, folder, tuple(shards), index, weight_map, total_size)


def check_shard_name(name: str, index: Path) -> None:
    """Refuse an index entry that is anything but the bare name of a safetensors file.

    Raises:
        CheckpointError: it is a path, hidden, or has another suffix.
    """
    bare = name == os.path.basename(name) and "\\" not in name and "\0" not in name and not name.startswith(".")
    if not bare or not name.endswith(SUFFIX):
        raise CheckpointError(
            f"{index}: the entry {printable(name)} is not the bare name of a {SUFFIX} file; "
            "entries must not leave the folder"
        )


def check_link(path: Path, folder: Path) -> None:
    """Refuse a symbolic link that leaves ``folder``, but for the blobs of the Hugging Face cache it lies in.

    Raises:
        CheckpointError: the link leaves the folder.
    """
    if not path.is_symlink() and not any(parent.is_symlink() for parent in _parents_below(path, folder)):
        return
    target = path.resolve()
    home = folder.resolve()
    if target.is_relative_to(home):
        return
    # <cache>/models--org--name/snapshots/<revision>/.../file -> <cache>/models--org--name/blobs/<hash>
    if any(above.name == "snapshots" and target.is_relative_to(above.parent / "blobs") for above in home.parents):
        return
    raise CheckpointError(f"{path}: a symbolic link that leaves the folder, to {target}; copy the file instead")


def read_configuration_file(location: Location, name: str) -> dict[str, Any] | None:
    """The JSON object called ``name`` of the checkpoint's folder; None where there is none.

    Raises:
        CheckpointError: it is a link that leaves the folder, or no JSON object.
    """
    path = location.folder / name
    check_link(path, location.folder)
    return read_json(path) if path.is_file() else None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        CheckpointError: not UTF-8, not JSON, not an object, with a key twice, or absurdly large.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) != len(pairs):
            raise CheckpointError(f"{path}: a key occurs twice in one object")
        return table

    size = path.stat().st_size
    if size > MAX_JSON_BYTES:
        raise CheckpointError(f"{path}: {size} bytes are too many for a configuration (at most {MAX_JSON_BYTES})")
    try:
        table = json.loads(path.read_bytes().decode("utf-8"), object_pairs_hook=unique)
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: not UTF-8 (byte {error.start})") from None
    except RecursionError:
        raise CheckpointError(f"{path}: not valid JSON: nested too deeply") from None
    except ValueError as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(table, dict):
        raise CheckpointError(f"{path}: wanted a JSON object, got {type(table).__name__}")
    return table


def companions(location: Location, target: Path) -> tuple[list[Path], list[Path]]:
    """Files of the folder that go along to ``target``, and those that do not, relative to the folder.

    Configuration that fp4rt writes itself, the index and the shards are in neither list. Other copies of the weights
    are left; hidden files and folders are not looked at, nor is ``target`` where it lies inside.

    Raises:
        CheckpointError: a link leaves the folder, or a file is no regular file.
    """
    copied, left = [], []
    ours = {CONFIG, QUANT_CONFIG, *(shard.name for shard in location.shards)}
    if location.index is not None:
        ours.add(location.index.name)
    for parent, folders, files in os.walk(location.folder):
        apart = (name for name in folders if Path(parent, name).resolve() != target.resolve())
        folders[:] = sorted(name for name in apart if not name.startswith("."))
        for name in folders:
            if Path(parent, name).is_symlink():
                check_link(Path(parent, name), location.folder)
                left.append(Path(parent, name).relative_to(location.folder))
        for name in sorted(files):
            path = Path(parent, name)
            relative = path.relative_to(location.folder)
            if name.startswith(".") or str(relative) in ours:
                continue
            if name.endswith((*OTHER_WEIGHTS, INDEX_SUFFIX)):
                left.append(relative)
                continue
            check_link(path, location.folder)
            if not path.is_file():
                raise CheckpointError(f"{path}: not a regular file")
            copied.append(relative)
    return copied, left


def _parents_below(path: Path, folder: Path) -> list[Path]:
    """Folders between ``folder`` and ``path``."""
    parents = []
    for parent in path.parents:
        if parent == folder:
            break
        parents.append(parent)
    return parents


def _names(paths: list[Path]) -> str:
    names = [path.name for path in paths]
    return ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")


def _tensor_of(weight_map: dict[str, str], shard: str) -> str:
    names = [name for name, file in weight_map.items() if file == shard]
    return printable(names[0]) + (f" and {counted(len(names) - 1, 'more tensor')}" if len(names) > 1 else "")
