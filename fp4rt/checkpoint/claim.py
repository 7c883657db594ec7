"""One run at a time writes to a place: a lock that the system gives up when the process dies, however it dies."""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path
from types import TracebackType

from fp4rt.errors import CheckpointError

__all__ = ["Claim"]


class Claim:
    """A lock file at ``path``, held from :meth:`take` (or entering the context) to the end of the context."""

    def __init__(self, path: Path, target: Path) -> None:
        self.path = path
        self.target = target
        self._descriptor = -1

    def take(self) -> Claim:
        """Take the lock without waiting.

        Raises:
            CheckpointError: another run holds it.
            FileNotFoundError: its folder does not exist.
        """
        while self._descriptor < 0:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                owner = os.pread(descriptor, 200, 0).decode("ascii", "replace").strip() or "unknown"
                os.close(descriptor)
                raise CheckpointError(f"{self.target}: another run is writing here ({owner}); wait for it") from None
            if self._is_current(descriptor):
                self._descriptor = descriptor
            else:
                os.close(descriptor)  # the run that held it has just removed the file: lock the new one
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        return self

    def __enter__(self) -> Claim:
        return self if self._descriptor >= 0 else self.take()

    def _is_current(self, descriptor: int) -> bool:
        try:
            there, here = os.stat(self.path, follow_symlinks=False), os.fstat(descriptor)
        except FileNotFoundError:
            return False
        return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.path.unlink(missing_ok=True)
        os.close(self._descriptor)
        self._descriptor = -1
