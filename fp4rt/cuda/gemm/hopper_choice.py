"""The Hopper kernels' tile for a product."""

from __future__ import annotations

from collections.abc import Iterator

from fp4rt.cuda.gemm.hopper import MAX_SHARED_BYTES, DecodeTile, HopperTile, PrefillTile, SmallTile
from fp4rt.cuda.kernel_spec import KernelSpec
from fp4rt.errors import BackendUnavailable
from fp4rt.layout import ceil_div
from fp4rt.prepacked import TILE_ROWS

__all__ = ["DECODE_TOKENS", "SMALL_TOKENS", "choose_hopper", "hopper_specs"]

DECODE_TOKENS = 16
SMALL_TOKENS = 128
_MAX_ROW_TILES = 16


def choose_hopper(
    m: int, n: int, k: int, multiprocessors: int, kernel: str | None = None
) -> tuple[HopperTile, int, str]:
    """(tile, splits of k, why) for m tokens; ``kernel`` asks for "decode", "small" or "prefill".

    Raises:
        BackendUnavailable: the kernel asked for takes fewer tokens.
    """
    name = kernel or ("decode" if m <= DECODE_TOKENS else "small" if m <= SMALL_TOKENS else "prefill")
    most = {"decode": DECODE_TOKENS, "small": SMALL_TOKENS}.get(name)
    if most is not None and m > most:
        raise BackendUnavailable(f"the {name} kernel takes at most {most} tokens, got m = {m}; use the prefill kernel")
    row_tiles = min(_MAX_ROW_TILES, ceil_div(ceil_div(n, TILE_ROWS), multiprocessors))
    why = f"{row_tiles * TILE_ROWS} rows a block spread n = {n} over {multiprocessors} multiprocessors"
    if name == "decode":
        return _decode(m, row_tiles), 1, why
    if name == "small":
        return _small(m, row_tiles), 1, why
    tokens = 128 if m <= 256 else 256
    tile = PrefillTile(tokens, 1, 8, 6 if tokens == 128 else 4, 3 if tokens == 128 else 2, 8)
    return tile, 1, f"m = {m} tokens keep the tensor cores busy"


def _decode(m: int, row_tiles: int) -> DecodeTile:
    tokens = ceil_div(m, 8)
    row_warps = min(8, 1 << (row_tiles - 1).bit_length())
    for stages in (4, 3, 2):
        tile = DecodeTile(
            token_tiles=tokens,
            row_tiles=row_tiles,
            stage_groups=4 if row_tiles <= 4 else 2,
            stages=stages,
            row_warps=row_warps,
            k_warps=16 // row_warps,
            warp_tiles=ceil_div(row_tiles, row_warps),
        )
        if tile.plan.nbytes <= MAX_SHARED_BYTES:
            break
    return tile


def _small(m: int, row_tiles: int) -> SmallTile:
    row_groups = 1 if row_tiles <= 4 else 2 if row_tiles <= 8 else 4
    k_groups = 4 // row_groups
    for stages in (4, 3, 2):
        tile = SmallTile(
            token_tiles=ceil_div(m, 8),
            row_tiles=row_tiles,
            stage_groups=1,
            activation_stages=stages,
            stages=stages,
            row_groups=row_groups,
            k_groups=k_groups if m <= 64 else 1,
            row_blocks=1,
            fragments=2,
        )
        if tile.plan.nbytes <= MAX_SHARED_BYTES:
            break
    return tile


def hopper_specs() -> Iterator[KernelSpec]:
    """Compilations of the tiles of usual sizes, for both activation types."""
    sizes = ((28672, 8192), (8192, 8192), (8192, 28672), (4096, 4096))
    for n, k in sizes:
        for m in (1, 16, 32, 64, 128, 256, 1024):
            for a_type in ("float16", "bfloat16"):
                yield choose_hopper(m, n, k, 132)[0].spec(a_type)
