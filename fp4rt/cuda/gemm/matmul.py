"""Launches products: what ``selection`` chose, with the passes before and after it, on one stream.

Nothing here synchronizes. Temporary memory comes from the pool and goes back to it in the order of the stream, so a
call with ``out`` can be captured into a graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from fp4rt.backend import PrepackedViews, QuantizedViews
from fp4rt.cuda.arguments import argument_struct
from fp4rt.cuda.dependent_launch import launch_dependent
from fp4rt.cuda.gemm.autotune import remembered
from fp4rt.cuda.gemm.hopper import DECODING_SLOTS, TileSharing
from fp4rt.cuda.gemm.passes import activation_specs, dequantize_activations, repack
from fp4rt.cuda.gemm.portable import KINDS, Alignment
from fp4rt.cuda.gemm.portable_choice import portable_specs
from fp4rt.cuda.gemm.problem import Problem, activation_alignment, can_bulk_load, device_measures, weight_alignment
from fp4rt.cuda.gemm.selection import HOPPER_KERNELS, REFERENCE_THREADS, Choice, choose, finish_blocks
from fp4rt.cuda.gemm.tensor_map import NO_TENSOR_MAP, POINTER_ALIGNMENT, encode_matrix
from fp4rt.cuda.kernel import Extent, Kernel
from fp4rt.cuda.kernel_spec import KernelSpec
from fp4rt.cuda.results import clear_bytes, new_memory, result
from fp4rt.cuda.slots import SlotTable, slots_of
from fp4rt.cuda.strides import byte_strides, check_alignment
from fp4rt.format import BLOCK, INPUT_DTYPES
from fp4rt.layout import ceil_div
from fp4rt.prepacked import CHUNK_COLUMNS

if TYPE_CHECKING:
    from fp4rt.interop import ArrayView

__all__ = ["Plan", "Weight", "forget_plans", "kernel_specs", "launch", "make_plan", "matmul", "plan_of", "problem_of"]

ARGUMENTS = argument_struct("block/gemm_arguments.cuh", "GemmArguments")
HOPPER_ARGUMENTS = argument_struct("block/prepacked_arguments.cuh", "PrepackedGemmArguments", ARGUMENTS)
DTYPE_INDEX = {dtype: index for index, dtype in enumerate(INPUT_DTYPES)}
FINISH = KernelSpec("kernels/gemm_finish.cu", "gemm_finish")
FINISH_THREADS = 256
RESULT_UNIT = POINTER_ALIGNMENT // 2  # rows of so many results of two bytes have a pitch that a map can have
NO_SHARING = TileSharing(0, 0, 0, 0, 0, 0.0)
MOST_PLANS = 4096


@dataclass(frozen=True)
class Plan:
    """A choice with its kernels loaded: all that does not change between calls with operands of one form."""

    problem: Problem
    choice: Choice
    kernel: Kernel
    grid: Extent
    threads: int
    workspace: dict[str, int]  # bytes of temporary memory by purpose
    finish: Kernel | None  # adds the parts of a split k
    finish_grid: Extent
    constants: tuple[int, ...]  # of GemmArguments: from ``a_row_stride`` to ``b_layout``
    hopper: bool  # whether the kernel takes HOPPER_ARGUMENTS
    tensor_map: tuple[Any, ...] | None  # what ``encode_matrix`` takes after the address; None: there is no map
    whole_chunks: int  # of 64 columns in a box of it; 0 where k ends within one
    dependent: bool  # the kernel ahead writes the activations
    sharing: TileSharing  # of a prefill tile
    result_rows: int  # of a box of results of two bytes at an aligned address; 0: the kernel stores them itself
    behind_pass: list[Plan] = field(default_factory=list, compare=False)  # the one for where no slot is free, once made


def matmul(
    a: QuantizedViews | ArrayView,
    b: QuantizedViews | PrepackedViews,
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
        weight = Weight(b)
        launch(plan_of(a, weight, kernel), a, weight, out_dtype, alpha, bias, to, stream)
    return None if buffer is None else result(buffer, (m, n), out_dtype, first.library)


class Weight:
    """The second operand, either form, through one set of names."""

    __slots__ = ("columns", "global_scale", "layout", "plain", "scales", "shape", "tiles")

    def __init__(self, b: QuantizedViews | PrepackedViews) -> None:
        self.tiles, self.global_scale, self.shape, self.columns = b.data, b.global_scale, b.shape, b.columns
        self.plain = b if isinstance(b, QuantizedViews) else None
        self.scales, self.layout = (b.scales.pointer, b.layout.index) if isinstance(b, QuantizedViews) else (0, 0)


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


_plans: dict[tuple[Any, ...], Plan] = {}


def plan_of(a: QuantizedViews | ArrayView, weight: Weight, kernel: str | None = None) -> Plan:
    """The plan of operands of one form: sizes, kinds, strides, layouts and addresses modulo 16.

    Made at the first call, which chooses and loads; the kernels are compiled where no cache has them.
    """
    tiles = weight.tiles
    key: tuple[Any, ...] = (weight.plain is None, *weight.shape, weight.columns, weight.layout)
    key += (tiles.device.index, tiles.pointer % 16, weight.scales % 16, kernel)
    if isinstance(a, QuantizedViews):
        key += ("nvfp4", a.shape[0], a.padded_n, a.layout.index, a.data.pointer % 16, a.scales.pointer % 16)
    else:
        key += (a.dtype, a.shape[0], a.strides, a.pointer % 16)
    plan = _plans.get(key)
    if plan is None:
        problem = problem_of(a, weight)
        plan = make_plan(a, weight, problem, remembered(problem, kernel) or choose(problem, kernel))
        if len(_plans) >= MOST_PLANS:
            _plans.clear()
        _plans[key] = plan
    return plan


def forget_plans() -> None:
    """Choose anew at the next call: other tiles have been measured."""
    _plans.clear()


def make_plan(a: QuantizedViews | ArrayView, weight: Weight, problem: Problem, choice: Choice) -> Plan:
    """A choice with its kernels loaded, for operands of the form of ``a`` and ``weight``."""
    (m, n, k), device = (problem.m, problem.n, problem.k), weight.tiles.device.index
    grid, threads, spec = _launch_of(problem, choice)
    as_bf16 = choice.activations != "as given"
    a_columns, a_layout, a_strides, dtype = 0, 0, (0, 0), problem.a_kind
    if isinstance(a, QuantizedViews):
        a_columns, a_layout = a.columns, a.layout.index
    else:
        a_strides = byte_strides(a)
        if m == 1:  # the tensor map wants a pitch even for one row
            a_strides = ceil_div(k * 2, 16) * 16, a_strides[1]
    if as_bf16:
        a_strides, dtype = (ceil_div(k, BLOCK) * BLOCK * 2, 2), "bfloat16"
    hopper = choice.kernel in HOPPER_KERNELS
    tile: Any = choice.tile
    whole_chunks = tile.box_chunks if hopper and k % CHUNK_COLUMNS == 0 else 0
    return Plan(
        problem,
        choice,
        spec.on(device),
        grid,
        threads,
        choice.workspace(problem),
        FINISH.on(device) if choice.splits > 1 else None,
        (finish_blocks(m, n), 1, 1),
        (*a_strides, m, n, k, a_columns, weight.columns, a_layout, weight.layout),
        hopper,
        (dtype, m, k, a_strides[0], tile.box_rows) if hopper and dtype != "nvfp4" else None,
        whole_chunks,
        hopper and choice.activations == "bf16" and not choice.repack,
        choice.sharing(problem) or NO_SHARING,
        tile.out_tokens if choice.kernel == "prefill" and n % RESULT_UNIT == 0 else 0,
    )


def _launch_of(problem: Problem, choice: Choice) -> tuple[Extent, int, KernelSpec]:
    """(grid, threads, what to compile)."""
    m, n, k = problem.m, problem.n, problem.k
    a_kind = "bfloat16" if choice.activations != "as given" else problem.a_kind
    tile: Any = choice.tile
    if choice.kernel == "reference":
        return (ceil_div(m * n, REFERENCE_THREADS), 1, 1), REFERENCE_THREADS, _reference_spec(a_kind)
    if choice.kernel == "portable":
        align = problem.align if choice.activations == "as given" else problem.align._replace(a=16, a_scales=1)
        return (tile.blocks(m, n, choice.splits), 1, 1), tile.threads, tile.spec(a_kind, problem.b_kind, align)
    grid = tile.grid(m, n, k, problem.device.multiprocessors)
    return grid, tile.threads, tile.spec("bfloat16" if a_kind == "nvfp4" else a_kind)


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
    choice, device = plan.choice, weight.tiles.device
    slot = None
    if choice.activations == "beside":
        table = slots_of(_tables, plan.kernel, lambda: SlotTable(DECODING_SLOTS))
        slot = table.for_launch(stream)  # held until the launch is queued
        if slot is None:
            launch(_behind_pass(plan, a, weight), a, weight, out_dtype, alpha, bias, to, stream)
            return
    space = {name: new_memory((size,), "uint8", device, stream) for name, size in plan.workspace.items()}
    shared_sums = arrivals = 0
    if plan.sharing.sharers:  # cleared first: what is launched as a dependent must follow a kernel
        shared_sums, arrivals = space["shared sums"].pointer, space["arrivals"].pointer
        clear_bytes(arrivals, plan.workspace["arrivals"], device, stream)
    if isinstance(a, QuantizedViews):
        a_pointer, a_scales, a_global = a.data.pointer, a.scales.pointer, a.global_scale.pointer
    else:
        a_pointer, a_scales, a_global = a.pointer, 0, 0
    decoded = space["activations"].pointer if choice.activations != "as given" else 0
    if choice.activations == "bf16":
        a_pointer = decoded
        dequantize_activations(a, decoded, stream)  # type: ignore[arg-type]
    b_pointer = weight.tiles.pointer
    if choice.repack:
        b_pointer = space["weights"].pointer
        repack(weight.plain, b_pointer, stream)  # type: ignore[arg-type]
    values = (
        *(a_pointer, a_scales, b_pointer, weight.scales),
        bias.pointer if bias is not None else 0,
        to,
        space["partial sums"].pointer if choice.splits > 1 else 0,
        alpha.pointer if alpha is not None and not isinstance(alpha, float) else 0,
        a_global if alpha is None else 0,
        weight.global_scale.pointer if alpha is None else 0,
        *plan.constants,
        DTYPE_INDEX[out_dtype],
        DTYPE_INDEX[bias.dtype] if bias is not None else 0,
        choice.splits,
        alpha if isinstance(alpha, float) else 0.0,
    )
    if not plan.hopper:
        plan.kernel.launch_struct(plan.grid, plan.threads, ARGUMENTS, values, stream)
    else:
        described = results = NO_TENSOR_MAP
        if plan.tensor_map is not None:
            described = encode_matrix(decoded or a_pointer, *plan.tensor_map, plan.whole_chunks)
        if plan.result_rows and out_dtype != "float32" and to % POINTER_ALIGNMENT == 0:  # leaves_transposed, in CUDA
            m, n = plan.problem.m, plan.problem.n
            results = encode_matrix(to, out_dtype, m, n, 2 * n, plan.result_rows, 0)
        begin = launch_dependent if plan.dependent else Kernel.launch_struct
        sharing = plan.sharing
        tiles = (sharing.whole_tiles, shared_sums, arrivals, sharing.sharers, sharing.piece_groups)
        own = (described, results, *values, plan.whole_chunks, plan.dependent, *tiles)
        own += (decoded, 0 if slot is None else slot.number)
        begin(plan.kernel, plan.grid, plan.threads, HOPPER_ARGUMENTS, own, stream)
    if plan.finish is not None:
        launch_dependent(plan.finish, plan.finish_grid, FINISH_THREADS, ARGUMENTS, values, stream)


_tables: dict[Kernel, SlotTable] = {}  # of kernels that decode activations beside their products


def _behind_pass(plan: Plan, a: QuantizedViews | ArrayView, weight: Weight) -> Plan:
    """The same product with a pass before it that decodes the activations."""
    if not plan.behind_pass:
        tile: Any = plan.choice.tile
        choice = replace(plan.choice, tile=replace(tile, decodes=False), activations="bf16")
        plan.behind_pass.append(make_plan(a, weight, plan.problem, choice))
    return plan.behind_pass[0]


def kernel_specs() -> Iterator[KernelSpec]:
    """Compilations of the kernels for every architecture; those of Hopper are in ``hopper_choice``."""
    for kind in ("float16", "bfloat16", "nvfp4"):
        yield _reference_spec(kind)
    yield FINISH
    yield from activation_specs()
    yield from portable_specs()


def _reference_spec(a_kind: str) -> KernelSpec:
    return KernelSpec("kernels/gemm_reference.cu", "gemm_reference", (("A_KIND", KINDS[a_kind]),))
