"""Compiled kernels on disk, found by their content: never stale, never trusted without its digest.

The folder is ``fp4rt.cache_folder``'s. The key covers everything that decides the image: NVRTC's version, every
option (target and defines among them), and the text of the source and of every header that it includes. An entry is
written to a temporary file and renamed, so racing processes each see a whole file or none; its SHA-256 is checked on
read. A folder that cannot be used costs one warning, never a failure.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import threading
import warnings
from pathlib import Path

from fp4rt.cache_folder import CACHE_VARIABLE, cache_folder
from fp4rt.cuda.compiler import CompiledKernel, Defines, compile_kernel, nvrtc_version, options_for, sources_of

__all__ = ["cached_compile", "entry_key"]

_MAGIC = b"fp4rt kernel\n"
_DIGEST_BYTES = hashlib.sha256().digest_size
_LENGTH_BYTES = 8

_warning_lock = threading.Lock()
_warned = False  # guarded by _warning_lock


def entry_key(source: str, defines: Defines, arch: str, *, fmad: bool = False) -> str:
    """Hex digest of everything that decides the image."""
    digest = hashlib.sha256()
    for part in (repr(nvrtc_version()), *options_for(source, defines, arch, fmad)):
        digest.update(part.encode() + b"\0")
    for name, text in sorted(sources_of(source).items()):
        digest.update(name.encode() + b"\0" + text.encode() + b"\0")
    return digest.hexdigest()


def cached_compile(source: str, defines: Defines, arch: str, *, fmad: bool = False) -> CompiledKernel:
    """:func:`~fp4rt.cuda.compiler.compile_kernel` through the disk: same arguments, result and errors."""
    path = cache_folder() / f"{entry_key(source, defines, arch, fmad=fmad)}.kernel"
    found = _read(path)
    if found is None:
        found = compile_kernel(source, defines, arch, fmad=fmad)
        _write(path, found)
    return found


def _pack(kernel: CompiledKernel) -> bytes:
    log = kernel.log.encode()
    payload = len(log).to_bytes(_LENGTH_BYTES, "little") + log + kernel.image
    return _MAGIC + hashlib.sha256(payload).digest() + payload


def _unpack(content: bytes) -> CompiledKernel | None:
    start = len(_MAGIC) + _DIGEST_BYTES
    digest, payload = content[len(_MAGIC) : start], content[start:]
    if not content.startswith(_MAGIC) or hashlib.sha256(payload).digest() != digest:
        return None
    end = _LENGTH_BYTES + int.from_bytes(payload[:_LENGTH_BYTES], "little")
    return CompiledKernel(image=payload[end:], log=payload[_LENGTH_BYTES:end].decode())


def _read(path: Path) -> CompiledKernel | None:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:  # made by another user, a file where the folder should be, ...
        _warn_once(path.parent, error)
        return None
    return _unpack(content)  # None for a truncated or foreign entry: compiled again and replaced


def _write(path: Path, kernel: CompiledKernel) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".new-")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(_pack(kernel))
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        _warn_once(path.parent, error)


def _warn_once(folder: Path, error: OSError) -> None:
    global _warned
    with _warning_lock:
        if _warned:
            return
        _warned = True
    warnings.warn(
        f"fp4rt cannot use its kernel cache {folder} ({error.strerror or error}); kernels are compiled in memory, "
        f"again in every process; set {CACHE_VARIABLE} to a folder that can be written",
        RuntimeWarning,
        stacklevel=4,
    )
