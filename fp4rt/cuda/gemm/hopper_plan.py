"""What the tiles of all Hopper kernels have in common: memory plans, macros, what to compile."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fp4rt.cuda.kernel_spec import KernelSpec
from fp4rt.errors import ShapeError
from fp4rt.layout import round_up
from fp4rt.prepacked import CHUNK_COLUMNS, TILE_COLUMNS, TILE_ROWS

__all__ = [
    "A_TYPES",
    "BARRIER_BYTES",
    "CHUNK_FRAGMENTS",
    "GROUP_CHUNKS",
    "MAX_SHARED_BYTES",
    "ONE_STAGE",
    "SUMS_BARRIERS",
    "SWIZZLE_BYTES",
    "TILE_OUT_BYTES",
    "TOKEN_BYTES",
    "WARPGROUP_THREADS",
    "SharedPlan",
    "check_divides",
    "public_macros",
    "refuse",
    "spec_of",
]

ARCHS = frozenset({90})
MAX_SHARED_BYTES = 227 * 1024  # of a block on sm_90
ALONE_BYTES = 114 * 1024  # so much, and no second block fits on a multiprocessor (228 KiB, one of each block reserved)
A_TYPES = {"float16": 0, "bfloat16": 1}  # kernels_src/num/constants.cuh

BARRIER_BYTES = 8
SUMS_BARRIERS = 1  # for the sums that blocks of a cluster send, after two of every stage
SWIZZLE_BYTES = 1024  # a tile that the copy engine swizzles by 128 bytes begins at a multiple of it
TOKEN_BYTES = CHUNK_COLUMNS * 2  # of one token in a chunk
GROUP_CHUNKS = TILE_COLUMNS // CHUNK_COLUMNS
CHUNK_FRAGMENTS = 4  # of 16 columns
WARPGROUP_THREADS = 128
ONE_STAGE = "one stage only, which is given back when products of the next are under way"  # a fault of wgmma's tiles
TILE_OUT_BYTES = TILE_ROWS * 2  # of one token's results of a row tile


def check_divides(what: str, whole: int, part: int) -> None:
    """Raises ShapeError where ``part`` does not divide ``whole``."""
    if whole % part:
        raise ShapeError(f"{what}: {part} does not divide {whole}; choose another tile")


def refuse(kernel: str, tile: object, faults: Mapping[str, bool]) -> None:
    """Raises ShapeError that names the first of the tile's faults, if it has one."""
    for fault, found in faults.items():
        if found:
            raise ShapeError(f"{kernel}: {tile} has {fault}; choose another tile")


class SharedPlan:
    """Places in shared memory, one after the other; ``macros`` names them for the kernel."""

    def __init__(self) -> None:
        self.nbytes = 0
        self.macros: dict[str, int] = {}

    def add(self, macro: str, nbytes: int, alignment: int = 16) -> None:
        """The next ``nbytes``, at ``macro``."""
        self.macros[macro] = round_up(self.nbytes, alignment)
        self.nbytes = self.macros[macro] + nbytes


def public_macros(macros: Mapping[str, int]) -> dict[str, int]:
    """Those that the kernel reads; the others, with an underscore, only hold a place."""
    return {name: value for name, value in macros.items() if not name.startswith("_")}


def spec_of(tile: Any, a_type: str) -> KernelSpec:
    """What to compile for one of the tiles and activations of ``a_type``.

    Raises:
        ShapeError: the tile needs more shared memory than there is.
    """
    if tile.plan.nbytes > MAX_SHARED_BYTES:
        raise ShapeError(f"{tile} needs {tile.plan.nbytes} bytes of shared memory, sm_90 has {MAX_SHARED_BYTES}")
    # There is no more than one block a multiprocessor. While the kernel ahead still occupies some of them, two that fit
    # together would share another one to the end, and the product would take nearly twice as long.
    alone = ALONE_BYTES if tile.k_cluster == 1 else 0
    defines = tuple(sorted(tile.defines(a_type).items()))
    return KernelSpec(tile.source, tile.entry, defines, shared_bytes=max(tile.plan.nbytes, alone), archs=ARCHS)
