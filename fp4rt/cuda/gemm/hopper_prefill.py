"""Tiles of the prefill kernel: macros, memory plan, grid, and how workers share the last ones.

The class holds what the kernel's header calls compile-time choices, in the same words, and refuses what it cannot do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from fp4rt.cuda.gemm.hopper_plan import (
    A_TYPES,
    BARRIER_BYTES,
    CHUNK_FRAGMENTS,
    GROUP_CHUNKS,
    MAX_SHARED_BYTES,
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
from fp4rt.layout import ceil_div
from fp4rt.prepacked import TILE_BYTES, TILE_COLUMNS, TILE_ROWS

if TYPE_CHECKING:
    from fp4rt.cuda.gemm.portable import Alignment
    from fp4rt.cuda.kernel import Extent
    from fp4rt.cuda.kernel_spec import KernelSpec

__all__ = ["DECODING_SLOTS", "PrefillTile", "TileSharing"]

_REGISTERS = {2: (232, 40), 3: (160, 32)}  # of a consumer and of a producer thread, by row groups
_DECODING_REGISTERS = 216, 72  # where producers decode activations
# Where consumers need far fewer. What they may have changes which ones the compiler takes: with 112 tokens 232 made a
# product of 448 tokens 3 % slower than 168 to 216 did, with 128 tokens there was no difference.
_FEW_SUMS_REGISTERS, _FEW_SUMS_TOKENS = (200, 40), 128
_MOST_GRID_ROWS = 65535  # of blocks in y
# Measured on an H200, in cycles of a multiprocessor
_DECODING_CYCLES = 170  # of 64 rows' weights of a chunk, where nothing hides it
_SHARING_CYCLES = 8900  # clearing the counters, meeting at them
_LEAST_GAIN = 0.05  # tiles are shared where that saves as much of a round
_SHARED_BYTES_A_CYCLE = 9.5  # of sums that a multiprocessor hands to others, while all do
_ADDED_BYTES_A_CYCLE = 40.0  # of sums that one adds up

# kernels_src/block/shared_decoding.cuh
DECODING_SLOTS = 512
DECODING_WARPS, ITEM_TOKENS = 2, 4
_SLOT_WORDS = 512
_CODES_ALIGNMENT, _SCALES_ALIGNMENT = 16, 4
# Cycles on an H200, beside products: of a warp for an item, and until others see it
_ITEM_CYCLES, _ANNOUNCING_CYCLES = 1100, 2000


class TileSharing(NamedTuple):
    """How workers (a block, or a cluster) divide the tiles of a large product: ``block/prefill_tiles.cuh``."""

    whole_tiles: int  # that one worker has alone
    sharers: int  # workers that share the others; 0 where there are none
    piece_groups: int  # column groups that each of these has, or one fewer
    sums_bytes: int  # of the sums that they hand to each other
    arrivals_bytes: int  # of the counters, 0 before the launch
    rounds: float  # that all workers take, in tiles; estimated


@dataclass(frozen=True)
class PrefillTile:
    """``gemm_prefill.cu``: many tokens, wgmma, persistent.

    Attributes:
        tokens: of a tile, a multiple of 16, at most 256.
        row_blocks: blocks of 64 rows of each warpgroup.
        row_tiles: tiles of 16 rows of a tile, a multiple of 4, at most 4 * row_groups * row_blocks.
        activation_stages: stages of activations on their way.
        weight_stages: column groups of 256 of weights on their way.
        raster_tokens: token tiles swept together.
        cluster: blocks of a cluster that share their activations: 1 or 2.
        k_cluster: blocks of a cluster that share k: 1, or 2 where cluster is 1.
        stage_chunks: chunks of 64 columns in a stage of activations, multiplied in one go: 1 or 2.
        row_groups: consumer warpgroups along the rows: 2, or 3 where k_cluster is 1.
        one_piece: each block, or cluster, has one tile, that of its place in the grid; see :meth:`for_product`.
        k_tail: k ends in the first half of a column group, and so do the products; where stage_chunks is 1.
        decodes: activations are NVFP4, and the blocks decode them among themselves (``block/shared_decoding.cuh``);
            see :meth:`can_decode`.
    """

    tokens: int
    row_blocks: int
    row_tiles: int
    activation_stages: int
    weight_stages: int
    raster_tokens: int
    cluster: int = 1
    k_cluster: int = 1
    stage_chunks: int = 1
    row_groups: int = 2
    one_piece: bool = False
    k_tail: bool = False
    decodes: bool = False

    source: ClassVar[str] = "kernels/gemm_prefill.cu"
    entry: ClassVar[str] = "gemm_prefill"

    def __post_init__(self) -> None:
        chunks = self.activation_stages * self.stage_chunks
        faults = {
            ONE_STAGE: self.activation_stages == 1,
            "no stages": min(self.activation_stages, self.weight_stages) < 1,
            "no tokens, or more than 256": not 1 <= self.tokens <= 256,
            "no row blocks": self.row_blocks < 1,
            "neither two nor three row groups": self.row_groups not in _REGISTERS,
            "three row groups, of which blocks that share k have two": self.k_cluster > 1 and self.row_groups != 2,
            "no row tiles, or some that no warpgroup has, or not whole fours": (
                not 1 <= self.row_tiles <= 4 * self.row_groups * self.row_blocks or self.row_tiles % 4 != 0
            ),
            "sweeps of no token tiles, or of more than 64": not 1 <= self.raster_tokens <= 64,
            "two kinds of clusters, or one of neither one nor two blocks": (
                (self.cluster, self.k_cluster) not in ((1, 1), (1, 2), (2, 1))
            ),
            "a number of stage_chunks that is neither 1 nor 2": self.stage_chunks not in (1, 2),
            "a k_tail of half a column group, but stages of that size": self.k_tail and self.stage_chunks > 1,
            "NVFP4 activations to decode, which its blocks cannot": self.decodes and not self._has_decoders,
            "too few stages for the sums of a cluster, which lie over them": (
                self.k_cluster > 1 and chunks < 2 * self.row_blocks
            ),
        }
        refuse("prefill", self, faults)
        check_divides("prefill, tokens in pairs of 8", self.tokens, 16)

    @property
    def threads(self) -> int:
        """Of a block: the consumers and a warpgroup of producers."""
        return WARPGROUP_THREADS * (self.row_groups + 1)

    @property
    def box_rows(self) -> int:
        """Tokens that one copy of activations brings."""
        return self.tokens // self.cluster

    @property
    def box_chunks(self) -> int:
        """Chunks of 64 columns that it brings where k has whole ones; 0 where only one fits without a gap."""
        return self.stage_chunks if self.stage_chunks > 1 and self.cluster == 1 else 0

    @property
    def out_tokens(self) -> int:
        """Tokens whose results leave together."""
        return next(tokens for tokens in (64, 48, 32, 16) if self.tokens % tokens == 0)

    @property
    def out_stages(self) -> int:
        """Passes of results on their way at once: as many as the kernel can use where there is room."""
        return next((stages for stages in (3, 2) if self._plan(stages).nbytes <= MAX_SHARED_BYTES), 2)

    @cached_property
    def plan(self) -> SharedPlan:
        """Shared memory."""
        return self._plan(self.out_stages)

    def _plan(self, out_stages: int) -> SharedPlan:
        plan = SharedPlan()
        plan.add("_ACTIVATIONS_AT", self.activation_stages * self.stage_chunks * self.tokens * TOKEN_BYTES)
        plan.add("WEIGHTS_AT", self.weight_stages * self.row_tiles * TILE_BYTES, 128)
        plan.add("OUT_AT", self.row_groups * out_stages * self.out_tokens * 4 * TILE_OUT_BYTES, SWIZZLE_BYTES)
        stages = self.activation_stages + self.weight_stages
        plan.add("BARRIERS_AT", (2 * stages + SUMS_BARRIERS) * BARRIER_BYTES)
        plan.add("ARRIVALS_AT", self.row_groups * 4, 4)
        return plan

    @property
    def registers(self) -> tuple[int, int]:
        """Of a consumer and of a producer thread: the block's registers as they were at entry, shared out anew."""
        if self.decodes:
            return _DECODING_REGISTERS
        few_sums = self.row_groups == 2 and self.row_blocks * self.tokens <= _FEW_SUMS_TOKENS
        return _FEW_SUMS_REGISTERS if few_sums else _REGISTERS[self.row_groups]

    def defines(self, a_type: str) -> Mapping[str, int | str]:
        """Macros of the compilation."""
        return {
            "A_TYPE": A_TYPES[a_type],
            "TOKENS": self.tokens,
            "ROW_GROUPS": self.row_groups,
            "ROW_BLOCKS": self.row_blocks,
            "ROW_TILES": self.row_tiles,
            "ACTIVATION_STAGES": self.activation_stages,
            "STAGE_CHUNKS": self.stage_chunks,
            "WEIGHT_STAGES": self.weight_stages,
            "ONE_PIECE": int(self.one_piece),
            "K_TAIL": int(self.k_tail),
            "DECODES": int(self.decodes),
            "RASTER_TOKENS": self.raster_tokens,
            "CLUSTER": self.cluster,
            "K_CLUSTER": self.k_cluster,
            "OUT_TOKENS": self.out_tokens,
            "OUT_STAGES": self.out_stages,
            "CONSUMER_REGISTERS": self.registers[0],
            "PRODUCER_REGISTERS": self.registers[1],
            **public_macros(self.plan.macros),
            **({"SLOTS": DECODING_SLOTS, "SLOT_WORDS": _SLOT_WORDS} if self.decodes else {}),
        }

    def spec(self, a_type: str) -> KernelSpec:
        """What to compile."""
        return spec_of(self, a_type)

    def can_share(self, k: int) -> bool:
        """Whether k is long enough for a cluster."""
        return ceil_div(k, TILE_COLUMNS) >= self.k_cluster

    def _row_clusters(self, n: int) -> int:
        return ceil_div(ceil_div(n, TILE_ROWS), self.row_tiles * self.cluster)

    def tiles(self, m: int, n: int) -> int:
        """Tiles of a product, or tiles of clusters that share activations."""
        return ceil_div(m, self.tokens) * self._row_clusters(n)

    def for_product(self, m: int, n: int, k: int, multiprocessors: int) -> PrefillTile:
        """The tile with ``one_piece`` and ``k_tail`` as the product has them: what blocks do is shorter then."""
        several = replace(self, one_piece=False, decodes=False)
        alone = several.sharing(m, n, k, multiprocessors).sharers == 0
        one = self.k_cluster > 1 or (alone and self.tiles(m, n) <= multiprocessors // self.cluster)
        one = one and ceil_div(m, self.tokens) <= _MOST_GRID_ROWS
        return replace(several, one_piece=one, k_tail=self.has_k_tail(k))

    @property
    def _has_decoders(self) -> bool:
        """Whether its stages hold a column group, and 256 consumers half a token's chunk each of it."""
        whole_group = self.activation_stages * self.stage_chunks >= GROUP_CHUNKS
        few = self.box_rows <= WARPGROUP_THREADS and (self.row_groups, self.row_blocks, self.k_cluster) == (2, 1, 1)
        return self.one_piece and whole_group and few

    def can_decode(self, m: int, n: int, k: int, alignment: Alignment) -> bool:
        """Whether the blocks of a product can decode its NVFP4 activations, and do so faster than it multiplies them.

        One of :meth:`for_product`; ``alignment`` of the activations.
        """
        groups, blocks = ceil_div(k, TILE_COLUMNS), self._row_clusters(n) * self.cluster
        words = ceil_div(m, self.tokens) * (groups + 1)
        items = ceil_div(ceil_div(self.tokens, ITEM_TOKENS), blocks * DECODING_WARPS)
        in_time = items * _ITEM_CYCLES + _ANNOUNCING_CYCLES <= self.group_cycles
        aligned = alignment.a >= _CODES_ALIGNMENT and alignment.a_scales >= _SCALES_ALIGNMENT
        return self._has_decoders and aligned and groups > 1 and words <= _SLOT_WORDS and in_time

    def has_k_tail(self, k: int) -> bool:
        """Whether k ends in the first half of a column group, and products can."""
        return self.stage_chunks == 1 and 0 < k % TILE_COLUMNS <= TILE_COLUMNS // 2

    @property
    def group_cycles(self) -> float:
        """Of a multiprocessor, for one column group: products hide the decoding, the better the longer they take."""
        products = CHUNK_FRAGMENTS * self.tokens / 2
        block = float((products**4 + _DECODING_CYCLES**4) ** 0.25)
        return self.row_groups * self.row_blocks * GROUP_CHUNKS * block

    def sharing(self, m: int, n: int, k: int, multiprocessors: int) -> TileSharing:
        """How the last tiles, too few for all workers, are shared among them; alone, where that gains too little."""
        count, workers = self.tiles(m, n), max(1, multiprocessors // self.cluster)
        rest, groups = count % workers, ceil_div(k, TILE_COLUMNS)
        alone = TileSharing(count, 0, 0, 0, 0, ceil_div(count * self.k_cluster, workers))
        if self.k_cluster > 1 or self.one_piece or rest == 0:
            return alone
        sums_bytes = self.row_groups * self.row_blocks * 64 * self.tokens * 4
        tile_cycles = groups * self.group_cycles

        def rounds(sharers: int) -> float:
            pieces = sharers if sharers % rest == 0 else sharers + rest
            handing = pieces * self.cluster * sums_bytes / (_SHARED_BYTES_A_CYCLE * multiprocessors)
            adding = pieces / rest * sums_bytes / _ADDED_BYTES_A_CYCLE  # by the last one, alone
            return rest / sharers + (max(handing, adding) + _SHARING_CYCLES) / tile_cycles

        most = min(workers, rest * groups)
        sharers = min((*range(rest, most + 1, rest), most), key=rounds)
        if rounds(sharers) > 1 - _LEAST_GAIN:
            return alone
        blocks = sharers * self.cluster
        arrivals = rest * self.cluster * self.row_groups * 2 * 4
        all_rounds = (count - rest) // workers + rounds(sharers)
        return TileSharing(
            count - rest, sharers, rest * groups // sharers, 2 * blocks * sums_bytes, arrivals, all_rounds
        )

    def grid(self, m: int, n: int, k: int, multiprocessors: int) -> Extent:
        """Blocks to launch."""
        if self.one_piece:
            return self._row_clusters(n) * self.cluster * self.k_cluster, ceil_div(m, self.tokens), 1
        count, workers = self.tiles(m, n), max(1, multiprocessors // self.cluster)
        if self.k_cluster > 1:  # a block of such a cluster has one tile
            return count * self.k_cluster, 1, 1
        shared = self.sharing(m, n, k, multiprocessors).sharers > 0
        return (workers if shared else min(count, workers)) * self.cluster, 1, 1
