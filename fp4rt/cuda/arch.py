"""Which target NVRTC compiles for: the device's own architecture, or PTX for one that NVRTC does not know yet.

Architecture-specific targets (the ``a`` suffix) unlock wgmma on Hopper and the fp4 conversions on Blackwell; their
code runs on that one architecture only, so a device newer than NVRTC gets plain PTX, which the driver translates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fp4rt.errors import BackendUnavailable

__all__ = ["ARCH_SPECIFIC", "COMPILED_ARCHS", "MINIMUM", "MOST_THREADS", "Target", "choose_target", "parse_target"]

MINIMUM = 80  # bf16 arithmetic and cp.async
MOST_THREADS = 1024  # of a block
ARCH_SPECIFIC = frozenset({90, 100, 101, 103, 110, 120, 121})  # architectures with an ``a`` target
COMPILED_ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_120a")  # what the tests compile for


class Target(NamedTuple):
    """One compile target: ``number`` 90 of ``sm_90a``; ``ptx`` where the driver is to finish the job."""

    number: int
    specific: bool = False
    ptx: bool = False

    @property
    def name(self) -> str:
        """NVRTC's spelling: ``sm_90a``, ``sm_86``, ``compute_121``."""
        return f"{'compute' if self.ptx else 'sm'}_{self.number}{'a' if self.specific else ''}"


def choose_target(capability: tuple[int, int], supported: Sequence[int], nvrtc_version: tuple[int, int]) -> Target:
    """The target for a device of compute ``capability``.

    Args:
        capability: (major, minor) of the device.
        supported: architecture numbers that NVRTC knows, such as ``(80, 86, 90)``.
        nvrtc_version: (major, minor), for the message.

    Raises:
        BackendUnavailable: the device is older than sm_80, or NVRTC knows nothing that it could run.
    """
    number = capability[0] * 10 + capability[1]
    known = ", ".join(str(s) for s in supported)
    nvrtc = f"NVRTC {nvrtc_version[0]}.{nvrtc_version[1]}"
    if number < MINIMUM:
        raise BackendUnavailable(
            f"fp4rt's CUDA kernels need sm_{MINIMUM} or newer, this device is sm_{number}; use host arrays"
        )
    if number in supported:
        return Target(number, specific=number in ARCH_SPECIFIC)
    older = [s for s in supported if MINIMUM <= s < number]
    if not older:
        raise BackendUnavailable(
            f"{nvrtc} cannot compile for sm_{number}: it supports {known}, none of which sm_{number} can run; "
            f"install a CUDA toolkit (or nvidia-cuda-nvrtc wheel) that lists {number}"
        )
    return Target(max(older), ptx=True)


def parse_target(name: str, supported: Sequence[int], nvrtc_version: tuple[int, int]) -> Target:
    """The target spelled ``name``, as given on a command line: ``sm_90a``, ``sm_86``, ``compute_90``.

    Raises:
        BackendUnavailable: the spelling is wrong, or fp4rt or NVRTC does not know the architecture; lists what both do.
    """
    kind, _, rest = name.partition("_")
    specific, digits = rest.endswith("a"), rest.removesuffix("a")
    wanted = [Target(s, specific=s in ARCH_SPECIFIC).name for s in supported if s >= MINIMUM]
    known = f"wanted one of {', '.join(wanted)}, or compute_NN for PTX"
    nvrtc = f"NVRTC {nvrtc_version[0]}.{nvrtc_version[1]}"
    if kind not in ("sm", "compute") or not (digits.isascii() and digits.isdecimal()):
        raise BackendUnavailable(f"{name!r} is no CUDA architecture; {known}")
    number = int(digits)
    if number < MINIMUM or number not in supported or (specific and number not in ARCH_SPECIFIC):
        raise BackendUnavailable(f"{nvrtc} cannot compile fp4rt for {name}; {known}")
    return Target(number, specific, ptx=kind == "compute")
