"""The errors of fp4rt, and how messages count.

Each message says what failed, what was wanted, what was got and what to do.
"""

from __future__ import annotations

__all__ = [
    "BackendUnavailable",
    "CheckpointError",
    "CompileError",
    "DeviceError",
    "DtypeError",
    "Fp4rtError",
    "LayoutError",
    "OutOfMemoryError",
    "ScaleError",
    "ShapeError",
    "counted",
]


def counted(number: int, one: str, many: str | None = None) -> str:
    """A number with its noun: "1 tensor", "2 tensors"; ``many`` where an s does not make the plural."""
    return f"{number} {one if number == 1 else many or f'{one}s'}"


class Fp4rtError(Exception):
    """Base of the errors of fp4rt; the unknown name of a mode or a policy alone is a plain ValueError."""


class ShapeError(Fp4rtError, ValueError):
    """A shape, stride, extent or size does not fit."""


class DtypeError(Fp4rtError, TypeError):
    """A dtype is not one of the accepted ones; nothing is ever cast silently."""


class LayoutError(Fp4rtError, ValueError):
    """A scale layout is unknown, or not the one that the call needs."""


class ScaleError(Fp4rtError, ValueError):
    """A global scale is not finite and positive."""


class DeviceError(Fp4rtError, ValueError):
    """Arrays live on devices that cannot meet; nothing is ever moved silently."""


class CheckpointError(Fp4rtError, ValueError):
    """A file is broken, ambiguous, incomplete or breaks an invariant."""


class BackendUnavailable(Fp4rtError, RuntimeError):
    """The backend that the arrays call for cannot run here; the message says why."""


class CompileError(Fp4rtError, RuntimeError):
    """A kernel could not be compiled or loaded for the device."""


class OutOfMemoryError(Fp4rtError, MemoryError):
    """A pool has no memory for a request; the message says what is in use and what to do."""
