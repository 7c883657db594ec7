"""Which kernel computes a product, with which tile, and what goes before and after it. Pure Python, no GPU.

    prepacked B on sm_90a                 decode, small or prefill: fp4rt/cuda/gemm/hopper_choice.py
    plain B on sm_90a, many tokens        the same, after B is repacked into a workspace
    everything else from sm_80            portable, from B as it lies or prepacked

NVFP4 activations become bf16 in a workspace first, exactly, except few of them: the decode kernel, and the portable one
with a plain B, decode those themselves; and those of many blocks, each with a tile, which decode them among themselves.
Where k is split among blocks, a second kernel adds the parts.

Choosing is: candidates, cost, minimum.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fp4rt.cuda.gemm import hopper_choice, passes
from fp4rt.cuda.gemm.hopper import DecodeTile, PrefillTile, TileSharing
from fp4rt.cuda.gemm.portable import PortableTile
from fp4rt.cuda.gemm.portable_choice import choose_portable
from fp4rt.errors import BackendUnavailable, ShapeError
from fp4rt.format import BLOCK
from fp4rt.layout import ceil_div
from fp4rt.prepacked import tiles_shape

if TYPE_CHECKING:
    from fp4rt.cuda.gemm.hopper import HopperTile
    from fp4rt.cuda.gemm.problem import Problem

__all__ = [
    "HOPPER_KERNELS",
    "KERNELS",
    "REFERENCE_THREADS",
    "REPACK_TOKENS",
    "Choice",
    "check_grid",
    "choose",
    "finish_blocks",
    "with_hopper_tile",
]

HOPPER_KERNELS = ("decode", "small", "prefill")
KERNELS = ("reference", "portable", *HOPPER_KERNELS)
HOPPER_ARCH = 90
REPACK_TOKENS = 65  # from here on repacking B for one product costs less than the portable kernel loses
DECODED_TOKENS = 16  # NVFP4 activations that the portable kernel decodes itself
# And the decode kernel: each of its blocks decodes all of them, which beyond these takes longer than a pass before it.
OWN_TOKENS, OWN_ELEMENTS = 8, 1 << 17
CODE_ALIGNMENT = 8  # of the codes that it reads
MAX_GRID = 2**31 - 1
MAX_EXTENT = 2**31 - 4096  # of k, and of what the copy engine has coordinates of; rounded up to a tile it still fits
REFERENCE_THREADS = 256
FINISH_COLUMNS = 1024  # of a block of gemm_finish.cu


@dataclass(frozen=True)
class Choice:
    """How one product is computed.

    Attributes:
        kernel: one of :data:`KERNELS`.
        tile: its compile-time choices; None for the reference.
        splits: parts of k that different blocks of the portable kernel sum.
        activations: "as given"; "bf16" where NVFP4 activations become bf16 in a workspace first; "beside" where the
            kernel does that itself, beside its products.
        repack: whether B is repacked into a workspace first.
        why: for people.
    """

    kernel: str
    tile: PortableTile | HopperTile | None
    splits: int
    activations: str
    repack: bool
    why: str

    def sharing(self, problem: Problem) -> TileSharing | None:
        """How workers divide the tiles; None where the kernel knows no such thing."""
        if not isinstance(self.tile, PrefillTile):
            return None
        return self.tile.sharing(problem.m, problem.n, problem.k, problem.device.multiprocessors)

    def workspace(self, problem: Problem) -> dict[str, int]:
        """Bytes of temporary device memory by purpose."""
        found = {}
        if self.activations != "as given":
            found["activations"] = problem.m * ceil_div(problem.k, BLOCK) * BLOCK * 2
        if self.repack:
            groups, tiles, tile_bytes = tiles_shape(problem.n, problem.k)
            found["weights"] = groups * tiles * tile_bytes
        sharing = self.sharing(problem)
        if sharing is not None and sharing.sharers:
            found["shared sums"], found["arrivals"] = sharing.sums_bytes, sharing.arrivals_bytes
        if self.splits > 1:
            found["partial sums"] = self.splits * problem.m * problem.n * 4
        return found


def choose(problem: Problem, kernel: str | None = None) -> Choice:
    """The best way for a product with m >= 1.

    Args:
        problem: the product.
        kernel: one of :data:`KERNELS` to have that one, for tests and measurements.

    Raises:
        BackendUnavailable: the kernel asked for cannot compute this; says what is missing.
        ShapeError: more blocks than a launch can have.
    """
    if kernel is not None and kernel not in KERNELS:
        raise BackendUnavailable(f"no kernel {kernel!r} for products; there are {', '.join(KERNELS)}")
    if kernel == "reference":
        choice = _reference(problem)
    elif kernel == "portable":
        choice = _portable(problem, "asked for")
    elif kernel is not None:
        choice = _hopper(problem, kernel)
    else:
        choice = _best(problem)
    check_grid(problem, choice)
    return choice


def _best(problem: Problem) -> Choice:
    missing = _missing_for_hopper(problem)
    if problem.b_kind == "prepacked" or problem.m >= REPACK_TOKENS:
        if not missing:
            return _hopper(problem, None)
        return _portable(problem, f"not the Hopper kernels: {missing}")
    if problem.device.arch == HOPPER_ARCH:
        return _portable(problem, f"b is not prepacked, and repacking it once pays from {REPACK_TOKENS} tokens on")
    return _portable(problem, f"sm_{problem.device.arch} has no kernels of its own")


def _missing_for_hopper(problem: Problem) -> str:
    device = problem.device
    if device.arch != HOPPER_ARCH or not device.specific:
        return f"they need sm_90a, this device is sm_{device.arch}"
    if max(problem.m, problem.n) > MAX_EXTENT:
        return f"the copy engine has no coordinates beyond {MAX_EXTENT}; cut a or b into parts for speed"
    if problem.a_kind != "nvfp4" and not problem.bulk:
        return "the copy engine needs a with dense rows at multiples of 16 bytes; pass a copy for speed"
    if problem.b_kind == "prepacked" and problem.align.b % 16:
        return "the tiles of b are not at a multiple of 16 bytes"
    return ""


def _hopper(problem: Problem, kernel: str | None) -> Choice:
    missing = _missing_for_hopper(problem)
    if missing:
        raise BackendUnavailable(f"kernel {kernel!r} cannot compute this product: {missing}")
    tile, why = hopper_choice.choose_hopper(
        problem.m, problem.n, problem.k, problem.device.multiprocessors, kernel, problem.a_kind == "nvfp4"
    )
    if problem.b_kind != "prepacked":
        why += f"; b is repacked for this product, which pays from {REPACK_TOKENS} tokens on"
    return with_hopper_tile(problem, tile, why)


def with_hopper_tile(problem: Problem, tile: HopperTile, why: str) -> Choice:
    """A Hopper kernel with one of its tiles, told who decodes activations and whether a block has one piece."""
    tile = tile.for_product(problem.m, problem.n, problem.k, problem.device.multiprocessors)
    quantized, decodes = problem.a_kind == "nvfp4", False
    if isinstance(tile, DecodeTile):
        few = problem.m <= OWN_TOKENS and problem.m * problem.k <= OWN_ELEMENTS
        decodes = quantized and few and tile.k_cluster == 1 and problem.align.a >= CODE_ALIGNMENT
        tile = replace(tile, activation_warps=hopper_choice.ACTIVATION_WARPS if decodes else 0)
    activations = "bf16" if quantized and not decodes else "as given"
    if quantized and isinstance(tile, PrefillTile) and tile.can_decode(*problem[1:4], problem.align):
        tile, activations = replace(tile, decodes=True), "beside"
        why += "; its blocks decode the activations among themselves"
    return Choice(tile.entry.removeprefix("gemm_"), tile, 1, activations, problem.b_kind != "prepacked", why)


def _portable(problem: Problem, why: str) -> Choice:
    as_bf16 = problem.a_kind == "nvfp4" and (
        problem.b_kind == "prepacked" or problem.m > DECODED_TOKENS or problem.k % 2 == 1
    )
    a_kind = "bfloat16" if as_bf16 else problem.a_kind
    tile, splits, why_tile = choose_portable(problem, a_kind)
    return Choice("portable", tile, splits, "bf16" if as_bf16 else "as given", False, f"{why}; {why_tile}")


def _reference(problem: Problem) -> Choice:
    if problem.b_kind == "prepacked":
        raise BackendUnavailable("the reference kernel reads plain weights; pass b before prepack")
    return Choice("reference", None, 1, "as given", False, "asked for")


def check_grid(problem: Problem, choice: Choice) -> None:
    """Raises ShapeError where a kernel cannot count the columns, or a launch the blocks."""
    m, n, k = problem.m, problem.n, problem.k
    most_columns = passes.MOST_COLUMNS if choice.activations == "bf16" else MAX_EXTENT
    if k > most_columns:
        raise ShapeError(f"a product of k = {k} columns: these operands may have {most_columns}; cut them into parts")
    launches = {choice.kernel: ceil_div(m * n, REFERENCE_THREADS)}
    if isinstance(choice.tile, PortableTile):
        launches[choice.kernel] = choice.tile.blocks(m, n, choice.splits)
    elif choice.tile is not None:
        launches[choice.kernel] = choice.tile.grid(m, n, k, problem.device.multiprocessors)[0]
    if choice.splits > 1:
        launches["finishing"] = finish_blocks(m, n)
    for kernel, blocks in launches.items():
        if blocks > MAX_GRID:
            raise ShapeError(
                f"a product of m = {m} by n = {n} takes {blocks} blocks of the {kernel} kernel, a launch has at most "
                f"{MAX_GRID}; cut a into parts"
            )


def finish_blocks(m: int, n: int) -> int:
    """Blocks of ``gemm_finish.cu``."""
    return ceil_div(n, FINISH_COLUMNS) * m
