"""Tiles of the decode and small kernels, which hold all tokens: their macros, memory plan and grid.

Each class holds what its kernel's header calls compile-time choices, in the same words, and refuses what the kernel
cannot do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, TypeVar

from fp4rt.cuda.arch import MOST_THREADS
from fp4rt.cuda.gemm.hopper_plan import (
    A_TYPES,
    BARRIER_BYTES,
    CHUNK_FRAGMENTS,
    GROUP_CHUNKS,
    ONE_STAGE,
    SUMS_BARRIERS,
    SWIZZLE_BYTES,
    TILE_OUT_BYTES,
    TOKEN_BYTES,
    WARPGROUP_THREADS,
    SharedPlan,
    check_divides,
    public_macros,
    refuse,
    spec_of,
)
from fp4rt.format import BLOCK
from fp4rt.layout import ceil_div
from fp4rt.prepacked import TILE_BYTES, TILE_COLUMNS, TILE_ROWS

if TYPE_CHECKING:
    from fp4rt.cuda.kernel import Extent
    from fp4rt.cuda.kernel_spec import KernelSpec

__all__ = ["DecodeTile", "SmallTile"]

_Tile = TypeVar("_Tile", bound="_StageTile")

# Of a consumer and of a producer thread, by consumer warpgroups
_CONSUMER_REGISTERS = {1: (240, 40), 2: (232, 40), 3: (160, 32), 4: (112, 32)}
_SUMS_TILE_BYTES = 512  # 16 rows x 8 tokens, fp32
_WARP_LANES = 32
_LEAST_OTHER_WARPS = 4  # of a decode tile, beside the consumers: gemm_decode.cu keeps registers for so many


@dataclass(frozen=True)
class _StageTile:
    """What decode and small have in common: all tokens in one tile, k taken and split in whole stages.

    Attributes:
        token_tiles: tiles of 8 tokens; all tokens of the product.
        row_tiles: tiles of 16 rows of the weight, of one block.
        stage_groups: column groups of 256 in a stage.
        stages: stages on their way.
        k_cluster: blocks of a cluster, which share k: 1, 2 or 4.
        one_piece: each block, or cluster, has one row block, that of its place in the grid; see :meth:`for_product`.
    """

    token_tiles: int
    row_tiles: int
    stage_groups: int
    stages: int
    k_cluster: int = field(default=1, kw_only=True)
    one_piece: bool = field(default=False, kw_only=True)

    source: ClassVar[str]
    entry: ClassVar[str]

    def _refuse(self, own_tiles: int, faults: Mapping[str, bool]) -> None:
        copies = self.box_chunks + (2 if own_tiles else 1) * self.stage_groups
        usual = {
            "no tokens, rows, groups or stages": min(self.token_tiles, self.row_tiles, self.stage_groups, self.stages)
            < 1,
            "more than 256 tokens": self.max_tokens > 256,
            "a cluster of neither one, two nor four blocks": self.k_cluster not in (1, 2, 4),
            "more copies a stage than its producer has lanes": copies > _WARP_LANES,
        }
        refuse(self.entry.removeprefix("gemm_"), self, usual | dict(faults))

    @property
    def max_tokens(self) -> int:
        """Largest m."""
        return 8 * self.token_tiles

    @property
    def box_rows(self) -> int:
        """Tokens that one copy of activations brings."""
        return self.max_tokens

    @property
    def box_chunks(self) -> int:
        """Chunks of 64 columns that it brings where k has whole ones: all of a stage."""
        return self.stage_groups * GROUP_CHUNKS

    def _plan(self, reduction_bytes: int) -> SharedPlan:
        plan = SharedPlan()
        plan.add("_WEIGHTS_AT", self.stage_groups * self.row_tiles * TILE_BYTES)
        plan.add("ACTIVATIONS_AT", self.box_chunks * self.max_tokens * TOKEN_BYTES, SWIZZLE_BYTES)
        stage_bytes = plan.macros["STAGE_BYTES"] = plan.nbytes
        plan.nbytes = self.stages * stage_bytes
        plan.add("BARRIERS_AT", (2 * self.stages + SUMS_BARRIERS) * BARRIER_BYTES)
        if self.k_cluster > 1 and reduction_bytes <= self.stages * stage_bytes:
            plan.macros["REDUCTION_AT"] = 0  # over the stages: a block of a cluster has done with them
        else:
            plan.add("REDUCTION_AT", reduction_bytes)
        return plan

    def _stage_defines(self) -> dict[str, int | str]:
        return {
            "TOKEN_TILES": self.token_tiles,
            "ROW_TILES": self.row_tiles,
            "STAGE_GROUPS": self.stage_groups,
            "STAGES": self.stages,
            "ONE_PIECE": int(self.one_piece),
        }

    def spec(self, a_type: str) -> KernelSpec:
        """What to compile."""
        return spec_of(self, a_type)

    @property
    def cluster_tiles(self) -> int:
        """Row tiles of a piece of work, which a block or a cluster computes."""
        return self.row_tiles

    def _row_blocks(self, n: int) -> int:
        return ceil_div(ceil_div(n, TILE_ROWS), self.cluster_tiles)

    def can_share(self, k: int) -> bool:
        """Whether k is long enough for a cluster."""
        return ceil_div(ceil_div(k, TILE_COLUMNS), self.stage_groups) >= self.k_cluster

    def grid(self, m: int, n: int, k: int, multiprocessors: int) -> Extent:
        """Blocks to launch: a block of a cluster has one piece of work."""
        count = self._row_blocks(n)
        return (count * self.k_cluster if self.k_cluster > 1 else min(count, multiprocessors)), 1, 1

    def for_product(self: _Tile, m: int, n: int, k: int, multiprocessors: int) -> _Tile:
        """The tile with ``one_piece`` as the product has it: what blocks begin with is shorter then."""
        return replace(self, one_piece=self.k_cluster > 1 or self._row_blocks(n) <= multiprocessors)


@dataclass(frozen=True)
class DecodeTile(_StageTile):
    """``gemm_decode.cu``: few tokens, mma.sync.

    Attributes:
        row_warps, k_warps: consumer warps along the rows and along k (a power of two).
        warp_tiles: row tiles of a warp; row_warps * warp_tiles covers row_tiles.
        activation_warps: warps that decode NVFP4 activations; 0 where the copy engine brings fp16 or bf16.
    """

    row_warps: int
    k_warps: int
    warp_tiles: int
    activation_warps: int = 0

    source: ClassVar[str] = "kernels/gemm_decode.cu"
    entry: ClassVar[str] = "gemm_decode"

    def __post_init__(self) -> None:
        stage_blocks = self.stage_groups * TILE_COLUMNS // BLOCK
        warps = self.row_warps * self.k_warps + max(1 + self.activation_warps, _LEAST_OTHER_WARPS)
        faults = {
            "no warps": min(self.row_warps, self.k_warps, self.warp_tiles) < 1 or self.activation_warps < 0,
            "row tiles that no warp has": self.row_warps * self.warp_tiles < self.row_tiles,
            "a number of k_warps that is no power of two": self.k_warps.bit_count() != 1,
            "more threads than a block can": warps * _WARP_LANES > MOST_THREADS,
            "activation warps that do not decode whole tokens": self.activation_warps * _WARP_LANES % stage_blocks != 0,
        }
        self._refuse(0, faults)
        check_divides("decode, chunks of a stage among k_warps", self.box_chunks, self.k_warps)
        check_divides("decode, row_tiles among warps", self.row_tiles, self.warp_tiles)

    @cached_property
    def plan(self) -> SharedPlan:
        """Shared memory."""
        sums = self.row_warps * self.token_tiles * self.warp_tiles
        return self._plan((self.k_warps * self.k_cluster - 1) * sums * _SUMS_TILE_BYTES)

    @property
    def threads(self) -> int:
        """Of a block: the consumers, a producer warp, and those that decode activations."""
        return 32 * (self.row_warps * self.k_warps + 1 + self.activation_warps)

    def defines(self, a_type: str) -> Mapping[str, int | str]:
        """Macros of the compilation."""
        return {
            "A_TYPE": A_TYPES[a_type],
            **self._stage_defines(),
            "ROW_WARPS": self.row_warps,
            "K_WARPS": self.k_warps,
            "WARP_TILES": self.warp_tiles,
            "ACTIVATION_WARPS": self.activation_warps,
            "K_CLUSTER": self.k_cluster,
            **public_macros(self.plan.macros),
        }


@dataclass(frozen=True)
class SmallTile(_StageTile):
    """``gemm_small.cu``: some tens of tokens, wgmma.

    Attributes:
        row_groups, k_groups: consumer warpgroups along the rows and along k (1, 2 or 4), four together at most.
        row_blocks: blocks of 64 rows of a warpgroup.
        fragments: products of 16 columns a commit: 1, 2 or 4.
        own_groups: row groups whose rows a block of a cluster has alone, for all of k; 0, or all but the last.
    """

    row_groups: int
    k_groups: int
    row_blocks: int
    fragments: int
    own_groups: int = field(default=0, kw_only=True)

    source: ClassVar[str] = "kernels/gemm_small.cu"
    entry: ClassVar[str] = "gemm_small"

    def __post_init__(self) -> None:
        own = (self.row_groups - 1, 4 * self.row_groups * self.row_blocks, 1, 2)
        faults = {
            ONE_STAGE: self.stages == 1,
            "no share of registers for its warpgroups": self.row_groups * self.k_groups not in _CONSUMER_REGISTERS,
            "no row blocks": self.row_blocks < 1,
            "row tiles that no warpgroup has": 4 * self.row_groups * self.row_blocks < self.row_tiles,
            "a number of k_groups or fragments that is not 1, 2 or 4": not {self.k_groups, self.fragments} <= {1, 2, 4},
            "rows of its own, which takes a full row group beside them, one k group and a cluster of two blocks": (
                self.own_groups != 0 and own != (self.own_groups, self.row_tiles, self.k_groups, self.k_cluster)
            ),
        }
        self._refuse(self.own_groups, faults)
        check_divides("small, chunks of a stage among k_groups", self.box_chunks, self.k_groups)
        commits = self.box_chunks // self.k_groups * CHUNK_FRAGMENTS // self.fragments
        check_divides("small, commits of a stage in a double buffer", commits, 2)

    @cached_property
    def plan(self) -> SharedPlan:
        """Shared memory."""
        sums = (self.row_groups - self.own_groups) * self.row_blocks * self.token_tiles
        plan = self._plan((self.k_groups * self.k_cluster - 1) * sums * 4 * _SUMS_TILE_BYTES)
        plan.add("OUT_AT", 4 * self.row_groups * self.k_groups * self.out_tokens * TILE_OUT_BYTES)
        return plan

    @property
    def threads(self) -> int:
        """Of a block: the consumers and a warpgroup of producers."""
        return WARPGROUP_THREADS * (self.row_groups * self.k_groups + 1)

    @property
    def own_tiles(self) -> int:
        """Row tiles that a block of a cluster has alone."""
        return 4 * self.own_groups * self.row_blocks

    @property
    def cluster_tiles(self) -> int:
        """Row tiles of a piece of work, which a block or a cluster computes."""
        return self.row_tiles + self.own_tiles * (self.k_cluster - 1)

    @property
    def out_tokens(self) -> int:
        """Tokens whose results leave together."""
        return 8 if self.token_tiles % 2 else 16

    @property
    def registers(self) -> tuple[int, int]:
        """Of a consumer and of a producer thread: the block's registers as they were at entry, shared out anew."""
        return _CONSUMER_REGISTERS[self.row_groups * self.k_groups]

    def defines(self, a_type: str) -> Mapping[str, int | str]:
        """Macros of the compilation."""
        return {
            "A_TYPE": A_TYPES[a_type],
            **self._stage_defines(),
            "OWN_TILES": self.own_tiles,
            "ROW_GROUPS": self.row_groups,
            "K_GROUPS": self.k_groups,
            "ROW_BLOCKS": self.row_blocks,
            "K_CLUSTER": self.k_cluster,
            "FRAGMENTS": self.fragments,
            "OUT_TOKENS": self.out_tokens,
            "CONSUMER_REGISTERS": self.registers[0],
            "PRODUCER_REGISTERS": self.registers[1],
            **public_macros(self.plan.macros),
        }
