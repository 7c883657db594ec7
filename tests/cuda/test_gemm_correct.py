"""Products on a device against fp64, under a bound derived from the arithmetic, by every kernel that can run here."""

from __future__ import annotations

import itertools
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from fp4rt.format import E4M3_NAN_BYTE
from tests.cuda import gemm_cases as cases

pytestmark = pytest.mark.gpu

TOKENS = (*range(1, 18), 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1000, 4096)
# (n, k): tails of every tile in both directions, rows that are no multiple of 16 bytes, primes times 16
SIZES = (
    *((16, 16), (48, 80), (80, 48), (13 * 16, 7 * 16), (31 * 16, 37 * 16), (17, 1040), (250, 50)),
    *((16, 28672), (28672, 16), (48, 7152), (7152, 80), (1, 16)),
)


@pytest.fixture(autouse=True, scope="module")
def compiled():
    """Kernels of the usual tiles, compiled side by side."""
    from fp4rt.cuda.kernel import device_target
    from fp4rt.cuda.kernel_set import kernels_for

    target = device_target(0)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda spec: spec.compile(target.name), kernels_for(target)))


@pytest.fixture
def rng():
    return np.random.default_rng(20)


@pytest.mark.parametrize("kind", cases.KINDS)
def test_every_number_of_tokens(kind, rng):
    n, k = 13 * 16, 23 * 16
    b = cases.quantized(rng, n, k)
    for m in TOKENS:
        a = cases.activations(rng, m, k, kind)
        for kernel, form in cases.ways():
            if cases.takes(kernel, m) and not (kernel == "reference" and m > 300):
                cases.check(f"{kind} m={m}", a, b, kernel, form)
        for form in (cases.PLAIN, cases.PREPACKED):
            cases.check(f"{kind} m={m}", a, b, None, form, "bfloat16")


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
def test_every_size_of_weight(size, rng):
    n, k = size
    b = cases.quantized(rng, n, k)
    for kind in cases.KINDS:
        for m in (1, 9, 16, 40, 300):
            a = cases.activations(rng, m, k, kind)
            for kernel, form in cases.ways():
                if cases.takes(kernel, m, a) and not (kernel == "reference" and m * n * k > 1 << 28):
                    cases.check(f"{kind} m={m} n={n} k={k}", a, b, kernel, form)


@pytest.mark.parametrize("layout_b", ["linear", "128x4", "8x4"])
@pytest.mark.parametrize("layout_a", ["linear", "128x4", "8x4"])
def test_every_layout_of_both_operands(layout_a, layout_b, rng):
    for n, k in ((150, 208), (64, 48)):
        b = cases.quantized(rng, n, k, layout_b)
        for m in (3, 130):
            a = cases.quantized(rng, m, k, layout_a)
            for kernel, form in cases.ways():
                if cases.takes(kernel, m):
                    cases.check(f"{layout_a} x {layout_b} m={m}", a, b, kernel, form)


@pytest.mark.parametrize("out_dtype", ["float16", "bfloat16", "float32"])
def test_alpha_bias_and_output_types(out_dtype, rng):
    import ml_dtypes

    n, k = 72, 272
    b = cases.quantized(rng, n, k)
    biases = [None] + [
        cases.on_device(rng.standard_normal(n).astype(dtype).view(f"u{np.dtype(dtype).itemsize}")).view(np.dtype(dtype))
        for dtype in (np.float16, ml_dtypes.bfloat16, np.float32)
    ]
    for kind in cases.KINDS:
        for m in (2, 14, 50, 140):
            a = cases.activations(rng, m, k, kind)
            for kernel, form in cases.ways():
                if cases.takes(kernel, m):
                    for bias in biases:
                        cases.check(f"{kind} m={m} bias", a, b, kernel, form, out_dtype, None, bias)
                    cases.check(f"{kind} m={m} number", a, b, kernel, form, out_dtype, 0.37109375)
                    alpha = cases.cupy().asarray([-0.0625], np.float32)
                    cases.check(f"{kind} m={m} array", a, b, kernel, form, out_dtype, alpha, biases[-1])


