"""The portable kernel's compile-time choices, and what a launch adds to them: kinds and alignments of operands."""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace
from typing import NamedTuple

from fp4rt.cuda.arch import MOST_THREADS
from fp4rt.cuda.kernel_spec import KernelSpec
from fp4rt.errors import ShapeError
from fp4rt.layout import ceil_div

__all__ = ["FEWEST_STAGES", "KINDS", "Alignment", "PortableTile", "alignment_of"]

KINDS = {"float16": 0, "bfloat16": 1, "nvfp4": 3, "prepacked": 4}  # kernels_src/block/gemm_arguments.cuh

_PIECE_COLUMNS = 128
_ROWS, _TOKENS = 16, 8  # of one tensor-core operand
_HALVES_A_COPY = 8
FEWEST_STAGES = 2  # one is multiplied while the next is on its way
_SUM_PADDING = 4  # floats between the sums of two tokens, so that the lanes of a warp find different banks


class Alignment(NamedTuple):
    """Bytes that addresses and rows are multiples of, as far as the kernel can use them; 1 (2 for halves) is any."""

    a: int = 16
    a_scales: int = 4
    b: int = 16
    b_scales: int = 4


def alignment_of(address: int, useful: tuple[int, ...]) -> int:
    """The largest of ``useful`` (descending, the last one always fits) that divides ``address``.

    Args:
        address: an address, or the bitwise or of an address and the distances between rows.
        useful: such as (16, 8, 1).
    """
    return next(bytes_ for bytes_ in useful if address % bytes_ == 0)


@dataclass(frozen=True)
class PortableTile:
    """``gemm_portable.cu``: mma.sync, any architecture from sm_80.

    Attributes:
        warps_n, warps_k: warps of a block along rows of B and along the columns of a stage.
        row_tiles: tiles of 16 rows of a warp.
        token_tiles: tiles of 8 tokens of a warp.
        pieces: pieces of 128 columns that a warp takes of each stage.
        stages: stages in shared memory, one of them being multiplied.
        blocks_per_sm: what the compiler keeps registers for.
    """

    warps_n: int
    warps_k: int
    row_tiles: int
    token_tiles: int
    pieces: int
    stages: int
    blocks_per_sm: int

    def __post_init__(self) -> None:
        rows, threads = self.block_k // _HALVES_A_COPY, self.threads  # copies of a row of activations
        if (
            min(astuple(self)) < 1
            or self.stages < FEWEST_STAGES
            or threads > MOST_THREADS
            or max(rows, threads) % min(rows, threads)
        ):
            raise ShapeError(
                f"portable: {self} has something less than 1, under {FEWEST_STAGES} stages, over {MOST_THREADS} "
                "threads or parts of rows a round of copies; choose another tile"
            )

    @property
    def threads(self) -> int:
        """Of a block."""
        return 32 * self.warps_n * self.warps_k

    @property
    def block_n(self) -> int:
        """Rows of B of a block."""
        return _ROWS * self.row_tiles * self.warps_n

    @property
    def block_m(self) -> int:
        """Tokens of a block."""
        return _TOKENS * self.token_tiles

    @property
    def block_k(self) -> int:
        """Columns of a stage."""
        return _PIECE_COLUMNS * self.pieces * self.warps_k

    def with_stages(self, stages: int) -> PortableTile:
        """The same with another number of stages."""
        return replace(self, stages=stages)

    def shared_bytes(self, a_kind: str) -> int:
        """Dynamic shared memory: the ring of stages, and later in the same place the sums."""
        weights = self.block_n * self.block_k * 9 // 16
        activations = self.block_m * self.block_k * (9 if a_kind == "nvfp4" else 32) // 16
        sums = self.warps_k * self.block_m * (self.block_n + _SUM_PADDING) * 4
        return max(self.stages * (weights + activations), sums)

    def blocks(self, m: int, n: int, splits: int) -> int:
        """Blocks of a launch."""
        return ceil_div(m, self.block_m) * ceil_div(n, self.block_n) * splits

    def max_splits(self, k: int) -> int:
        """Parts into which k can be cut."""
        return ceil_div(k, self.block_k)

    def spec(self, a_kind: str, b_kind: str, align: Alignment) -> KernelSpec:
        """What to compile."""
        shared_bytes = self.shared_bytes(a_kind)
        defines: dict[str, int | str] = {
            "A_KIND": KINDS[a_kind],
            "A_ALIGN": align.a,
            "A_SCALE_ALIGN": align.a_scales if a_kind == "nvfp4" else Alignment().a_scales,  # one name for one kernel
            "B_KIND": KINDS[b_kind],
            "B_ALIGN": align.b,
            "B_SCALE_ALIGN": align.b_scales if b_kind == "nvfp4" else Alignment().b_scales,
            "WARPS_N": self.warps_n,
            "WARPS_K": self.warps_k,
            "ROW_TILES": self.row_tiles,
            "TOKEN_TILES": self.token_tiles,
            "PIECES": self.pieces,
            "STAGES": self.stages,
            "BLOCKS_PER_SM": self.blocks_per_sm,
            "SHARED_BYTES": shared_bytes,
        }
        return KernelSpec(
            "kernels/gemm_portable.cu", "gemm_portable", tuple(sorted(defines.items())), shared_bytes=shared_bytes
        )
