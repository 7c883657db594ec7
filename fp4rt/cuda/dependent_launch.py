"""Launching a kernel before the one ahead of it in the stream is over (programmatic dependent launch, sm_90).

The kernel ahead must be this library's own and let dependents start (``start_dependents``); the kernel launched here
must wait (``wait_for_prerequisites``) before it touches what the one ahead writes. On older devices, and where the
driver does not know such launches, kernels follow each other whole, which is always right.
"""

from __future__ import annotations

import ctypes
import struct
from functools import cache
from typing import TYPE_CHECKING, Any

from fp4rt.cuda.kernel import LaunchMemory, device_target, free_memory
from fp4rt.errors import BackendUnavailable

if TYPE_CHECKING:
    from fp4rt.cuda.arguments import ArgumentStruct
    from fp4rt.cuda.kernel import Extent, Kernel

__all__ = ["launch_dependent"]

_FIRST_ARCH = 90
_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CUlaunchAttributeID


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute with an integer value."""

    _fields_ = (("id", ctypes.c_uint), ("_pad", ctypes.c_uint), ("value", ctypes.c_int), ("_rest", ctypes.c_char * 60))


_SERIALIZATION = _Attribute(id=_PROGRAMMATIC_STREAM_SERIALIZATION, value=1)
_ATTRIBUTES = ctypes.addressof(_SERIALIZATION)
# CUlaunchConfig: grid, block, bytes of shared memory, stream, attributes, how many
_CONFIG = struct.Struct("@3I3IIPPI0P")


@cache
def _launch_with_attributes() -> Any:
    """``cuLaunchKernelEx``, or None in a driver older than CUDA 11.8."""
    try:
        launch = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
    except (OSError, AttributeError):
        return None
    launch.argtypes = (ctypes.c_void_p,) * 4  # configuration, function, arguments, none
    return launch


def launch_dependent(
    kernel: Kernel, grid: Extent, threads: int, arguments: ArgumentStruct, values: tuple[Any, ...], stream: int
) -> None:
    """``kernel.launch_struct`` so that it may start while the kernel ahead of it still runs.

    Args:
        kernel: what to launch.
        grid: blocks along x, y, z.
        threads: of a block.
        arguments: the argument struct.
        values: of the struct.
        stream: the handle that the kernel ahead was launched on.

    Raises:
        BackendUnavailable: the driver refused the launch.
    """
    launch = _launch_with_attributes()
    if launch is None or device_target(kernel.device).number < _FIRST_ARCH:
        kernel.launch_struct(grid, threads, arguments, values, stream)
        return
    free = free_memory()
    memory = free.pop() if free else LaunchMemory()
    arguments.pack_into(memory.arguments, 0, *values)
    _CONFIG.pack_into(memory.config, 0, *grid, threads, 1, 1, kernel.shared_bytes, stream, _ATTRIBUTES, 1)
    call = (memory.config_address, kernel.function, memory.params, None)
    status = launch(*call) if kernel.at_home() else kernel.from_abroad(launch, *call)
    free.append(memory)
    if status:
        raise BackendUnavailable(
            f"dependent launch of {kernel.name} on cuda:{kernel.device} failed with driver error {status} "
            f"(grid {grid}, block {threads}, {kernel.shared_bytes} bytes of dynamic shared memory, stream {stream:#x})"
        )
