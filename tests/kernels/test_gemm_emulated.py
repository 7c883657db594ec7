"""The portable product's own source, run on the CPU thread by thread (tests/kernels/emulation), against fp64.

What a GPU would forgive now and then is an error here: reads outside of every array, misaligned copies, a stage that
is used before its copies were waited for.
"""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from fp4rt import prepacked
from fp4rt.cpu import reference
from fp4rt.cuda.arguments import argument_struct
from fp4rt.cuda.gemm.portable import Alignment, PortableTile
from fp4rt.cuda.gemm.selection import FINISH_COLUMNS
from fp4rt.format import BLOCK, E2M1, E4M3
from fp4rt.layout import LAYOUTS, ceil_div, round_up

FP32 = 2  # out_type
ARGUMENTS = argument_struct("block/gemm_arguments.cuh", "GemmArguments")

#                     warps n, k, row tiles, token tiles, pieces, stages, blocks a multiprocessor
ONE_WARP = PortableTile(1, 1, 2, 1, 1, 3, 1)
K_WARPS = PortableTile(2, 2, 2, 2, 1, 4, 1)
MANY_TOKENS = PortableTile(2, 1, 2, 4, 2, 2, 1)
# (tile, kind of a, kind of b, alignments, m, n, k, padded k, scale layout of a, of b, parts of k, bytes off alignment)
CASES = (
    (K_WARPS, "bfloat16", "nvfp4", Alignment(16, 4, 16, 4), 9, 70, 512, 512, "linear", "128x4", 1, 0),
    (K_WARPS, "bfloat16", "nvfp4", Alignment(16, 4, 16, 4), 16, 64, 1024, 1024, "linear", "8x4", 3, 0),
    (ONE_WARP, "float16", "nvfp4", Alignment(16, 4, 8, 1), 3, 40, 336, 336, "linear", "linear", 1, 0),
    (ONE_WARP, "float16", "nvfp4", Alignment(2, 4, 1, 1), 5, 33, 50, 112, "linear", "8x4", 1, 1),
    (MANY_TOKENS, "bfloat16", "nvfp4", Alignment(16, 4, 16, 4), 70, 150, 320, 320, "linear", "linear", 1, 0),
    (K_WARPS, "nvfp4", "nvfp4", Alignment(8, 4, 8, 1), 11, 70, 336, 336, "128x4", "linear", 1, 0),
    (K_WARPS, "nvfp4", "nvfp4", Alignment(1, 1, 1, 1), 9, 40, 50, 64, "8x4", "128x4", 1, 3),
    (K_WARPS, "bfloat16", "prepacked", Alignment(16, 4, 16, 4), 9, 70, 336, 336, "linear", "linear", 1, 0),
    (MANY_TOKENS, "float16", "prepacked", Alignment(16, 4, 16, 4), 40, 100, 800, 800, "linear", "linear", 1, 0),
)


@pytest.fixture
def build(emulate):
    return lambda spec: emulate("gemm_portable.cpp", *(f"-D{name}={value}" for name, value in spec.defines))


