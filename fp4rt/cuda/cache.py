"""Compiled kernels on disk, found by their content: never stale, never trusted without its digest.

The folder is ``fp4rt.cache_folder``'s. The key covers everything that decides the image: NVRTC's version, every
option (target and defines among them), and the text of the source and of every header that it includes. An entry is
written to a temporary file and renamed, so racing processes each see a whole file or none; the SHA-256 of it and its
key is checked on read. A folder that cannot be used costs one warning, never a failure.
"""

from __future__ import annotations

import hashlib
import threading
import warnings
from pathlib import Path

from fp4rt.cache_folder import CACHE_VARIABLE, cache_folder, write_entry
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


def cached_compile(
    source: str, defines: Defines, arch: str, *, fmad: bool = False, must_keep: bool = False
) -> CompiledKernel:
    """:func:`~fp4rt.cuda.compiler.compile_kernel` through the disk: same arguments, result and errors.

    Raises:
        OSError: the folder cannot be used, and ``must_keep`` says that this is no mere warning.
    """
    key = entry_key(source, defines, arch, fmad=fmad)
    path = cache_folder() / f"{key}.kernel"
    found = _read(path, key, must_keep)
    if found is None:
        found = compile_kernel(source, defines, arch, fmad=fmad)
        try:
            write_entry(path, _pack(found, key))
        except OSError as error:
            if must_keep:
                raise
            _warn_once(path.parent, error)
    return found


def _digest(payload: bytes, key: str) -> bytes:
    return hashlib.sha256(key.encode() + payload).digest()


def _pack(kernel: CompiledKernel, key: str) -> bytes:
    log = kernel.log.encode()
    payload = len(log).to_bytes(_LENGTH_BYTES, "little") + log + kernel.image
    return _MAGIC + _digest(payload, key) + payload


def _unpack(content: bytes, key: str) -> CompiledKernel | None:
    start = len(_MAGIC) + _DIGEST_BYTES
    digest, payload = content[len(_MAGIC) : start], content[start:]
    if not content.startswith(_MAGIC) or _digest(payload, key) != digest:
        return None
    end = _LENGTH_BYTES + int.from_bytes(payload[:_LENGTH_BYTES], "little")
    return CompiledKernel(image=payload[end:], log=payload[_LENGTH_BYTES:end].decode())


def _read(path: Path, key: str, must_keep: bool) -> CompiledKernel | None:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:  # made by another user, a file where the folder should be, ...
        if must_keep:
            raise
        _warn_once(path.parent, error)
        return None
    return _unpack(content, key)  # None for a truncated, foreign or renamed entry: compiled again and replaced


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
