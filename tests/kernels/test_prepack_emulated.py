"""The packing kernels' own source, run on the CPU (tests/kernels/emulation): the bytes of ``fp4rt.prepacked``."""

from __future__ import annotations

import numpy as np
import pytest

from fp4rt import prepacked
from fp4rt.cuda.arguments import argument_struct
from fp4rt.cuda.gemm.prepack import ROWS_A_BLOCK, THREADS
from fp4rt.format import BLOCK
from fp4rt.layout import LAYOUTS, ceil_div, round_up

ARGUMENTS = argument_struct("kernels/gemm_prepack.cuh", "PrepackArguments")
CASES = [(1, 16, "linear"), (33, 272, "128x4"), (17, 50, "8x4"), (20, 33, "linear")]


@pytest.fixture
def library(emulate):
    return emulate("gemm_prepack.cpp")


def weight(n, k):
    """(data, row-major scales) of any bytes, padding included."""
    rng = np.random.default_rng(n * k)
    padded = round_up(k, 32)
    data = rng.integers(0, 256, (n, padded // 2), np.uint8)
    return data, rng.integers(0, 256, (n, padded // BLOCK), np.uint8)


def aligned(shape, fill):
    """uint8 at a multiple of 16."""
    raw = np.full(int(np.prod(shape)) + 16, fill, np.uint8)
    begin = -raw.ctypes.data % 16
    return raw[begin : begin + int(np.prod(shape))].reshape(shape)


def arguments(data, scales, tiles, counts, records, n, k, layout, count=0):
    pointers = (a.ctypes.data if a is not None else 0 for a in (data, scales, tiles, counts, records))
    return ARGUMENTS.pack(*pointers, data.shape[1], n, k, data.shape[1] * 2 // BLOCK, LAYOUTS[layout].index, count)


@pytest.mark.parametrize(("n", "k", "layout"), CASES)
def test_tiles_counts_and_records_are_those_of_the_host(library, n, k, layout):
    data, scales = weight(n, k)
    packed_scales = LAYOUTS[layout].pack(scales)
    tiles = aligned(prepacked.tiles_shape(n, k), 0xA5)
    counts = np.zeros(n, np.uint32)
    groups, row_tiles, _ = tiles.shape
    library.run_gemm_pack(groups * row_tiles, arguments(data, packed_scales, tiles, counts, None, n, k, layout))
    want_tiles, want_records = prepacked.pack(data, scales, k)
    np.testing.assert_array_equal(tiles, want_tiles)
    assert counts.sum() == len(want_records)

    begins = np.concatenate([[0], np.cumsum(counts[:-1])]).astype(np.uint32)
    records = aligned(want_records.shape, 0xA5)
    blocks = ceil_div(n, ROWS_A_BLOCK)
    library.run_gemm_write_records(blocks, arguments(data, packed_scales, None, begins, records, n, k, layout))
    np.testing.assert_array_equal(records, want_records)


@pytest.mark.parametrize(("n", "k", "layout"), CASES)
def test_unpacking_and_restoring_give_every_byte_back(library, n, k, layout):
    data, scales = weight(n, k)
    tiles, records = prepacked.pack(data, scales, k)
    held = aligned(tiles.shape, 0)
    held[...] = tiles
    kept = aligned(records.shape, 0)
    kept[...] = records
    got_data, got_scales = np.zeros_like(data), np.zeros(LAYOUTS[layout].shape(n, scales.shape[1]), np.uint8)
    args = arguments(got_data, got_scales, held, None, kept, n, k, layout, len(records))
    library.run_gemm_unpack(tiles.shape[0] * tiles.shape[1], args)
    library.run_gemm_restore_records(ceil_div(len(records), THREADS), args)
    want_data, want_scales = prepacked.unpack(tiles, records, n, k, data.shape[1] * 2)
    np.testing.assert_array_equal(got_data, want_data)
    np.testing.assert_array_equal(got_scales, LAYOUTS[layout].pack(want_scales))


def test_records_of_blocks_that_the_weight_does_not_have_write_nothing(library):
    n, k = 20, 33
    records = aligned((3, prepacked.RECORD_BYTES), 0xFF)
    records[:, :8].view("<u4")[...] = [[n, 0], [0, ceil_div(k, BLOCK) << 8], [2**32 - 1, 2**32 - 1]]
    data, scales = np.full((n, 32), 0x5A, np.uint8), np.full((n, 4), 0x5A, np.uint8)
    library.run_gemm_restore_records(1, arguments(data, scales, None, None, records, n, k, "linear", 3))
    assert (data == 0x5A).all()
    assert (scales == 0x5A).all()
