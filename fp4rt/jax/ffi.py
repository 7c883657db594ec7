"""XLA's foreign function interface (c_api.h, API 0.x) through ctypes: Python handlers inside compiled programs.

XLA calls a handler with the addresses of argument and result buffers, and on a GPU with the stream that the program
runs on: work launched there is in the program's order, on XLA's own memory, without a copy to the host. The struct
layouts below are the head of the C ones; later versions only append to them.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import Any

from fp4rt.device import CPU, Device
from fp4rt.errors import BackendUnavailable
from fp4rt.interop import ArrayView, cuda_driver, dense_strides

__all__ = ["Call", "call", "register"]

PREFIX = "fp4rt_"
EXTENSION_METADATA = 1
STAGE_EXECUTE = 3
ERROR_INTERNAL = 13
# XLA_FFI_DataType to names; what is missing here is no argument of ours.
DTYPES = {2: "int8", 6: "uint8", 10: "float16", 11: "float32", 16: "bfloat16", 20: "float8_e4m3fn"}


class _Base(ctypes.Structure):
    """What every struct starts with."""

    _fields_ = [("struct_size", ctypes.c_size_t), ("extension", ctypes.c_void_p)]


class _Extension(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_size_t), ("type", ctypes.c_int), ("next", ctypes.c_void_p)]


class _Version(_Base):
    _fields_ = [("major", ctypes.c_int), ("minor", ctypes.c_int)]


class _Metadata(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_size_t), ("version", _Version), ("traits", ctypes.c_uint32)]


class _MetadataExtension(ctypes.Structure):
    _fields_ = [("base", _Extension), ("metadata", ctypes.POINTER(_Metadata))]


class _ErrorCreate(_Base):
    _fields_ = [("message", ctypes.c_char_p), ("code", ctypes.c_int)]


class _StreamGet(_Base):
    _fields_ = [("context", ctypes.c_void_p), ("stream", ctypes.c_void_p)]


_CreateError = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_ErrorCreate))
_GetStream = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_StreamGet))


class _Api(_Base):
    _fields_ = [
        ("version", _Version),
        ("internal", ctypes.c_void_p),
        ("error_create", _CreateError),
        ("error_get_message", ctypes.c_void_p),
        ("error_destroy", ctypes.c_void_p),
        ("handler_register", ctypes.c_void_p),
        ("stream_get", _GetStream),
    ]


class _Buffer(_Base):
    _fields_ = [
        ("dtype", ctypes.c_int),
        ("data", ctypes.c_void_p),
        ("rank", ctypes.c_int64),
        ("dims", ctypes.POINTER(ctypes.c_int64)),
    ]


class _Buffers(_Base):
    """XLA_FFI_Args and XLA_FFI_Rets."""

    _fields_ = [
        ("size", ctypes.c_int64),
        ("types", ctypes.c_void_p),
        ("buffers", ctypes.POINTER(ctypes.POINTER(_Buffer))),
    ]


class _Text(ctypes.Structure):
    """XLA_FFI_ByteSpan."""

    _fields_ = [("start", ctypes.c_void_p), ("length", ctypes.c_size_t)]


class _Attributes(_Base):
    _fields_ = [
        ("size", ctypes.c_int64),
        ("types", ctypes.c_void_p),
        ("names", ctypes.c_void_p),
        ("values", ctypes.POINTER(ctypes.POINTER(_Text))),
    ]


class _Frame(_Base):
    """XLA_FFI_CallFrame."""

    _fields_ = [
        ("api", ctypes.POINTER(_Api)),
        ("context", ctypes.c_void_p),
        ("stage", ctypes.c_int),
        ("arguments", _Buffers),
        ("results", _Buffers),
        ("attributes", _Attributes),
    ]


def _size(kind: Any) -> int:
    """``struct_size`` as c_api.h counts it: to the end of the last field, without padding."""
    name, _ = kind._fields_[-1]
    field = getattr(kind, name)
    end: int = field.offset + field.size
    return end


_Handler = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_Frame))
_new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)
_registered: list[Any] = []  # XLA keeps the addresses for good
_calling_processes: set[int] = set()


class _Running:
    """The handlers that run, and on which platforms there were any."""

    QUIET_SECONDS = 0.1

    def __init__(self) -> None:
        self.platforms: set[str] = set()
        self._count, self._last_end, self._lock = 0, 0.0, threading.Lock()

    @contextmanager
    def one_more(self, platform: str) -> Iterator[None]:
        """While a handler runs."""
        with self._lock:
            self.platforms.add(platform)
            self._count += 1
        try:
            yield
        finally:
            with self._lock:
                self._count -= 1
                self._last_end = time.monotonic()

    def wait_until_quiet(self) -> None:
        """Until for a while there has been none."""
        begin = time.monotonic()
        while self._count or time.monotonic() - max(begin, self._last_end) < self.QUIET_SECONDS:
            time.sleep(self.QUIET_SECONDS / 20)


_running = _Running()


class Call:
    """One execution: argument and result buffers as views, the static settings, the stream (None on the host)."""

    __slots__ = ("arguments", "results", "settings", "stream")

    def __init__(self, arguments: list[Any], results: list[Any], settings: dict[str, Any], stream: int | None) -> None:
        self.arguments, self.results, self.settings, self.stream = arguments, results, settings, stream


def register(name: str, function: Callable[[Call], None]) -> None:
    """Make ``function`` callable from compiled programs on the host and on CUDA devices."""
    jax_ffi = _jax_ffi()
    for platform in ("cpu", "CUDA"):
        handler = _Handler(_make_handler(function, on_gpu=platform != "cpu"))
        _registered.append(handler)
        address = ctypes.cast(handler, ctypes.c_void_p).value
        jax_ffi.register_ffi_target(PREFIX + name, _new_capsule(address, None, None), platform=platform, api_version=1)


def call(name: str, results: Any, *arguments: Any, **settings: Any) -> Any:
    """Call a registered function on arrays or tracers.

    Args:
        name: as registered.
        results: jax.ShapeDtypeStruct, or a list of them.
        arguments: arrays.
        settings: static values that JSON can carry.
    """
    _calling_processes.add(os.getpid())
    bound = _jax_ffi().ffi_call(PREFIX + name, results, vmap_method="sequential")
    return bound(*arguments, settings=json.dumps(settings, sort_keys=True))


@atexit.register
def _wait_for_programs() -> None:
    """Let programs end whose results nobody waited for: their handlers need an interpreter that still runs.

    Without this, the end of the interpreter would wait for XLA's threads, and these for the interpreter. A device runs
    the programs of a thread in their order, so one more that has ended says that they have. What other threads began is
    waited for as long as handlers come in short order, and where results are still there.
    """
    if os.getpid() not in _calling_processes:
        return
    import jax

    _running.wait_until_quiet()
    for platform in _running.platforms:
        with suppress(Exception):  # a device that is broken, or gone: there is nothing to wait for
            jax.block_until_ready(jax.live_arrays(platform))
            for device in jax.local_devices(backend=platform):
                jax.block_until_ready(jax.jit(lambda x: x + 1)(jax.device_put(0, device)))
    _running.wait_until_quiet()


def _jax_ffi() -> Any:
    import jax

    try:
        import jax.ffi
    except ImportError:
        raise BackendUnavailable(
            f"fp4rt.jax needs jax.ffi, which JAX {jax.__version__} does not have; pip install -U 'jax>=0.4.38'"
        ) from None
    return jax.ffi


def _make_handler(function: Callable[[Call], None], on_gpu: bool) -> Callable[[Any], int | None]:
    def handle(frame_pointer: Any) -> int | None:
        frame = frame_pointer.contents
        if frame.extension:
            extension = _Extension.from_address(frame.extension)
            if extension.type == EXTENSION_METADATA:
                _tell_metadata(frame)
                return None
        if frame.stage != STAGE_EXECUTE:
            return None
        try:
            with _running.one_more("gpu" if on_gpu else "cpu"):
                function(_read_call(frame, on_gpu))
        except BaseException as error:  # an interrupt too: XLA has no way to take an exception
            return _make_error(frame, f"{type(error).__name__}: {error}")
        return None

    return handle


def _tell_metadata(frame: Any) -> None:
    """XLA asks once: which API version (its own: only the head of the structs is used), and no traits."""
    metadata = _MetadataExtension.from_address(frame.extension).metadata.contents
    version = frame.api.contents.version
    metadata.version.major, metadata.version.minor = version.major, version.minor
    metadata.traits = 0


def _make_error(frame: Any, message: str) -> int | None:
    create = _ErrorCreate(_size(_ErrorCreate), None, message.encode(), ERROR_INTERNAL)
    error: int | None = frame.api.contents.error_create(ctypes.byref(create))
    return error


def _read_call(frame: Any, on_gpu: bool) -> Call:
    text = frame.attributes.values[0].contents
    settings = _parse(ctypes.string_at(text.start, text.length))
    device, stream = CPU, None
    if on_gpu:
        get = _StreamGet(_size(_StreamGet), None, frame.context, None)
        if frame.api.contents.stream_get(ctypes.byref(get)):
            raise BackendUnavailable("XLA gives this call no CUDA stream")
        stream = get.stream or 0
        device = Device("cuda", _device_index(frame))
    arguments = [_view(frame.arguments, i, device, True) for i in range(frame.arguments.size)]
    results = [_view(frame.results, i, device, False) for i in range(frame.results.size)]
    return Call(arguments, results, settings, stream)


@lru_cache(maxsize=1024)
def _parse(settings: bytes) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(settings)
    return parsed


def _view(buffers: Any, index: int, device: Device, readonly: bool) -> ArrayView:
    buffer = buffers.buffers[index].contents
    shape = tuple(buffer.dims[axis] for axis in range(buffer.rank))
    dtype = DTYPES.get(buffer.dtype, f"xla({buffer.dtype})")
    return ArrayView(None, "dlpack", device, dtype, shape, dense_strides(shape), buffer.data or 0, readonly)


def _device_index(frame: Any) -> int:
    """The device that a buffer lies on: XLA says only its own ordinal, and only lately."""
    for buffers in (frame.arguments, frame.results):
        for index in range(buffers.size):
            pointer = buffers.buffers[index].contents.data
            if pointer:
                return cuda_driver.load().device_of(pointer)
    return 0
