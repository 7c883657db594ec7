"""Where compiled code and measured tiles are kept between processes."""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import shutil
import stat
import tempfile
from functools import cache
from pathlib import Path

__all__ = ["CACHE_VARIABLE", "cache_folder", "why_unwritable", "write_entry"]

CACHE_VARIABLE = "FP4RT_CACHE_DIR"


def cache_folder() -> Path:
    """``FP4RT_CACHE_DIR``, else ``$XDG_CACHE_HOME/fp4rt``, else ``~/.cache/fp4rt``; it need not exist.

    Code is loaded from it, so it depends on where a process stands only where somebody chose it so. Who has no home, as
    in a container that runs under a number of its own, gets a folder among the temporary ones.
    """
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(os.path.expanduser(chosen))
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):
        return Path(base) / "fp4rt"
    home = os.path.expanduser("~")
    return Path(home) / ".cache" / "fp4rt" if os.path.isabs(home) else _homeless_folder()


@cache
def _homeless_folder() -> Path:
    """The user's own, where nobody else has made it before; else one for this process."""
    user = os.getuid()
    try:
        folder = Path(tempfile.gettempdir()) / f"fp4rt-{user}"
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=stat.S_IRWXU)
        found = folder.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == user and not found.st_mode & 0o077:
            return folder
        own = tempfile.mkdtemp(prefix="fp4rt-")
    except OSError:
        return Path(os.devnull) / "fp4rt"  # none: nothing can be kept
    atexit.register(shutil.rmtree, own, ignore_errors=True)
    return Path(own)


def why_unwritable() -> str | None:
    """What keeps files out of the folder, or None: one is made and removed, as permission bits do not tell.

    A folder that does not exist yet is not made: the file goes into the nearest one above it.
    """
    folder = cache_folder()
    while not _exists(folder) and folder.parent != folder:
        folder = folder.parent
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".new-"):
            return None
    except OSError as error:
        return f"no file can be made in {folder} ({error.strerror or error})"


def _exists(path: Path) -> bool:
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:  # such as a name that is too long: making a file there says so
        return True
    return True


def write_entry(path: Path, content: bytes) -> None:
    """Write a file of the folder in one step: who reads it meanwhile sees the old one or the new one.

    Raises:
        OSError: the folder cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f".new-{secrets.token_hex(8)}"
    try:
        with temporary.open("xb") as file:  # whom the umask lets read it may: others than who filled the folder
            file.write(content)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
