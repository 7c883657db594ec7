"""The quantizer kernels in full, thread after thread on the host, launched as the CUDA backend launches them: every
byte of data and scales, padding included, against the specification."""

from __future__ import annotations

import ctypes
import dataclasses

import numpy as np
import pytest

from fp4rt import interop, prepacked
from fp4rt.cpu import reference
from fp4rt.cuda.gemm.prepack import VALUES_ARGUMENTS, choose_values
from fp4rt.cuda.quantizers import amax, dequantize, quantize, relayout
from fp4rt.cuda.quantizers.amax import choose_amax
from fp4rt.cuda.quantizers.dequantize import choose_dequantize
from fp4rt.cuda.quantizers.quantize import choose_quantize
from fp4rt.cuda.quantizers.relayout import choose_relayout
from fp4rt.format import INPUT_DTYPES
from fp4rt.layout import LAYOUTS, block_columns, data_shape, round_up

POISON = 0xA5
GUARD = 64
NAMES = {"quantize": "QuantizeArguments", "quantize_any": "QuantizeAnyArguments", "dequantize": "DequantizeArguments"}
NAMES |= {"relayout": "RelayoutArguments", "amax": "AmaxArguments"}
NAMES |= dict.fromkeys(("prepacked_values", "restored_values"), "PrepackedValuesArguments")


@pytest.fixture(scope="session")
def run(build):
    """Runs a launch: the struct's bytes as the GPU would get them."""

    def run(launch, args):
        spec = launch.spec
        options = [f"-D{name}={value}" for name, value in spec.defines]
        options += [f'-DSOURCE="{spec.source}"', f"-DENTRY={spec.entry}", f"-DARGUMENTS={NAMES[spec.entry]}"]
        library = build("kernel.cpp", "-O1", *options)
        library.run(*launch.grid, launch.threads, ctypes.c_char_p(args))

    return run


class Poisoned:
    """Bytes to write to, at a chosen alignment, with guards on both sides."""

    def __init__(self, nbytes, misalignment=0):
        self.all = np.full(nbytes + 2 * GUARD + 32, POISON, np.uint8)
        start = GUARD + (-(self.all.ctypes.data + GUARD)) % 16 + misalignment
        self.bytes = self.all[start : start + nbytes]
        self.pointer = self.bytes.ctypes.data
        self.outside = np.ones(self.all.size, bool)
        self.outside[start : start + nbytes] = False

    def check(self):
        assert (self.all[self.outside] == POISON).all(), "written outside of the buffer"
        return self.bytes


def random_bits(rng, m, n, dtype):
    """Patterns of rows with their own sizes, a few special values and a few zero rows."""
    values = rng.standard_normal((m, n)) * np.exp2(rng.integers(-8, 5, (m, 1)))
    values[rng.random((m, n)) < 0.002] = rng.choice([0.0, -0.0, np.inf, -np.inf, np.nan, 6.0])
    values[rng.random(m) < 0.05] = 0.0
    return reference.round_to_bits(values.astype(np.float32), dtype)


def aligned_copy(bits, misalignment=0):
    memory = np.empty(bits.nbytes + 32, np.uint8)
    start = -memory.ctypes.data % 16 + misalignment
    copy = memory[start : start + bits.nbytes].view(bits.dtype).reshape(bits.shape)
    copy[...] = bits
    return copy


def assert_bytes(found, wanted, what):
    wrong = np.flatnonzero(found.reshape(-1) != wanted.reshape(-1))
    if wrong.size:
        at = np.unravel_index(wrong[0], wanted.shape)
        got, want = found.reshape(-1)[wrong[0]], wanted.reshape(-1)[wrong[0]]
        pytest.fail(
            f"{what}: {wrong.size} of {wanted.size} bytes differ, first {at}: got {got:#04x}, wanted {want:#04x}"
        )


