"""Launches products: what ``selection`` chose, with the passes before and after it, on one stream.

Nothing here synchronizes. Temporary memory comes from the pool and goes back to it in the order of the stream, so a
call with ``out`` can be captured into a graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from fp4rt import interop
from fp4rt.backend import QuantizedViews
from fp4rt.cuda.arguments import argument_struct
from fp4rt.cuda.dependent_launch import launch_dependent
from fp4rt.cuda.gemm.autotune import remembered
from fp4rt.cuda.gemm.passes import activation_specs, dequantize_activations, repack
from fp4rt.cuda.gemm.portable import KINDS, Alignment
from fp4rt.cuda.gemm.portable_choice import portable_specs
from fp4rt.cuda.gemm.problem import Problem, activation_alignment, can_bulk_load, device_measures, weight_alignment
from fp4rt.cuda.gemm.selection import HOPPER_KERNELS, Choice, choose
from fp4rt.cuda.gemm.tensor_map import encode_activations
from fp4rt.cuda.kernel import Kernel
from fp4rt.cuda.kernel_spec import KernelSpec
from fp4rt.cuda.results import new_memory, result
from fp4rt.cuda.strides import byte_strides, check_alignment
from fp4rt.format import BLOCK, INPUT_DTYPES
from fp4rt.layout import block_columns, ceil_div
from fp4rt.prepacked import PrepackedWeight, check_version

if TYPE_CHECKING:
    from fp4rt.device import Device
    from fp4rt.interop import ArrayView

__all__ = ["Plan", "Weight", "kernel_specs", "launch", "make_plan", "matmul", "plan_of", "problem_of"]

ARGUMENTS = argument_struct("block/gemm_arguments.cuh", "GemmArguments")
HOPPER_ARGUMENT_BYTES = 320  # block/prepacked_arguments.cuh: a tensor map aligned to 64, GemmArguments, `dependent`
FINISH = KernelSpec("kernels/gemm_finish.cu", "gemm_finish")
REFERENCE_THREADS = FINISH_THREADS = 256
FINISH_COLUMNS = 1024  # of a block of gemm_finish.cu


@dataclass(frozen=True)
class Plan:
    """A choice with its kernels loaded: all that does not change between calls with one problem."""

    problem: Problem
    choice: Choice
    kernel: Kernel
    blocks: int
    threads: int
    finish: Kernel | None  # adds the parts of a split k


def matmul(
    a: QuantizedViews | ArrayView,
    b: QuantizedViews | PrepackedWeight,
    out_dtype: str,
    alpha: ArrayView | float | None,
    bias: ArrayView | None,
    out: ArrayView | None,
    stream: int,
    *,
    kernel: str | None = None,
) -> Any:
    """See :class:`fp4rt.backend.Backend`. ``kernel`` asks for one of ``selection.KERNELS``."""
    first = a.data if isinstance(a, QuantizedViews) else a
    (m, _), (n, _) = a.shape, b.shape
    buffer = new_memory((m, n), out_dtype, first.device, stream) if out is None else None
    if m > 0 and n > 0:
        if out is not None:
            check_alignment(out)
        to = buffer.pointer if buffer is not None else out.pointer  # type: ignore[union-attr]
        weight = Weight(b, stream)
        plan = plan_of(first.device.index, problem_of(a, weight), kernel)
        launch(plan, a, weight, out_dtype, alpha, bias, to, stream)
    return None if buffer is None else result(buffer, (m, n), out_dtype, first.library)


class Weight:
    """The second operand, either form, through one set of names."""

    __slots__ = ("columns", "global_scale", "layout", "plain", "scales", "shape", "tiles")

    def __init__(self, b: QuantizedViews | PrepackedWeight, stream: int) -> None:
        self.shape: tuple[int, int] = b.shape
        self.plain = b if isinstance(b, QuantizedViews) else None
        if isinstance(b, QuantizedViews):
            self.tiles, self.scales, self.global_scale = b.data, b.scales.pointer, b.global_scale
            self.layout, self.columns = b.layout.index, b.columns
        else:
            check_version(b)
            self.tiles = interop.view(b.data, "b", stream)
            self.global_scale = interop.view(b.global_scale, "b.global_scale", stream)
            self.scales = self.layout = 0
            self.columns = block_columns(b.padded_n)


def problem_of(a: QuantizedViews | ArrayView, weight: Weight) -> Problem:
    """What selection looks at."""
    (m, k), (n, _) = a.shape, weight.shape
    quantized = isinstance(a, QuantizedViews)
    if weight.plain is not None:
        b_kind, b_align = "nvfp4", weight_alignment(weight.plain)
    else:
        b_kind, b_align = "prepacked", ((16 if weight.tiles.pointer % 16 == 0 else 1), 1)
    first = a.data if isinstance(a, QuantizedViews) else a
    return Problem(
        device_measures(first.device.index),
        m,
        n,
        k,
        "nvfp4" if quantized else first.dtype,
        b_kind,
        Alignment(*activation_alignment(a), *b_align),
        quantized or can_bulk_load(first),
    )


@lru_cache(maxsize=4096)
def plan_of(device: int, problem: Problem, kernel: str | None = None) -> Plan:
    """Chooses and loads; the kernels are compiled where no cache has them."""
    return make_plan(device, problem, remembered(problem, kernel) or choose(problem, kernel))


def make_plan(device: int, problem: Problem, choice: Choice) -> Plan:
    """A choice with its kernels loaded."""
    blocks, threads, spec = _launch_of(problem, choice)
    finish = FINISH.on(device) if choice.splits > 1 else None
    return Plan(problem, choice, spec.on(device), blocks, threads, finish)


def _launch_of(problem: Problem, choice: Choice) -> tuple[int, int, KernelSpec]:
    """(blocks, threads, what to compile)."""
    m, n, k = problem.m, problem.n, problem.k
    a_kind = "float16" if choice.activations == "fp16" else problem.a_kind
    tile: Any = choice.tile
    if choice.kernel == "reference":
        return ceil_div(m * n, REFERENCE_THREADS), REFERENCE_THREADS, _reference_spec(a_kind)
    if choice.kernel == "portable":
        align = problem.align if choice.activations == "as given" else problem.align._replace(a=16, a_scales=1)
        return tile.blocks(m, n, choice.splits), tile.threads, tile.spec(a_kind, problem.b_kind, align)
    blocks = tile.grid(m, n, k, choice.splits, problem.device.multiprocessors)
    return blocks, tile.threads, tile.spec(a_kind)


def launch(
    plan: Plan,
    a: QuantizedViews | ArrayView,
    weight: Weight,
    out_dtype: str,
    alpha: ArrayView | float | None,
    bias: ArrayView | None,
    to: int,
    stream: int,
) -> None:
    """The passes and the product. Temporary memory lives until the end of this function, then in stream order."""
    problem, choice = plan.problem, plan.choice
    (m, n, k), device = (problem.m, problem.n, problem.k), weight.tiles.device
    space = {name: _temporary(size, device, stream) for name, size in choice.workspace(problem).items()}
    a_pointer, a_scales, a_global, a_strides, a_columns, a_layout = _left(a)
    a_dtype = problem.a_kind
    if choice.activations == "fp16":
        a_pointer, a_dtype = space["activations"].pointer, "float16"
        dequantize_activations(a, a_pointer, stream)  # type: ignore[arg-type]
        a_strides = (ceil_div(k, BLOCK) * BLOCK * 2, 2)
    b_pointer = weight.tiles.pointer
    if choice.repack:
        b_pointer = space["weights"].pointer
        repack(weight.plain, b_pointer, stream)  # type: ignore[arg-type]
    partial = space["partial sums"].pointer if choice.splits > 1 else 0
    args = ARGUMENTS.pack(
        *(a_pointer, a_scales, b_pointer, weight.scales),
        bias.pointer if bias is not None else 0,
        *(to, partial),
        alpha.pointer if alpha is not None and not isinstance(alpha, float) else 0,
        a_global if alpha is None else 0,
        weight.global_scale.pointer if alpha is None else 0,
        *a_strides,
        *(m, n, k, a_columns, weight.columns, a_layout, weight.layout),
        INPUT_DTYPES.index(out_dtype),
        INPUT_DTYPES.index(bias.dtype) if bias is not None else 0,
        choice.splits,
        alpha if isinstance(alpha, float) else 0.0,
    )
    grid, block = (plan.blocks, 1, 1), (plan.threads, 1, 1)
    if choice.kernel in HOPPER_KERNELS:
        tile: Any = choice.tile
        described = encode_activations(a_pointer, a_dtype, m, k, a_strides[0], tile.box)
        dependent = choice.activations == "fp16" and not choice.repack  # the kernel ahead writes the activations
        struct = (described + args + dependent.to_bytes(4, "little")).ljust(HOPPER_ARGUMENT_BYTES, b"\0")
        if dependent:
            launch_dependent(plan.kernel, grid, block, struct, stream)
        else:
            plan.kernel.launch(grid, block, struct, stream)
    else:
        plan.kernel.launch(grid, block, args, stream)
    if plan.finish is not None:
        plan.finish.launch((ceil_div(n, FINISH_COLUMNS) * m, 1, 1), (FINISH_THREADS, 1, 1), args, stream)


def _temporary(nbytes: int, device: Device, stream: int) -> Any:
    return new_memory((nbytes,), "uint8", device, stream)


def _left(a: QuantizedViews | ArrayView) -> tuple[int, int, int, tuple[int, int], int, int]:
    """Of A: address, address of scales, of the global scale, strides in bytes, block columns, layout."""
    if isinstance(a, QuantizedViews):
        return a.data.pointer, a.scales.pointer, a.global_scale.pointer, (0, 0), a.columns, a.layout.index
    row, column = byte_strides(a)
    if a.shape[0] == 1:  # the tensor map wants a pitch even for one row
        row = ceil_div(a.shape[1] * 2, 16) * 16
    return a.pointer, 0, 0, (row, column), 0, 0


def kernel_specs() -> Iterator[KernelSpec]:
    """Compilations of the kernels for every architecture; those of Hopper are in ``hopper_choice``."""
    for kind in ("float16", "bfloat16", "nvfp4"):
        yield _reference_spec(kind)
    yield FINISH
    yield from activation_specs()
    yield from portable_specs()


def _reference_spec(a_kind: str) -> KernelSpec:
    return KernelSpec("kernels/gemm_reference.cu", "gemm_reference", (("A_KIND", KINDS[a_kind]),))
