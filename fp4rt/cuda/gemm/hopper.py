"""The Hopper kernels' compile-time choices: one frozen class a kernel, from which macros, memory plan and grid follow.

Where things lie in shared memory is computed here, once, and handed to the kernel as macros. Each class holds what its
kernel's header calls compile-time choices, in the same words, and refuses what the kernel cannot do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, NamedTuple, TypeVar

from fp4rt.cuda.kernel_spec import KernelSpec
from fp4rt.errors import ShapeError
from fp4rt.layout import ceil_div, round_up
from fp4rt.prepacked import CHUNK_COLUMNS, TILE_BYTES, TILE_COLUMNS, TILE_ROWS

if TYPE_CHECKING:
    from fp4rt.cuda.kernel import Extent

__all__ = ["A_TYPES", "MAX_SHARED_BYTES", "DecodeTile", "HopperTile", "PrefillTile", "SmallTile", "TileSharing"]

_Tile = TypeVar("_Tile", bound="_StageTile")

ARCHS = frozenset({90})
MAX_SHARED_BYTES = 227 * 1024  # of a block on sm_90
ALONE_BYTES = 114 * 1024  # so much, and no second block fits on a multiprocessor (228 KiB, one of each block reserved)
A_TYPES = {"float16": 0, "bfloat16": 1}  # kernels_src/num/constants.cuh

_BARRIER_BYTES = 8
_SUMS_BARRIERS = 1  # for the sums that blocks of a cluster send, after two of every stage
_SWIZZLE_BYTES = 1024  # a tile that the copy engine swizzles by 128 bytes begins at a multiple of it
_TOKEN_BYTES = CHUNK_COLUMNS * 2  # of one token in a chunk
_GROUP_CHUNKS = TILE_COLUMNS // CHUNK_COLUMNS
_WARPGROUP_THREADS = 128
_CONSUMER_GROUPS = 2  # warpgroups of prefill, each with half of the rows
# Of a consumer and of a producer thread, by consumer warpgroups
_CONSUMER_REGISTERS = {1: (240, 40), 2: (232, 40), 3: (160, 32), 4: (112, 32)}
_CHUNK_FRAGMENTS = 4  # of 16 columns
_SUMS_TILE_BYTES = 512  # 16 rows x 8 tokens, fp32
_TILE_OUT_BYTES = TILE_ROWS * 2  # of one token's results of a row tile
_MOST_GRID_ROWS = 65535  # of blocks in y
# Measured on an H200, in cycles of a multiprocessor
_DECODING_CYCLES = 185  # of 64 rows' weights of a chunk, where nothing hides it
_SHARING_CYCLES = 7000  # clearing the counters, meeting at them
_LEAST_GAIN = 0.05  # tiles are shared where that saves as much of a round
_SHARED_BYTES_A_CYCLE = 11.4  # of sums that a multiprocessor hands to others, while all do
_ADDED_BYTES_A_CYCLE = 40.0  # of sums that one adds up


def _divides(what: str, whole: int, part: int) -> None:
    if whole % part:
        raise ShapeError(f"{what}: {part} does not divide {whole}; choose another tile")


def _check_stages(kernel: str, stages: int) -> None:
    if stages < 2:  # a stage is given back when products of the next one are under way
        raise ShapeError(f"{kernel}: wanted at least 2 stages, got {stages}; choose another tile")


class _SharedPlan:
    """Places in shared memory, one after the other; ``macros`` names them for the kernel."""

    def __init__(self) -> None:
        self.nbytes = 0
        self.macros: dict[str, int] = {}

    def add(self, macro: str, nbytes: int, alignment: int = 16) -> None:
        """The next ``nbytes``, at ``macro``."""
        self.macros[macro] = round_up(self.nbytes, alignment)
        self.nbytes = self.macros[macro] + nbytes


@dataclass(frozen=True)
class _StageTile:
    """What decode and small have in common: all tokens in one tile, k taken and split in whole stages.

    Attributes:
        token_tiles: tiles of 8 tokens; all tokens of the product.
        row_tiles: tiles of 16 rows of the weight, of one block.
        stage_groups: column groups of 256 in a stage.
        stages: stages on their way.
        k_cluster: blocks of a cluster, which share k: 1 or 2.
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
        return self.stage_groups * _GROUP_CHUNKS

    def _plan(self, reduction_bytes: int) -> _SharedPlan:
        plan = _SharedPlan()
        plan.add("_WEIGHTS_AT", self.stage_groups * self.row_tiles * TILE_BYTES)
        plan.add("ACTIVATIONS_AT", self.box_chunks * self.max_tokens * _TOKEN_BYTES, _SWIZZLE_BYTES)
        stage_bytes = plan.macros["STAGE_BYTES"] = plan.nbytes
        plan.nbytes = self.stages * stage_bytes
        plan.add("BARRIERS_AT", (2 * self.stages + _SUMS_BARRIERS) * _BARRIER_BYTES)
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
        _divides("decode, chunks of a stage among k_warps", self.box_chunks, self.k_warps)
        _divides("decode, row_tiles among warps", self.row_tiles, self.warp_tiles)

    @cached_property
    def plan(self) -> _SharedPlan:
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
            **_public(self.plan.macros),
        }

    def spec(self, a_type: str) -> KernelSpec:
        """What to compile."""
        return _spec(self, a_type)


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
        _check_stages("small", self.stages)
        if self.row_groups * self.k_groups not in _CONSUMER_REGISTERS:
            raise ShapeError(f"small: {self} has no share of registers for its warpgroups; choose another tile")
        _divides("small, chunks of a stage among k_groups", self.box_chunks, self.k_groups)
        commits = self.box_chunks // self.k_groups * _CHUNK_FRAGMENTS // self.fragments
        _divides("small, commits of a stage in a double buffer", commits, 2)
        if self.own_groups and (
            self.own_groups != self.row_groups - 1
            or self.row_tiles != 4 * self.row_groups * self.row_blocks
            or (self.k_groups, self.k_cluster) != (1, 2)
        ):
            raise ShapeError(
                f"small: {self} has rows of its own; that takes a full row group beside them, one k group and a "
                "cluster of two blocks; choose another tile"
            )

    @cached_property
    def plan(self) -> _SharedPlan:
        """Shared memory."""
        sums = (self.row_groups - self.own_groups) * self.row_blocks * self.token_tiles
        plan = self._plan((self.k_groups * self.k_cluster - 1) * sums * 4 * _SUMS_TILE_BYTES)
        plan.add("OUT_AT", 4 * self.row_groups * self.k_groups * self.out_tokens * _TILE_OUT_BYTES)
        return plan

    @property
    def threads(self) -> int:
        """Of a block: the consumers and a warpgroup of producers."""
        return _WARPGROUP_THREADS * (self.row_groups * self.k_groups + 1)

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
            **_public(self.plan.macros),
        }

    def spec(self, a_type: str) -> KernelSpec:
        """What to compile."""
        return _spec(self, a_type)


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
        row_blocks: blocks of 64 rows of each of the two warpgroups.
        row_tiles: tiles of 16 rows of a tile, at most 8 * row_blocks.
        activation_stages: stages of activations on their way.
        weight_stages: column groups of 256 of weights on their way.
        raster_tokens: token tiles swept together.
        cluster: blocks of a cluster that share their activations: 1 or 2.
        k_cluster: blocks of a cluster that share k: 1, or 2 where cluster is 1.
        stage_chunks: chunks of 64 columns in a stage of activations, multiplied in one go: 1 or 2.
        one_piece: each block, or cluster, has one tile, that of its place in the grid; see :meth:`for_product`.
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
    one_piece: bool = False

    source: ClassVar[str] = "kernels/gemm_prefill.cu"
    entry: ClassVar[str] = "gemm_prefill"
    threads: ClassVar[int] = 3 * _WARPGROUP_THREADS

    def __post_init__(self) -> None:
        _check_stages("prefill", self.activation_stages)
        _divides("prefill, tokens in pairs of 8", self.tokens, 16)
        _divides("prefill, chunks of a column group in an even number of stages", _GROUP_CHUNKS // 2, self.stage_chunks)
        if self.tokens > 256 or self.row_tiles > 8 * self.row_blocks or self.cluster * self.k_cluster > 2:
            raise ShapeError(
                f"prefill: {self} has over 256 tokens, over 8 row tiles a row block or two kinds of clusters; "
                "choose another tile"
            )
        if self.k_cluster > 1 and self.activation_stages * self.stage_chunks < 2 * self.row_blocks:
            raise ShapeError(
                f"prefill, sums of a cluster over its activations: wanted at least {2 * self.row_blocks} chunks, got "
                f"{self.activation_stages} stages of {self.stage_chunks}; choose another tile"
            )

    @property
    def box_rows(self) -> int:
        """Tokens that one copy of activations brings."""
        return self.tokens // self.cluster

    @property
    def box_chunks(self) -> int:
        """Chunks of 64 columns that it brings where k has whole ones; 0 where a stage has one anyway."""
        return self.stage_chunks if self.stage_chunks > 1 else 0

    @property
    def out_tokens(self) -> int:
        """Tokens whose results leave together."""
        return next(tokens for tokens in (64, 48, 32, 16) if self.tokens % tokens == 0)

    @cached_property
    def plan(self) -> _SharedPlan:
        """Shared memory."""
        plan = _SharedPlan()
        plan.add("_ACTIVATIONS_AT", self.activation_stages * self.stage_chunks * self.tokens * _TOKEN_BYTES)
        plan.add("WEIGHTS_AT", self.weight_stages * self.row_tiles * TILE_BYTES, 128)
        plan.add("OUT_AT", _CONSUMER_GROUPS * 2 * self.out_tokens * 4 * _TILE_OUT_BYTES, 128)
        stages = self.activation_stages + self.weight_stages
        plan.add("BARRIERS_AT", (2 * stages + _SUMS_BARRIERS) * _BARRIER_BYTES)
        plan.add("ARRIVALS_AT", _CONSUMER_GROUPS * 4, 4)
        return plan

    def defines(self, a_type: str) -> Mapping[str, int | str]:
        """Macros of the compilation."""
        return {
            "A_TYPE": A_TYPES[a_type],
            "TOKENS": self.tokens,
            "ROW_BLOCKS": self.row_blocks,
            "ROW_TILES": self.row_tiles,
            "ACTIVATION_STAGES": self.activation_stages,
            "STAGE_CHUNKS": self.stage_chunks,
            "WEIGHT_STAGES": self.weight_stages,
            "ONE_PIECE": int(self.one_piece),
            "RASTER_TOKENS": self.raster_tokens,
            "CLUSTER": self.cluster,
            "K_CLUSTER": self.k_cluster,
            "OUT_TOKENS": self.out_tokens,
            **_public(self.plan.macros),
        }

    def spec(self, a_type: str) -> KernelSpec:
        """What to compile."""
        return _spec(self, a_type)

    def can_share(self, k: int) -> bool:
        """Whether k is long enough for a cluster."""
        return ceil_div(k, TILE_COLUMNS) >= self.k_cluster

    def _row_clusters(self, n: int) -> int:
        return ceil_div(ceil_div(n, TILE_ROWS), self.row_tiles * self.cluster)

    def tiles(self, m: int, n: int) -> int:
        """Tiles of a product, or tiles of clusters that share activations."""
        return ceil_div(m, self.tokens) * self._row_clusters(n)

    def for_product(self, m: int, n: int, k: int, multiprocessors: int) -> PrefillTile:
        """The tile with ``one_piece`` as the product has it: what blocks begin and end with is shorter then."""
        several = replace(self, one_piece=False)
        alone = several.sharing(m, n, k, multiprocessors).sharers == 0
        one = self.k_cluster > 1 or (alone and self.tiles(m, n) <= multiprocessors // self.cluster)
        return replace(self, one_piece=one and ceil_div(m, self.tokens) <= _MOST_GRID_ROWS)

    @property
    def group_cycles(self) -> float:
        """Of a multiprocessor, for one column group: products hide the decoding, the better the longer they take."""
        products = _CHUNK_FRAGMENTS * self.tokens / 2
        block = float((products**4 + _DECODING_CYCLES**4) ** 0.25)
        return _CONSUMER_GROUPS * self.row_blocks * _GROUP_CHUNKS * block

    def sharing(self, m: int, n: int, k: int, multiprocessors: int) -> TileSharing:
        """How the last tiles, too few for all workers, are shared among them; alone, where that gains too little."""
        count, workers = self.tiles(m, n), max(1, multiprocessors // self.cluster)
        rest, groups = count % workers, ceil_div(k, TILE_COLUMNS)
        alone = TileSharing(count, 0, 0, 0, 0, ceil_div(count * self.k_cluster, workers))
        if self.k_cluster > 1 or self.one_piece or rest == 0:
            return alone
        sums_bytes = _CONSUMER_GROUPS * self.row_blocks * 64 * self.tokens * 4
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
        arrivals = rest * self.cluster * _CONSUMER_GROUPS * 2 * 4
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


HopperTile = DecodeTile | SmallTile | PrefillTile


def _public(macros: Mapping[str, int]) -> dict[str, int]:
    return {name: value for name, value in macros.items() if not name.startswith("_")}


def _spec(tile: HopperTile, a_type: str) -> KernelSpec:
    if tile.plan.nbytes > MAX_SHARED_BYTES:
        raise ShapeError(f"{tile} needs {tile.plan.nbytes} bytes of shared memory, sm_90 has {MAX_SHARED_BYTES}")
    # There is no more than one block a multiprocessor. While the kernel ahead still occupies some of them, two that fit
    # together would share another one to the end, and the product would take nearly twice as long.
    alone = ALONE_BYTES if tile.k_cluster == 1 else 0
    defines = tuple(sorted(tile.defines(a_type).items()))
    return KernelSpec(tile.source, tile.entry, defines, shared_bytes=max(tile.plan.nbytes, alone), archs=ARCHS)