def check_quantize(run, bits, dtype, layout, padded_n, gs=1.7, backwards=False, misalignments=(0, 0), expect=None):
    m, n = bits.shape
    bits = bits if bits.base is not None and not bits.flags.owndata else aligned_copy(bits)
    view = interop.view(bits)
    view.dtype = dtype
    data = Poisoned(m * padded_n // 2, misalignments[0])
    scales = Poisoned(layout.nbytes(m, block_columns(padded_n)), misalignments[1])
    given, kept = np.array([gs], np.float32), Poisoned(4)
    lies = (*view.strides, view.pointer % 16, data.pointer % 16, scales.pointer % 16)
    launch = choose_quantize(layout, padded_n, m, n, *lies, dtype, backwards)
    if expect is not None:
        assert launch.spec.entry == expect
    structs = {"quantize": quantize.ALIGNED_ARGUMENTS, "quantize_any": quantize.ANY_ARGUMENTS}
    addresses = (view.pointer, data.pointer, scales.pointer, given.ctypes.data, kept.pointer)
    run(launch, structs[launch.spec.entry].pack(*addresses, *launch.constants, 0.0))
    values = reference.widen(np.ascontiguousarray(bits), dtype)
    wanted_data, wanted_scales = reference.quantize(values, np.float32(gs), layout, padded_n)
    assert_bytes(data.check(), wanted_data.reshape(data_shape(m, padded_n)), "data")
    assert_bytes(scales.check(), wanted_scales, "scales")
    assert kept.check().view(np.float32)[0] == np.float32(gs)


SHAPES = [
    (1, 1, 16),
    (1, 16, 16),
    (3, 48, 48),
    (3, 50, 64),
    (7, 300, 304),
    (130, 80, 96),
    (128, 64, 64),
    (200, 33, 1040),
]


@pytest.mark.parametrize("dtype", INPUT_DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_matrix_that_is_not_aligned_gets_every_byte(run, dtype, layout):
    rng = np.random.default_rng(1)
    for m, n, padded_n in SHAPES:
        bits = aligned_copy(random_bits(rng, m, n, dtype), 8)
        check_quantize(run, bits, dtype, layout, padded_n, expect="quantize_any")


ALIGNED_SHAPES = [(1, 16, 16), (129, 112, 128), (300, 2064, 2064), (77, 48, 1040), (257, 528, 544), (8, 1024, 1024)]


@pytest.mark.parametrize("dtype", INPUT_DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_an_aligned_matrix_gets_every_byte(run, monkeypatch, dtype, layout):
    rng = np.random.default_rng(2)
    for few_ctas in (1, 1 << 40):  # two blocks a lane, and one
        monkeypatch.setattr(quantize, "FEW_CTAS", few_ctas)
        for m, n, padded_n in ALIGNED_SHAPES:
            bits = random_bits(rng, m, n, dtype)
            check_quantize(run, bits, dtype, layout, padded_n, expect="quantize")
        check_quantize(run, bits, dtype, layout, padded_n, backwards=True, expect="quantize")
    monkeypatch.setattr(quantize, "READ_ONCE", range(1 << 40))
    check_quantize(run, bits, dtype, layout, padded_n, expect="quantize")


def test_only_inputs_that_l2_cannot_hold_and_that_gain_evict_themselves():
    def reads_once(m, n):
        launch = choose_quantize(LAYOUTS["128x4"], n, m, n, n, 1, 0, 0, 0, "bfloat16", False)
        return dict(zip(quantize.ALIGNED_ARGUMENTS.fields[5:], launch.constants, strict=False))["read_once"]

    assert [reads_once(m, 8192) for m in (1, 2048, 4096, 8192, 12000, 16384)] == [0, 0, 1, 1, 1, 0]


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_grid_that_is_higher_than_the_device_allows_goes_on_in_depth(run, monkeypatch, layout):
    monkeypatch.setattr(quantize, "MAX_GRID_Y", 5)
    bits = random_bits(np.random.default_rng(9), 300, 64, "float16")
    monkeypatch.setattr(quantize, "_aligned_spec", with_define(quantize._aligned_spec, "STRIPS_ALONG_Y", 5))
    check_quantize(run, bits, "float16", layout, 64, expect="quantize")


def with_define(spec, name, value):
    def changed(*args):
        found = spec(*args)
        return dataclasses.replace(found, defines=(*found.defines, (name, value)))

    return changed


@pytest.mark.parametrize("global_scale", [1e-45, 1e-38, 2e-31, 2e30, 3.4028235e38])
@pytest.mark.parametrize("misalignment", [0, 8])
def test_extreme_global_scales_go_their_own_way(run, global_scale, misalignment):
    every = aligned_copy(np.arange(65536, dtype=np.uint16).reshape(128, 512), misalignment)
    check_quantize(run, every, "bfloat16", LAYOUTS["128x4"], 528, gs=global_scale)


def test_views_of_any_strides_and_alignment_equal_their_copies(run):
    rng = np.random.default_rng(3)
    for dtype in INPUT_DTYPES:
        base = aligned_copy(random_bits(rng, 40, 130, dtype), 8)
        wide = aligned_copy(random_bits(rng, 40, 256, dtype))
        row = np.broadcast_to(wide[3], (5, 256))
        views = [base[1:, 1:], base[::-1], base[:, ::-1], base[::3, ::2], base.T, wide[:, 16:144], wide[::-2, 8:], row]
        for view in views:
            check_quantize(run, view, dtype, LAYOUTS["128x4"], round_up(view.shape[1], 16) + 16)


@pytest.mark.parametrize("offset", [1, 3, 4, 7, 8, 15])
def test_results_at_odd_addresses_are_whole_and_alone(run, offset):
    bits = random_bits(np.random.default_rng(4), 33, 64, "float16")
    for layout in LAYOUTS.values():
        check_quantize(run, bits, "float16", layout, 80, misalignments=(offset, 15 - offset))


@pytest.mark.parametrize("dtype", INPUT_DTYPES)
def test_dequantize_writes_every_number_and_nothing_else(run, dtype):
    rng = np.random.default_rng(5)
    size = 4 if dtype == "float32" else 2
    for layout in LAYOUTS.values():
        for m, n, padded_n in [*SHAPES, (5, 4096, 4096), (2, 4100, 4112)]:
            for misaligned in (0, 1):
                data = aligned_copy(rng.integers(0, 256, data_shape(m, padded_n), dtype=np.uint8), misaligned)
                raw = rng.integers(0, 256, layout.shape(m, block_columns(padded_n)), dtype=np.uint8)
                scales = aligned_copy(raw, 3 * misaligned)
                gs = np.array([0.83], np.float32)
                y = Poisoned(m * n * size, size * misaligned)
                launch = choose_dequantize(layout, m, n, padded_n, dtype, data.ctypes.data % 16, y.pointer % 16)
                pointers = (data.ctypes.data, scales.ctypes.data, gs.ctypes.data, y.pointer)
                run(launch, dequantize.ARGUMENTS.pack(*pointers, *launch.constants))
                values = reference.dequantize(data, scales, gs[0], (m, n), layout)
                wanted = reference.round_to_bits(np.ascontiguousarray(values), dtype)
                found = y.check().view(wanted.dtype).reshape(m, n)
                nan = np.isnan(values)
                assert np.isnan(reference.widen(found, dtype)[nan]).all()
                assert_bytes(np.where(nan, 0, found), np.where(nan, 0, wanted), f"{layout.name} {(m, n, padded_n)}")


@pytest.mark.parametrize("dtype", INPUT_DTYPES)
@pytest.mark.parametrize(("scale", "misaligned"), [(0.83, 0), (0.83, 1), (0.83, 2), (1e-38, 0), (3e38, 2)])
def test_values_of_a_prepacked_weight_are_those_of_the_tensor_it_was_made_from(run, dtype, scale, misaligned):
    rng = np.random.default_rng(6)
    size = 4 if dtype == "float32" else 2
    gs = np.array([scale], np.float32)
    shapes = [(1, 16), (33, 272), (17, 50), (20, 33), (16, 256), (5, 1000)]
    if (scale, misaligned) == (0.83, 2):
        shapes.append((1, (1 << 20) + 45))  # columns of blocks that 16 bits do not count
    for n, k in shapes:
        padded = round_up(k, 32)
        data = rng.integers(0, 256, data_shape(n, padded), dtype=np.uint8)
        scales = rng.integers(0, 256, (n, block_columns(padded)), dtype=np.uint8)
        scales[rng.random(scales.shape) < 0.5] &= 0x80  # a zero's codes and its sign are in the records alone
        scales[-1, -1] = 0x80
        tiles, records = prepacked.pack(data, scales, k)
        assert len(records) > 0
        held = aligned_copy(tiles, misaligned), aligned_copy(records, 3 * misaligned)
        y = Poisoned(n * k * size, size * misaligned)
        pointers = (*(array.ctypes.data for array in (*held, gs)), y.pointer)
        for launch in choose_values(n, k, len(records), dtype, y.pointer % 16):
            run(launch, VALUES_ARGUMENTS.pack(*pointers, *launch.constants))
        with np.errstate(over="ignore"):
            values = reference.dequantize(data, scales, gs[0], (n, k), LAYOUTS["linear"])
            wanted = reference.round_to_bits(np.ascontiguousarray(values), dtype)
        found = y.check().view(wanted.dtype).reshape(n, k)
        nan = np.isnan(values)
        assert np.isnan(reference.widen(found, dtype)[nan]).all()
        assert_bytes(np.where(nan, 0, found), np.where(nan, 0, wanted), f"{(n, k)}")


def test_records_of_blocks_that_a_weight_does_not_have_give_no_values(run):
    n, k = 20, 33
    records = np.zeros((3, prepacked.RECORD_BYTES), np.uint8)
    records[:, :8].view("<u4")[...] = [[n, 0], [0, 3 << 8], [2**32 - 1, 2**32 - 1]]
    gs, y = np.ones(1, np.float32), Poisoned(n * k * 4)
    _, restore = choose_values(n, k, len(records), "float32", y.pointer % 16)
    pointers = 0, records.ctypes.data, gs.ctypes.data, y.pointer
    run(restore, VALUES_ARGUMENTS.pack(*pointers, *restore.constants))
    assert (y.check() == POISON).all()


@pytest.mark.parametrize("source", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("target", LAYOUTS.values(), ids=LAYOUTS)
def test_relayout_keeps_scales_and_zeroes_padding(run, source, target):
    rng = np.random.default_rng(6)
    for m, n, padded_n in SHAPES:
        for misaligned in (0, 1):
            columns = block_columns(padded_n)
            scales = rng.integers(0, 256, source.shape(m, columns), dtype=np.uint8)  # its padding is not zero
            to = Poisoned(target.nbytes(m, columns), misaligned)
            launch = choose_relayout(m, n, padded_n, source, target, to.pointer % 4)
            run(launch, relayout.ARGUMENTS.pack(scales.ctypes.data, to.pointer, *launch.constants))
            assert_bytes(to.check(), reference.relayout(scales, (m, n), columns, source, target), str((m, n, padded_n)))


@pytest.mark.parametrize("dtype", INPUT_DTYPES)
def test_the_global_scale_of_any_view_is_that_of_its_copy_and_the_counters_return_to_zero(run, dtype):
    rng = np.random.default_rng(7)
    base = aligned_copy(random_bits(rng, 50, 1040, dtype), 8)
    row = np.broadcast_to(base[3], (7, 1040))
    views = [
        base,
        base[1:, 1:],
        base[::-1],
        base[:, ::-1],
        base[::3, ::2],
        base.T,
        base[:, 16:1024],
        base[:, 3:500],
        row,
    ]
    views += [base[:1, :1], base[:1, :7], np.zeros_like(base)]
    to = Poisoned(4)
    for view in views:
        seen = interop.view(view)
        m, n = view.shape
        launch = choose_amax(3, m, n, *seen.strides, seen.pointer % 16, dtype)
        run(launch, amax.ARGUMENTS.pack(seen.pointer, to.pointer, *launch.constants, 5))
        wanted = reference.global_scale(reference.widen(np.ascontiguousarray(view), dtype))
        assert to.check().view(np.float32)[0] == wanted, (dtype, view.shape, seen.strides)
