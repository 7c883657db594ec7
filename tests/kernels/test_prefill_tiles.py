"""Which pieces of which tiles the workers of the prefill kernel take: its own index arithmetic, built by g++."""

from __future__ import annotations

import ctypes
from collections import defaultdict

import numpy as np
import pytest

from fp4rt.cuda.gemm.hopper import PrefillTile
from fp4rt.layout import ceil_div

H200 = 132
MOST = 1 << 20
PRODUCTS = [(m, n, k) for m in (1, 257, 384, 600, 1500, 4096) for n, k in ((16, 16), (4096, 4096), (28672, 8192))]
PRODUCTS += [(700, 8192, 28672), (257, 1000, 300), (256, 128 * 139, 2048), (8192, 151936, 512)]


@pytest.fixture(scope="module")
def pieces(build):
    library = build("prefill_tiles.cpp", "-O1")
    library.prefill_pieces.restype = ctypes.c_uint64
    rows = np.empty((MOST, 8), np.uint32)

    def pieces(m, n, k, cluster, blocks, whole, sharers, piece_groups):
        count = library.prefill_pieces(
            *(ctypes.c_int64(m), ctypes.c_int64(n), k, cluster, blocks, whole, sharers, piece_groups),
            *(ctypes.c_void_p(rows.ctypes.data), ctypes.c_uint64(MOST)),
        )
        assert count
        return rows[:count]

    return pieces


def assert_covered(rows, m, n, k, cluster):
    """Every group of every tile once; the sharers of a tile are neighbours, and each knows who they are."""
    found = defaultdict(list)
    for worker, token, row_tile, row_tiles, first, last, first_sharer, last_sharer in rows.tolist():
        found[token, row_tile].append((first, last, worker, row_tiles, first_sharer, last_sharer))
    token_tiles, row_blocks = ceil_div(m, 256), ceil_div(ceil_div(n, 16), 8 * cluster) * cluster
    assert set(found) == {(256 * t, 8 * r) for t in range(token_tiles) for r in range(row_blocks)}
    for (_, row_tile), parts in found.items():
        parts.sort()
        assert [p[0] for p in parts] == [0, *(p[1] for p in parts[:-1])]
        assert parts[-1][1] == ceil_div(k, 256)
        assert {p[3] for p in parts} == {max(0, min(8, ceil_div(n, 16) - row_tile))}
        workers = [p[2] for p in parts]
        assert workers == list(range(workers[0], workers[-1] + 1))
        assert {p[4:] for p in parts} == {(workers[0], workers[-1])}


@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize(("m", "n", "k"), PRODUCTS)
def test_every_column_group_of_every_tile_is_computed_once(pieces, m, n, k, cluster):
    tile = PrefillTile(256, 1, 8, 4, 2, 4, cluster=cluster)
    sharing, (blocks, _, _) = tile.sharing(m, n, k, H200), tile.grid(m, n, k, H200)
    assert_covered(pieces(m, n, k, cluster, blocks, *sharing[:3]), m, n, k, cluster)


@pytest.mark.parametrize("sharers", [1, 2, 3, 31, 60, 64, 120, 131, 132])
def test_any_number_of_sharers_is_right(pieces, sharers):
    m, n, k = 600, 8192, 8192  # 192 tiles of 32 groups, 60 of them shared
    assert_covered(pieces(m, n, k, 1, H200, 132, sharers, 60 * 32 // sharers), m, n, k, 1)


def test_workers_that_share_end_together(pieces):
    rows = pieces(600, 8192, 8192, 1, H200, 132, 132, 60 * 32 // 132)
    groups = np.bincount(rows[:, 0], rows[:, 5] - rows[:, 4])
    assert groups.max() - groups.min() <= 1
