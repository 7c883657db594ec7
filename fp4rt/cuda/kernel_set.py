"""Every kernel of the project, with every set of macros that it is launched with."""

from __future__ import annotations

from importlib import import_module

from fp4rt.cuda.arch import Target
from fp4rt.cuda.kernel_spec import KernelSpec

__all__ = ["all_kernels", "kernels_for"]

# Modules that launch kernels; each has ``kernel_specs() -> Iterable[KernelSpec]``.
_LAUNCHERS: tuple[str, ...] = (
    "fp4rt.cuda.quantizers.amax",
    "fp4rt.cuda.quantizers.quantize",
    "fp4rt.cuda.quantizers.dequantize",
    "fp4rt.cuda.quantizers.relayout",
    "fp4rt.cuda.gemm.matmul",
    "fp4rt.cuda.gemm.hopper_choice",
    "fp4rt.cuda.gemm.prepack",
)


def all_kernels() -> tuple[KernelSpec, ...]:
    """The whole set."""
    return tuple(spec for name in _LAUNCHERS for spec in import_module(name).kernel_specs())


def kernels_for(target: Target) -> tuple[KernelSpec, ...]:
    """The kernels that exist for ``target``."""
    return tuple(spec for spec in all_kernels() if spec.built_for(target))