class Memory:
    """Copies at a wanted alignment, known to the emulation as what may be read."""

    def __init__(self, library):
        self.library, self.kept = library, []

    def place(self, array, offset=0):
        raw = np.empty(array.nbytes + 64, np.uint8)
        begin = -raw.ctypes.data % 16 + offset
        view = raw[begin : begin + array.nbytes]
        view[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self.kept.append(raw)
        self.library.allow_reads(ctypes.c_void_p(view.ctypes.data), ctypes.c_uint64(view.nbytes))
        return view.ctypes.data


def quantized(rng, rows, k, padded, layout):
    """(data, scales, fp64 values); whatever is padding is NaN or -6."""
    columns, scheme = padded // BLOCK, LAYOUTS[layout]
    codes = rng.integers(0, 16, (rows, padded), dtype=np.uint8)
    row_major = rng.integers(0, 0x7F, (rows, columns), dtype=np.uint8)
    values = E2M1.values[codes].reshape(rows, columns, BLOCK) * E4M3.values[row_major][..., None]
    codes[:, k:] = 0xF
    row_major[:, ceil_div(k, BLOCK) :] = 0x7F
    packed = np.full(scheme.nbytes(rows, columns), 0x7F, np.uint8)
    packed[scheme.offsets(rows, columns)] = row_major
    return reference.pack_codes(codes), packed, values.reshape(rows, padded)[:, :k].astype(np.float64), row_major


def run(build, case):
    tile, a_kind, b_kind, align, m, n, k, padded, a_layout, b_layout, splits, offset = case
    rng = np.random.default_rng(m * n + k)
    library = build(tile.spec(a_kind, b_kind, align))
    memory = Memory(library)
    b_data, b_scales, b_values, b_row_major = quantized(rng, n, k, padded, b_layout)
    if b_kind == "prepacked":
        b_pointers = memory.place(prepacked.pack(b_data, b_row_major, k)[0], offset), 0
    else:
        b_pointers = memory.place(b_data, offset), memory.place(b_scales, offset)
    a_padded = round_up(k, BLOCK)
    if a_kind == "nvfp4":
        a_data, a_scales, a_values, _ = quantized(rng, m, k, a_padded, a_layout)
        a_pointers = memory.place(a_data, offset), memory.place(a_scales, offset)
    else:
        a_bits = reference.round_to_bits(rng.standard_normal((m, k)).astype(np.float32), a_kind)
        a_values = reference.widen(a_bits, a_kind).astype(np.float64)
        a_pointers = memory.place(a_bits, 2 * offset), 0
    out = np.full((m, n), np.nan, np.float32)
    partial = np.full((splits, m, n), np.nan, np.float32)
    args = ARGUMENTS.pack(
        *(*a_pointers, *b_pointers, 0, out.ctypes.data, partial.ctypes.data if splits > 1 else 0, 0, 0, 0),
        *(2 * k, 2, m, n, k, a_padded // BLOCK, padded // BLOCK, LAYOUTS[a_layout].index, LAYOUTS[b_layout].index),
        *(FP32, 0, splits, 1.0),
    )
    library.run(tile.blocks(m, n, splits), args)
    return (partial.sum(axis=0) if splits > 1 else out), a_values, b_values


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[1]}-{c[2]}-m{c[4]}-n{c[5]}-k{c[6]}-{c[9]}")
def test_every_element_lies_within_the_derived_bound(build, case):
    got, a, b = run(build, case)
    true = a @ b.T
    bound = a.shape[1] * 2.0**-24 * (np.abs(a) @ np.abs(b).T) + 2.0**-24 * np.abs(true)
    wrong = np.argwhere(~(np.abs(got - true) <= bound))
    assert not len(wrong), (
        f"{len(wrong)} of {got.size} out of bounds, first at {tuple(wrong[0])}: "
        f"got {got[tuple(wrong[0])]!r}, wanted {true[tuple(wrong[0])]!r} +- {bound[tuple(wrong[0])]!r}"
    )


# a's and b's global scale, or none; what the kernel multiplies with, one after the other
ALPHAS = (
    (None, (0.375, 1.0)),  # alpha as given
    ((3.0, 2.0**70), (np.float32(1 / (3.0 * 2.0**70)), 1.0)),
    ((1.5 * 2.0**-70, 2.0**-65), (2.0**64, np.float32(2.0**71 / 1.5))),  # beyond fp32
)


@pytest.mark.parametrize(("scales", "factors"), ALPHAS, ids=["given", "scales", "scales beyond fp32"])
@pytest.mark.parametrize("splits", [2, 3, 4, 9])
def test_parts_are_added_in_their_order_and_finished_once(emulate, splits, scales, factors):
    """By the kernel behind products whose k is in parts."""
    m, n = 2, 1030  # a row takes two blocks
    rng = np.random.default_rng(splits)
    parts = (rng.standard_normal((splits, m, n)) * 2.0**-12).astype(np.float32)
    parts[:, 1, 3] = 0
    bias, out = rng.standard_normal(n).astype(np.float32), np.full((m, n), np.nan, np.float32)
    global_scales = np.array(scales or (0, 0), np.float32)
    a_global, b_global = (global_scales[i:].ctypes.data if scales else 0 for i in range(2))
    args = ARGUMENTS.pack(
        *(0, 0, 0, 0, bias.ctypes.data, out.ctypes.data, parts.ctypes.data, 0, a_global, b_global),
        *(0, 0, m, n, 16, 0, 0, 0, 0, FP32, FP32, splits, 0.375),
    )
    emulate("gemm_finish.cpp").run(ceil_div(n, FINISH_COLUMNS) * m, args)
    sums = parts[0]
    for part in parts[1:]:
        sums = sums + part
    for factor in factors:
        sums = sums * np.float32(factor)
    assert np.isfinite(sums).all()
    np.testing.assert_array_equal(out, sums + bias)
