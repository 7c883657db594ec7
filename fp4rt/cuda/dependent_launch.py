"""Launching a kernel before the one ahead of it in the stream is over (programmatic dependent launch, sm_90).

The kernel ahead must be this library's own and let dependents start (``start_dependents``); the kernel launched here
must wait (``wait_for_prerequisites``) before it touches what the one ahead writes. On older devices, and where the
driver does not know such launches, kernels follow each other whole, which is always right.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import TYPE_CHECKING, Any

from fp4rt.cuda.kernel import CurrentDevice, device_target
from fp4rt.errors import BackendUnavailable

if TYPE_CHECKING:
    from fp4rt.cuda.kernel import Extent, Kernel

__all__ = ["launch_dependent"]

_FIRST_ARCH = 90
_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CUlaunchAttributeID


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute with an integer value."""

    _fields_ = (("id", ctypes.c_uint), ("_pad", ctypes.c_uint), ("value", ctypes.c_int), ("_rest", ctypes.c_char * 60))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint),
    )


_SERIALIZATION = _Attribute(id=_PROGRAMMATIC_STREAM_SERIALIZATION, value=1)


@cache
def _launch_with_attributes() -> Any:
    """``cuLaunchKernelEx``, or None in a driver older than CUDA 11.8."""
    try:
        return ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
    except (OSError, AttributeError):
        return None


def launch_dependent(kernel: Kernel, grid: Extent, block: Extent, args: bytes, stream: int) -> None:
    """Launch ``kernel`` so that it may start while the kernel ahead of it still runs.

    Args:
        kernel: what to launch.
        grid: blocks along x, y, z.
        block: threads along x, y, z.
        args: the argument struct's bytes.
        stream: the handle that the kernel ahead was launched on.

    Raises:
        BackendUnavailable: the driver refused the launch.
    """
    launch = _launch_with_attributes()
    if launch is None or device_target(kernel.device).number < _FIRST_ARCH:
        kernel.launch(grid, block, args, stream)
        return
    config = _Config(grid, block, kernel.shared_bytes, stream, ctypes.pointer(_SERIALIZATION), 1)
    params = (ctypes.c_char_p * 1)(args)
    with CurrentDevice(kernel.device):
        status = launch(ctypes.byref(config), ctypes.c_void_p(kernel.function), params, None)
    if status:
        raise BackendUnavailable(
            f"dependent launch of {kernel.name} on cuda:{kernel.device} failed with driver error {status} "
            f"(grid {grid}, block {block}, {kernel.shared_bytes} bytes of dynamic shared memory, stream {stream:#x})"
        )
