"""From (source, entry, defines, device) to a launch.

Images are loaded with ``cupy.cuda.function.Module.load``, from memory: ``cupy.RawModule(path=...)`` would need the
image as a file, which an unusable cache folder does not have, and would load it on whichever device is current at its
first use. A launch goes straight to ``cuLaunchKernel`` through CuPy's driver binding with a plain stream handle, so a
stream of any library costs nothing to pass.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from fp4rt.cuda.arch import Target, choose_target
from fp4rt.cuda.arguments import ArgumentStruct
from fp4rt.cuda.cache import cached_compile
from fp4rt.cuda.compiler import Defines, nvrtc_version, supported_archs
from fp4rt.errors import BackendUnavailable, CompileError
from fp4rt.interop.cuda_driver import relaxed_capture

__all__ = [
    "CurrentDevice",
    "Kernel",
    "LaunchMemory",
    "device_attribute",
    "device_capability",
    "device_target",
    "free_memory",
    "get_kernel",
]

# CUdevice_attribute and CUfunction_attribute values of the driver API
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76
_MAX_DYNAMIC_SHARED_BYTES = 8
_MOST_ARGUMENT_BYTES = 4096  # what CUDA allows before 12.1, and far more than any struct here
_MOST_CONFIG_BYTES = 64  # CUlaunchConfig has 56
_OneArgument = ctypes.c_char_p * 1  # holds the address of a bytes object's content, and the object

Extent = tuple[int, int, int]


@cache
def _cuda() -> tuple[Any, Any, Any]:
    try:
        from cupy.cuda import driver, function, runtime
    except Exception as error:  # what an import of CuPy raises depends on what is broken
        raise BackendUnavailable(
            f"the CUDA backend needs CuPy: {error}; pip install 'fp4rt[cuda12]' or 'fp4rt[cuda13]'"
        ) from error
    return driver, runtime, function.Module


@cache
def device_attribute(attribute: int, device: int) -> int:
    """A ``cudaDeviceAttr`` value, such as 16 for the number of multiprocessors."""
    value: int = _cuda()[1].deviceGetAttribute(attribute, device)
    return value


def device_capability(device: int) -> tuple[int, int]:
    """Compute capability (major, minor)."""
    return device_attribute(_CAPABILITY_MAJOR, device), device_attribute(_CAPABILITY_MINOR, device)


@cache
def device_target(device: int) -> Target:
    """What to compile for on ``device``.

    Raises:
        BackendUnavailable: the device is too old or too new for this NVRTC.
    """
    return choose_target(device_capability(device), supported_archs(), nvrtc_version())


class CurrentDevice:
    """Makes ``device`` the thread's current one for a ``with`` block, and restores the one before."""

    __slots__ = ("_before", "_device")

    def __init__(self, device: int) -> None:
        self._device = device

    def __enter__(self) -> None:
        runtime = _cuda()[1]
        self._before = runtime.getDevice()
        runtime.setDevice(self._device)  # also gives a thread that has no context yet the device's

    def __exit__(self, *_: object) -> None:
        if self._before != self._device:
            _cuda()[1].setDevice(self._before)


class LaunchMemory:
    """Memory for one argument struct, the array of its address that a launch takes, and a launch's configuration."""

    __slots__ = ("_address", "arguments", "config", "config_address", "params")

    def __init__(self) -> None:
        self.arguments = (ctypes.c_char * _MOST_ARGUMENT_BYTES)()
        self._address = (ctypes.c_void_p * 1)(ctypes.addressof(self.arguments))
        self.params = ctypes.addressof(self._address)
        self.config = (ctypes.c_char * _MOST_CONFIG_BYTES)()
        self.config_address = ctypes.addressof(self.config)


class _Thread(threading.local):
    """What a thread keeps: the devices whose context it has had, and memory that no launch is using."""

    def __init__(self) -> None:
        self.devices: set[int] = set()
        self.free: list[LaunchMemory] = []


_thread = _Thread()


def free_memory() -> list[LaunchMemory]:
    """This thread's. A launch takes one out and puts it back, so that a launch from a destructor takes another."""
    return _thread.free