@pytest.mark.parametrize("kind", cases.KINDS)
def test_scales_over_the_whole_range(kind, rng):
    """Zero, subnormal and the largest scales, side by side in every product."""
    n, k = 130, 16 * 127
    b = cases.quantized(rng, n, k, scales=cases.WHOLE_RANGE)
    for m in (5, 100):
        a = cases.activations(rng, m, k, kind, **({"scales": cases.WHOLE_RANGE} if kind == "nvfp4" else {}))
        for kernel, form in cases.ways():
            if cases.takes(kernel, m):
                cases.check(f"{kind} m={m}", a, b, kernel, form)


@pytest.mark.parametrize(("scale", "scales"), [(2.0**-65, (1, 8)), (2.0**66, (0x70, 0x7F)), (2.0**80, (0x70, 0x7F))])
def test_global_scales_whose_product_leaves_fp32(scale, scales, rng):
    """1 / (their product) has no normal number in fp32; results have, and sums of zero stay zero."""

    def change(codes, row_major):
        codes[3] = 0

    n, k, options = 72, 272, {"scales": scales, "global_scale": 1.37 * scale}
    b = cases.quantized(rng, n, k, change=change, **options)
    for m in (2, 14, 50, 140):
        a = cases.quantized(rng, m, k, **options)
        for kernel, form in cases.ways():
            if cases.takes(kernel, m):
                for out_dtype in ("float32", "bfloat16"):
                    got = cases.cupy().asnumpy(cases.run(a, b, kernel, form, out_dtype))
                    got = got.astype(np.float64)  # here: CuPy's own conversion takes subnormal numbers for zero
                    cases.assert_close(f"m={m} {kernel} {form}", got, *cases.expected(a, b), out_dtype)


