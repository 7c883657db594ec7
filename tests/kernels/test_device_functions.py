"""The device functions, built by g++ with C++ in place of the instructions, against the Python side: every code, every
tie, every offset. What the instructions themselves do is tested on a GPU (tests/cuda)."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from fp4rt.cpu import reference
from fp4rt.cuda.arguments import argument_struct
from fp4rt.format import BLOCK, E2M1, E4M3, FP32_MAX, INPUT_DTYPES
from fp4rt.layout import LAYOUTS, ceil_div

TIES = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32)
GLOBAL_SCALES = (1.0, 0.37, 448.0, 2688 / 65504, 1 + 2**-23, 1 - 2**-24, 1 / 3, 3.1e4, 1e6, 2688 / 3.3e38, 1e-4)
EXTREME_GLOBAL_SCALES = (1e-45, 2e-41, 1e-38, 2**-127, 2**-119, 1e-35, 3e-31, 2e30, 1e37, 3.4028235e38)


@pytest.fixture(scope="session")
def library(build):
    loaded = build("entries.cpp", "-O2")
    loaded.count_wrong_e2m1.restype = loaded.count_wrong_quotients.restype = ctypes.c_uint64
    loaded.argument_bytes.restype = ctypes.c_uint64
    loaded.finite_maximum.restype = ctypes.c_float
    return loaded


def address(array):
    assert array.flags.c_contiguous
    return ctypes.c_void_p(array.ctypes.data)


def count(array):
    return ctypes.c_uint64(len(array))


def encode_e4m3(library, values):
    found = np.empty(len(values), np.uint8)
    library.encode_e4m3(address(values), address(found), count(values))
    return found


def encode_e2m1(library, values):
    found = np.empty(len(values), np.uint8)
    library.encode_e2m1(address(values), address(found), count(values))
    return found


def neighbours(values):
    """Each value, and the floats one and two steps below and above it."""
    bits = np.asarray(values, np.float32).view(np.int32)
    return np.concatenate([bits + step for step in (-2, -1, 0, 1, 2)]).view(np.float32)


def assert_same(found, wanted, inputs):
    wrong = np.flatnonzero(found != wanted)
    if wrong.size:
        i = wrong[0]
        given = np.asarray(inputs)[i]
        pytest.fail(
            f"{wrong.size} of {len(wanted)} differ; first at {i}: {given!r} gave {found[i]:#x}, wanted {wanted[i]:#x}"
        )


# ---- e4m3


def test_every_e4m3_byte_decodes_to_its_value(library):
    every = np.arange(256, dtype=np.uint8)
    found = np.empty(256, np.float32)
    library.decode_e4m3(address(every), address(found), count(every))
    np.testing.assert_array_equal(found, E4M3.values)


def test_every_e4m3_value_and_every_tie_encodes_to_the_even_byte(library):
    values = E4M3.values[:127]
    ties = (values[:-1] + values[1:]) / 2
    special = np.array([0.0, 448, 464, 465, 480, 1e9, FP32_MAX, np.inf, 2**-10, 2**-149], np.float32)
    positive = neighbours(np.concatenate([values[1:], ties, special[1:-1][special[1:-1] < FP32_MAX]]))
    inputs = np.concatenate([positive[np.isfinite(positive) & (positive >= 0)], special])
    assert_same(encode_e4m3(library, inputs), reference.nearest_even_code(inputs, E4M3), inputs)


def test_e4m3_agrees_on_a_million_floats_of_all_sizes(library):
    inputs = np.random.default_rng(0).integers(0, 0x7F800000, 1_000_000, dtype=np.uint32).view(np.float32)
    assert_same(encode_e4m3(library, inputs), reference.nearest_even_code(inputs, E4M3), inputs)


def test_e4m3_of_nan_is_the_nan_byte(library):
    nans = np.array([0x7FC00000, 0x7F800001, 0x7FFFFFFF, 0xFFC00000], np.uint32).view(np.float32)
    assert encode_e4m3(library, nans).tolist() == [0x7F] * 4


# ---- e2m1


def test_every_float_of_the_rounding_range_goes_to_the_nearest_even_code(library):
    """All floats from 0.125 to 16: every tie, and both sides of it; what is outside rounds to 0 or 6."""
    first, last = (int(np.float32(v).view(np.uint32)) for v in (0.125, 16))
    example = ctypes.c_uint32()
    wrong = library.count_wrong_e2m1(first, last, ctypes.byref(example))
    assert wrong == 0, f"{wrong} floats, first {np.uint32(example.value).view(np.float32)!r}"


def test_small_large_and_infinite_magnitudes_saturate(library):
    inputs = np.array([0, 1e-45, 1e-30, 0.1249, 16, 17, 1e4, 16384, 16385, 1e30, FP32_MAX, np.inf], np.float32)
    assert encode_e2m1(library, inputs).tolist() == [0, 0, 0, 0, 7, 7, 7, 7, 7, 7, 7, 7]


def test_e2m1_keeps_the_sign_even_of_zero(library):
    inputs = np.concatenate([neighbours(TIES), E2M1.values[:8], np.array([0.1], np.float32)])
    positive, negative = encode_e2m1(library, inputs), encode_e2m1(library, -inputs)
    assert_same(positive, reference.nearest_even_code(inputs, E2M1), inputs)
    assert_same(negative, positive | 8, -inputs)


def test_codes_land_in_memory_order(library):
    pairs = np.array([[0x1000_0000 * (2 * j + 1) | 0x1000 * (2 * j) for j in range(4)]], np.uint32)
    word = np.empty(1, np.uint32)
    library.gather(address(pairs), address(word), ctypes.c_uint64(1))
    assert word[0] == 0x76543210


# ---- a block


def blocks_of(patterns, dtype):
    """(blocks, 16) patterns of ``dtype`` from a flat list, filled up with its last entry."""
    kind = np.uint32 if dtype == "float32" else np.uint16
    patterns = np.asarray(patterns, kind).reshape(-1)
    missing = -len(patterns) % BLOCK
    return np.concatenate([patterns, np.repeat(patterns[-1:], missing)]).reshape(-1, BLOCK)


def quantize(library, blocks, dtype, global_scale, extreme=False):
    words = np.ascontiguousarray(blocks).view(np.uint32)
    scales, codes = np.empty(len(blocks), np.uint8), np.empty((len(blocks), 2), np.uint32)
    library.quantize_blocks(
        INPUT_DTYPES.index(dtype),
        address(words),
        count(blocks),
        ctypes.c_float(global_scale),
        address(scales),
        address(codes),
        int(extreme),
    )
    return scales, codes.view(np.uint8)


def assert_blocks_agree(library, blocks, dtype, global_scale, extreme=False):
    gs = np.float32(global_scale)
    values = reference.widen(blocks, dtype)
    with np.errstate(all="ignore"):
        codes, scales = reference.quantize_blocks(values, gs)
    found_scales, found_bytes = quantize(library, blocks, dtype, gs, extreme)
    assert_same(found_scales, scales, blocks[:, 0])
    wrong = np.argwhere(found_bytes != reference.pack_codes(codes))
    if wrong.size:
        b, byte = wrong[0]
        pytest.fail(
            f"{dtype} gs={gs!r}: {len(wrong)} bytes differ, first block {b} byte {byte}: "
            f"got {found_bytes[b, byte]:#04x}, codes wanted {codes[b]}, x {values[b]}, scale {scales[b]:#x}"
        )


def pattern_sets(dtype):
    every = np.arange(65536, dtype=np.uint16)
    yield np.repeat(every, BLOCK)  # each pattern alone in its block
    yield np.random.default_rng(1).permutation(every)
    finite_max = {"float16": 0x7BFF, "bfloat16": 0x7F7F}[dtype]
    maxima = np.random.default_rng(2).integers(1, finite_max, 3000)
    below = np.maximum(maxima[:, None] - np.random.default_rng(3).integers(0, 6 << 7, (3000, 16)), 0)
    yield (below | np.random.default_rng(4).integers(0, 2, below.shape) << 15).astype(np.uint16)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_pattern_quantizes_as_specified(library, dtype):
    for patterns in pattern_sets(dtype):
        blocks = blocks_of(patterns, dtype)
        for global_scale in GLOBAL_SCALES:
            assert_blocks_agree(library, blocks, dtype, global_scale)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_pattern_quantizes_as_specified_where_the_global_scale_is_extreme(library, dtype):
    blocks = blocks_of(np.random.default_rng(5).permutation(np.arange(65536, dtype=np.uint16)), dtype)
    for global_scale in EXTREME_GLOBAL_SCALES:
        assert_blocks_agree(library, blocks, dtype, global_scale)


def float_blocks(seed, blocks=4000):
    """fp32 blocks whose elements lie within eight binades of a random maximum, subnormals and specials among them."""
    rng = np.random.default_rng(seed)
    top = rng.integers(1, 0x7F7FFFFF, (blocks, 1))
    bits = np.maximum(top - rng.integers(0, 8 << 23, (blocks, BLOCK)), 0).astype(np.uint32)
    bits |= rng.integers(0, 2, bits.shape, dtype=np.uint32) << 31
    special = np.array([0, 0x80000000, 1, 0x007FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000], np.uint32)
    where = rng.random(bits.shape) < 0.01
    bits[where] = rng.choice(special, int(where.sum()))
    return bits


@pytest.mark.parametrize("global_scale", GLOBAL_SCALES + EXTREME_GLOBAL_SCALES)
def test_fp32_blocks_quantize_as_specified(library, global_scale):
    assert_blocks_agree(library, float_blocks(6), "float32", global_scale)


def test_fp32_blocks_with_subnormal_maxima_quantize_as_specified(library):
    bits = np.random.default_rng(7).integers(0, 0x00800000, (4000, BLOCK), dtype=np.uint32)
    for global_scale in (3.3e38, 1e38, 1.0, FP32_MAX):
        assert_blocks_agree(library, bits, "float32", global_scale)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_extreme_way_gives_the_ordinary_bits_where_both_apply(library, dtype):
    blocks = blocks_of(np.random.default_rng(8).permutation(np.arange(65536, dtype=np.uint16)), dtype)
    for global_scale in (*GLOBAL_SCALES, 2.0**-99, 2.0**99):
        assert_blocks_agree(library, blocks, dtype, global_scale)
        assert_blocks_agree(library, blocks, dtype, global_scale, extreme=True)


# ---- dequantize and amax


def test_every_quotient_of_scale_and_global_scale_is_the_division_s(library):
    """All mantissas of both; their exponents only shift the result, which stays a normal number."""
    assert library.count_wrong_quotients() == 0


@pytest.mark.parametrize("global_scale", [1, 0.37, 3e-38, 1e38, 2688 / 65504, 2.0**-100, 2.0**100, 2.0**-101, 1e-42])
@pytest.mark.parametrize("dtype", INPUT_DTYPES)
def test_every_code_with_every_scale_dequantizes_as_specified(library, dtype, global_scale):
    elements = 4 if dtype == "float32" else 8
    gs = np.float32(global_scale)
    words = [0x3210, 0x7654, 0xBA98, 0xFEDC] if elements == 4 else [0x76543210, 0xFEDCBA98]
    scales = np.repeat(E4M3.values[:127], len(words))
    codes = np.tile(np.array(words, np.uint32), 127)
    found = np.empty((len(scales), 4), np.uint32)
    library.dequantize_pieces(
        *(INPUT_DTYPES.index(dtype), address(codes), address(scales), ctypes.c_float(gs), address(found), count(scales))
    )
    with np.errstate(all="ignore"):
        unpacked = reference.unpack_codes(codes.view(np.uint8).reshape(len(scales), 4))[:, :elements]
        wanted = reference.round_to_bits(E2M1.values[unpacked] * (scales / gs)[:, None], dtype).reshape(-1)
    found = found.view(wanted.dtype).reshape(-1)
    numbers = ~np.isnan(reference.widen(wanted, dtype))  # 0 * inf: the bits of a NaN are free
    assert np.isnan(reference.widen(found, dtype)[~numbers]).all()
    assert_same(found[numbers], wanted[numbers], np.repeat(scales, elements)[numbers])


@pytest.mark.parametrize("dtype", INPUT_DTYPES)
def test_the_finite_maximum_ignores_nan_and_infinity(library, dtype):
    kind = np.uint32 if dtype == "float32" else np.uint16
    special = {"float16": (0x7C00, 0xFC00, 0x7E00, 0xFFFF), "bfloat16": (0x7F80, 0xFF80, 0x7FC0, 0xFFFF)}.get(
        dtype, (0x7F800000, 0xFF800000, 0x7FC00000, 0xFFFFFFFF)
    )
    rng = np.random.default_rng(9)
    for share in (0.0, 0.2, 1.0):
        bits = rng.integers(0, np.iinfo(kind).max, 4096, dtype=kind, endpoint=True)
        where = rng.random(4096) < share
        bits[where] = rng.choice(np.array(special, kind), int(where.sum()))
        values = np.abs(reference.widen(bits, dtype))
        wanted = values[np.isfinite(values)].max(initial=np.float32(0))
        words = bits.view(np.uint32)
        found = library.finite_maximum(INPUT_DTYPES.index(dtype), address(words), count(words))
        assert np.float32(found) == wanted


# ---- places


def magic(divisor):
    return -(-(2**64) // divisor) % 2**64


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("m, columns", [(1, 1), (3, 3), (130, 9), (128, 4), (129, 5), (300, 17), (1, 70), (7, 448)])
def test_every_scale_lies_where_python_says(library, name, m, columns):
    layout = LAYOUTS[name]
    across = ceil_div(columns, layout.tile_columns)
    rows, cols = (a.reshape(-1).astype(np.uint64) for a in np.mgrid[:m, :columns])
    rows, cols = np.ascontiguousarray(rows), np.ascontiguousarray(cols)
    found = np.empty(len(rows), np.uint64)
    across_ = ctypes.c_uint64(across)
    library.scale_offsets(layout.index, address(rows), address(cols), across_, address(found), count(rows))
    np.testing.assert_array_equal(found, layout.offsets(m, columns).reshape(-1))

    offsets = np.arange(layout.nbytes(m, columns), dtype=np.uint64)
    row, column = np.empty_like(offsets), np.empty_like(offsets)
    library.scale_places(
        layout.index,
        address(offsets),
        across_,
        ctypes.c_uint64(magic(across)),
        address(row),
        address(column),
        count(row),
    )
    wanted_row, wanted_column = layout.coordinates(offsets.astype(np.int64), columns)
    np.testing.assert_array_equal(row, wanted_row)
    np.testing.assert_array_equal(column, wanted_column)


def test_places_beyond_32_bits_are_exact(library):
    layout = LAYOUTS["128x4"]
    across = 5_000_000_000
    rows, cols = np.array([0, 129, 2**33 + 5], np.uint64), np.array([2**34 + 3, 7, 11], np.uint64)
    found = np.empty(3, np.uint64)
    library.scale_offsets(
        layout.index, address(rows), address(cols), ctypes.c_uint64(across), address(found), count(rows)
    )
    wanted = [layout.offset(int(r), int(c), across * 4) % 2**64 for r, c in zip(rows, cols, strict=True)]
    assert found.tolist() == wanted


def test_division_by_a_product_is_exact_at_every_border(library):
    for divisor in (1, 2, 3, 7, 14, 448, 1792, 65535, 2**31 - 1, 2**32 - 1, 2**32 + 3):
        quotients = np.array([0, 1, 2, 1000, (2**32 - 1) // divisor, 2**31], np.uint64)
        index = np.unique(
            np.concatenate([quotients * divisor + d for d in (0, 1, max(divisor - 1, 0))]).astype(np.uint64)
        )
        found = np.empty_like(index)
        library.divide_many(
            address(index), ctypes.c_uint64(magic(divisor)), ctypes.c_uint64(divisor), address(found), count(index)
        )
        np.testing.assert_array_equal(found, index // np.uint64(divisor))


def test_argument_structs_have_the_size_that_cpp_gives_them(library):
    names = ["Amax", "Dequantize", "Quantize", "QuantizeAny", "Relayout"]
    headers = ["amax", "dequantize", "quantize", "quantize_any", "relayout"]
    for i, (name, header) in enumerate(zip(names, headers, strict=True)):
        read = argument_struct(f"kernels/{header}_arguments.cuh", f"{name}Arguments")
        assert read.nbytes == library.argument_bytes(i), name