class Kernel:
    """One entry of one module on one device. Thread-safe: nothing in it changes after construction."""

    __slots__ = ("_get_device", "_launch", "_module", "device", "function", "name", "shared_bytes")

    def __init__(self, image: bytes, entry: str, name: str, device: int, shared_bytes: int) -> None:
        driver, runtime, module_type = _cuda()
        self.name, self.device, self.shared_bytes = name, device, shared_bytes
        self._launch, self._get_device = driver.launchKernel, runtime.getDevice
        with CurrentDevice(device), relaxed_capture():
            try:
                self._module = module_type()
                self._module.load(image)
                self.function = self._module.get_function(entry).ptr
                if shared_bytes:
                    driver.funcSetAttribute(self.function, _MAX_DYNAMIC_SHARED_BYTES, shared_bytes)
            except Exception as error:
                raise CompileError(
                    f"{name} does not load on cuda:{device} ({device_target(device).name}): {error}"
                ) from error

    def launch(self, grid: Extent, block: Extent, args: bytes | np.void, stream: int) -> None:
        """Launch with one argument struct by value.

        Args:
            grid: blocks along x, y, z.
            block: threads along x, y, z.
            args: the struct's bytes, from ``ArgumentStruct.pack`` or as one NumPy void scalar.
            stream: a handle of the kernel's device; 0 is the legacy default stream.

        Raises:
            BackendUnavailable: the driver refused the launch, or an earlier kernel left an error.
        """
        params = _OneArgument(args if type(args) is bytes else bytes(args))
        self._start(grid, block, stream, ctypes.addressof(params))

    def launch_struct(
        self, grid: Extent, threads: int, arguments: ArgumentStruct, values: tuple[Any, ...], stream: int
    ) -> None:
        """:meth:`launch` of blocks of ``threads``, with the struct's values: packed in memory that the thread keeps."""
        free = _thread.free
        memory = free.pop() if free else LaunchMemory()
        arguments.pack_into(memory.arguments, 0, *values)
        self._start(grid, (threads, 1, 1), stream, memory.params)
        free.append(memory)

    def _start(self, grid: Extent, block: Extent, stream: int, params: int) -> None:
        call = (self.function, *grid, *block, self.shared_bytes, stream, params, 0)
        try:
            if self.at_home():
                self._launch(*call)
            else:
                self.from_abroad(self._launch, *call)
        except Exception as error:
            raise BackendUnavailable(
                f"launch of {self.name} on cuda:{self.device} failed: {error} "
                f"(grid {grid}, block {block}, {self.shared_bytes} bytes of dynamic shared memory, stream {stream:#x})"
            ) from error

    def at_home(self) -> bool:
        """Whether the kernel's device is the thread's current one, and the thread has its context."""
        return self._get_device() == self.device and self.device in _thread.devices

    def from_abroad(self, call: Callable[..., Any], *args: Any) -> Any:
        """``call(*args)`` on the kernel's device, with its context."""
        with CurrentDevice(self.device):
            _thread.devices.add(self.device)
            return call(*args)


_kernels: dict[tuple[Any, ...], Kernel] = {}  # guarded by _lock, read without
_building: dict[tuple[Any, ...], threading.Lock] = {}  # guarded by _lock
_lock = threading.Lock()


def get_kernel(
    source: str, entry: str, defines: Defines, device: int, *, shared_bytes: int = 0, fmad: bool = False
) -> Kernel:
    """The kernel, compiled (or read from the disk cache) and loaded at its first use in the process.

    Args:
        source: name under ``kernels_src``, such as ``"kernels/quantize.cu"``.
        entry: name of the ``extern "C"`` function.
        defines: macros of the compilation.
        device: CUDA device index.
        shared_bytes: dynamic shared memory of each launch.
        fmad: let the compiler contract a * b + c.

    Raises:
        CompileError: the source does not compile, or the image does not load.
        BackendUnavailable: CuPy, NVRTC or a usable device is missing.
    """
    key = (source, entry, tuple(sorted(defines.items())), device, shared_bytes, fmad)
    found = _kernels.get(key)
    if found is not None:
        return found
    with _lock:
        building = _building.setdefault(key, threading.Lock())
    with building:  # two threads that ask for one kernel compile it once; other kernels compile meanwhile
        if key not in _kernels:
            target = device_target(device)
            compiled = cached_compile(source, defines, target.name, fmad=fmad)
            name = f"{entry} of {source} [{', '.join(f'{k}={v}' for k, v in sorted(defines.items()))}]"
            kernel = Kernel(compiled.image, entry, name, device, shared_bytes)
            with _lock:
                _kernels[key] = kernel
    return _kernels[key]