def test_every_scale_byte_times_every_code_exactly(rng):
    """One token reads one column: row 16 s + c of the weight has code c in it, under scale byte s."""

    def change(codes, scales):
        codes[...] = 0
        codes[:, 37] = np.arange(len(codes)) % 16
        scales[...] = (np.arange(len(scales)) // 16)[:, None]

    b = cases.quantized(rng, 0x7F * 16, 256, change=change)
    for kind in ("float16", "bfloat16"):
        for m in (1, 20, 200):
            a = cases.halves(rng, m, 256, kind, np.ones((m, 256), np.float32))
            wanted = b.values[:, 37].get().astype(np.float32)
            for kernel, form in cases.ways():
                if cases.takes(kernel, m):
                    got = cases.cupy().asarray(cases.run(a, b, kernel, form, alpha=1.0)).get()
                    wrong = np.argwhere(got != wanted)
                    assert not len(wrong), f"{kind} m={m} {kernel} {form}: {len(wrong)} wrong, first {wrong[0]}"


@pytest.mark.parametrize("kind", cases.KINDS)
def test_small_integers_are_exact_bit_for_bit(kind, rng):
    """Sums of integers below 2^24 have one right answer, in any order of addition."""
    n, k = 96, 16 * 41

    def whole(codes, scales):  # codes 0, 1, 2, 3, 4, 6 and their negatives; scales 1, 2 and 4
        codes[...] = rng.choice([0, 2, 4, 5, 6, 7, 10, 12, 13, 14, 15], codes.shape)
        scales[...] = rng.choice([0x38, 0x40, 0x48], scales.shape)

    b = cases.quantized(rng, n, k, change=whole)
    for m in (1, 8, 16, 17, 64, 129, 256):
        if kind == "nvfp4":
            a = cases.quantized(rng, m, k, change=whole)
        else:
            a = cases.halves(rng, m, k, kind, rng.integers(-8, 9, (m, k)).astype(np.float32))
        wanted = (a.values @ b.values.T).get()
        assert np.abs(wanted).max() < 2**24
        for kernel, form in cases.ways():
            if cases.takes(kernel, m):
                got = cases.cupy().asarray(cases.run(a, b, kernel, form, alpha=1.0)).get()
                assert np.array_equal(got, wanted), f"{kind} m={m} {kernel} {form}"


@pytest.mark.parametrize("kind", cases.KINDS)
def test_a_nan_block_makes_exactly_its_rows_nan(kind, rng):
    n, k = 150, 16 * 19
    rows = [0, 17, 149]

    def broken(codes, scales):
        scales[rows, [0, 18, 7]] = E4M3_NAN_BYTE

    b = cases.quantized(rng, n, k, change=broken)
    for m in (4, 70):
        a = cases.activations(rng, m, k, kind)
        for kernel, form in cases.ways():
            if cases.takes(kernel, m):
                is_nan = cases.cupy().isnan(cases.cupy().asarray(cases.run(a, b, kernel, form))).get()
                wanted = np.isin(np.arange(n), rows)
                wrong = np.argwhere(is_nan != wanted)
                assert not len(wrong), f"{kind} m={m} {kernel} {form}: {len(wrong)} wrong, first {wrong[0]}"


def test_a_nan_block_of_an_activation_makes_its_token_nan(rng):
    k = 16 * 19
    b = cases.quantized(rng, 40, k)

    def broken(codes, scales):
        scales[2, 5] = E4M3_NAN_BYTE

    for m in (4, 70):
        a = cases.quantized(rng, m, k, change=broken)
        for kernel, form in cases.ways():
            if cases.takes(kernel, m):
                is_nan = cases.cupy().isnan(cases.cupy().asarray(cases.run(a, b, kernel, form))).get()
                assert is_nan[2].all(), f"m={m} {kernel} {form}"
                assert not np.delete(is_nan, 2, axis=0).any(), f"m={m} {kernel} {form}"


def test_every_portable_tile_on_one_product(rng):
    """Selection takes few of the tiles on this device; each must be right, with k in one part and in several."""
    from fp4rt.cuda.gemm import portable_choice
    from fp4rt.cuda.gemm.matmul import Weight, launch, make_plan, problem_of
    from fp4rt.cuda.gemm.selection import Choice

    n, k = 500, 1040
    b = cases.quantized(rng, n, k)
    weights = {cases.PLAIN: Weight(b.given.views()), cases.PREPACKED: Weight(b.packed.views())}
    for kind in cases.KINDS:
        for m in (7, 15, 30, 60, 200):
            a = cases.activations(rng, m, k, kind)
            left = a.views()
            true, bound = cases.expected(a, b)
            for form, weight in weights.items():
                problem = problem_of(left, weight)
                as_bf16 = kind == "nvfp4" and (form == cases.PREPACKED or m > 16)
                for _, tile, splits in portable_choice.candidates(problem, "bfloat16" if as_bf16 else kind):
                    if splits in (1, 4):
                        choice = Choice("portable", tile, splits, "bf16" if as_bf16 else "as given", False, "")
                        out = cases.cupy().full((m, n), np.nan, np.float32)
                        plan = make_plan(left, weight, problem, choice)
                        launch(plan, left, weight, "float32", None, None, out.data.ptr, 0)
                        cases.assert_close(f"{kind} m={m} {form} {tile} x{splits}", out, true, bound, "float32")


def test_every_form_of_a_prefill_tile_on_one_product(rng):
    """Selection takes few of them: all tokens in one tile or in many, tiles shared by two and by many workers."""
    from fp4rt.cuda.gemm.hopper import PrefillTile

    if not cases.has_hopper():
        pytest.skip("the prefill kernel needs sm_90a")
    forms = [(tokens, blocks, cluster, 1) for tokens in (16, 64, 112, 128) for blocks in (1, 2) for cluster in (1, 2)]
    forms += [(tokens, 1, cluster, 1) for tokens in (192, 240, 256) for cluster in (1, 2)]
    forms += [(tokens, 1, 1, 2) for tokens in (64, 192, 256)]
    tiles = [
        PrefillTile(tokens, blocks, 8 * blocks, 4, 2, 2, cluster=cluster, k_cluster=k_cluster)
        for tokens, blocks, cluster, k_cluster in forms
    ]
    tiles += [PrefillTile(tokens, 1, 8, 3, 2, 2, stage_chunks=2) for tokens in (16, 112, 128)]
    tiles += [PrefillTile(tokens, 1, 12, 5, 2, 2, row_groups=3) for tokens in (64, 112, 128, 160)]
    tiles.append(PrefillTile(128, 1, 12, 5, 2, 2, row_groups=3, cluster=2))
    tiles += [
        PrefillTile(64, 1, 8, 2, 3, 2, stage_chunks=2, **cluster) for cluster in ({"cluster": 2}, {"k_cluster": 2})
    ]
    kinds = (("bfloat16", 700), ("nvfp4", 131), ("float16", 20))
    # k ends in the first half of a column group; then in the second, not in whole chunks, nor stored transposed
    weights = ((2056, 4160), (515, 432))
    compile_side_by_side(tiles, kinds, weights)
    for n, k in weights:
        b = cases.quantized(rng, n, k)
        for kind, m in kinds:
            a = cases.activations(rng, m, k, kind)
            for tile in tiles:
                for out_dtype in ("float16", "float32"):
                    if tile.can_share(k):
                        cases.check_tile(f"{kind} m={m} n={n}", a, b, tile, out_dtype)


def test_every_form_of_a_small_tile_on_one_product(rng):
    """Row groups, k groups, clusters that share k for all rows or for the last ones; rows that end in each of them."""
    from fp4rt.cuda.gemm.hopper import SmallTile

    if not cases.has_hopper():
        pytest.skip("the small kernel needs sm_90a")
    # (row tiles, stages, row groups, k groups, row blocks, fragments), blocks of a cluster, groups of their own
    forms = [
        ((4, 4, 1, 1, 1, 4), 2, 0),
        ((4, 4, 1, 2, 1, 2), 2, 0),
        ((8, 3, 1, 2, 2, 2), 1, 0),
        ((8, 3, 2, 2, 1, 4), 2, 0),
        ((12, 3, 3, 1, 1, 4), 1, 0),
        ((14, 3, 2, 1, 2, 2), 1, 0),
        ((4, 4, 1, 2, 1, 4), 4, 0),
        ((8, 3, 2, 1, 1, 2), 4, 0),
        ((16, 2, 4, 1, 1, 4), 1, 0),
        ((8, 3, 2, 1, 1, 4), 2, 1),
        ((12, 3, 3, 1, 1, 4), 2, 2),
        ((16, 2, 4, 1, 1, 2), 2, 3),
        ((16, 2, 2, 1, 2, 2), 2, 1),
    ]
    tiles = [
        SmallTile(tokens, row_tiles, 1, stages, *division, k_cluster=k_cluster, own_groups=own_groups)
        for (row_tiles, stages, *division), k_cluster, own_groups in forms
        for tokens in (2, 5, 8)
    ]
    kinds = (("bfloat16", 64), ("nvfp4", 33), ("float16", 9))
    # 28 row tiles are whole clusters; then rows end among one block's own, the other's own, the shared ones
    weights = ((448, 4160), (136, 600), (515, 1040), (832, 304))
    compile_side_by_side(tiles, kinds, weights)
    for n, k in weights:
        b = cases.quantized(rng, n, k)
        for kind, m in kinds:
            a = cases.activations(rng, m, k, kind)
            for tile in tiles:
                for out_dtype in ("bfloat16", "float32") if kind == "bfloat16" else ("float16",):
                    if m <= tile.max_tokens and tile.can_share(k):
                        cases.check_tile(f"{kind} m={m} n={n} k={k}", a, b, tile, out_dtype)


def compile_side_by_side(tiles, kinds, weights):
    """Each takes a second: in the forms that products of these activations and weights have."""
    from fp4rt.cuda.gemm.problem import device_measures
    from fp4rt.cuda.kernel import device_target

    processors = device_measures(0).multiprocessors
    specs = {
        tile.for_product(m, n, k, processors).spec("float16" if kind == "float16" else "bfloat16")
        for tile, (kind, m), (n, k) in itertools.product(tiles, kinds, weights)
        if tile.can_share(k)
    }
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda spec: spec.compile(device_target(0).name), specs))
