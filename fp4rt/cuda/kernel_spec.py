"""One compilation of one kernel, by name: what a launch asks for and what CI and ``fp4rt compile`` build ahead."""

from __future__ import annotations

from dataclasses import dataclass

from fp4rt.cuda.arch import Target
from fp4rt.cuda.cache import cached_compile
from fp4rt.cuda.compiler import CompiledKernel
from fp4rt.cuda.kernel import Kernel, get_kernel

__all__ = ["KernelSpec"]


@dataclass(frozen=True)
class KernelSpec:
    """``source`` under ``kernels_src``, its ``extern "C"`` entry and its macros.

    ``archs`` limits it to the ``a`` targets of some architecture numbers; empty means sm_80 and newer.
    """

    source: str
    entry: str
    defines: tuple[tuple[str, int | str], ...] = ()
    fmad: bool = False
    shared_bytes: int = 0
    archs: frozenset[int] = frozenset()

    def built_for(self, target: Target) -> bool:
        """Whether the kernel exists for ``target``."""
        return not self.archs or (target.number in self.archs and target.specific)

    def compile(self, arch: str, *, must_keep: bool = False) -> CompiledKernel:
        """Through the disk cache, for a target's name; needs no GPU. ``must_keep``: OSError where it cannot be kept."""
        return cached_compile(self.source, dict(self.defines), arch, fmad=self.fmad, must_keep=must_keep)

    def on(self, device: int) -> Kernel:
        """Loaded on a device."""
        return get_kernel(
            self.source, self.entry, dict(self.defines), device, shared_bytes=self.shared_bytes, fmad=self.fmad
        )

    def __str__(self) -> str:
        return f"{self.source} [{', '.join(f'{k}={v}' for k, v in self.defines)}]"
