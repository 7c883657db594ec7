"""What breaks products elsewhere: poisoned padding, odd addresses, tall matrices, empty ones, busy cards."""

from __future__ import annotations

import numpy as np
import pytest

import fp4rt
from tests.cuda import gemm_cases as cases

pytestmark = pytest.mark.gpu

REPEATS = 1000


@pytest.fixture
def rng():
    return np.random.default_rng(21)


@pytest.mark.parametrize("layout", ["linear", "128x4", "8x4"])
@pytest.mark.parametrize("k, padded", [(80, 80), (112, 256), (50, 64), (33, 128)])
def test_poisoned_padding_changes_no_bit(layout, k, padded, rng):
    """Scales of padding 0x7F (NaN) or 0x7E (448), data 0xFF (-6 twice), the rest of a partial block included."""
    n = 70
    for kind in cases.KINDS:
        for m in (5, 40, 200):
            found = {}
            for padding in ((0, 0), (0x7F, 0xFF), (0x7E, 0xFF)):
                seeded = np.random.default_rng([k, m])
                options = {"layout": layout, "padded": padded, "padding": padding}
                b = cases.quantized(seeded, n, k, **options)
                a = cases.activations(seeded, m, k, kind, **(options if kind == "nvfp4" else {}))
                for kernel, form in cases.ways():
                    if cases.takes(kernel, m, a):
                        got = cases.bits(cases.run(a, b, kernel, form))
                        first = found.setdefault((kernel, form), got)
                        assert np.array_equal(got, first), f"{kind} m={m} {kernel} {form} padding {padding}"


@pytest.mark.parametrize("offset", [1, 2, 4, 8])
def test_operands_at_odd_addresses(offset, rng):
    n, k = 40, 144
    for kind in cases.KINDS:
        for m in (3, 33):
            b = cases.quantized(rng, n, k, "linear", offset=offset)
            options = {"offset": offset} if kind == "nvfp4" else {}
            a = cases.activations(rng, m, k, kind, **options)
            for kernel, form in cases.ways():
                if cases.takes(kernel, m):
                    cases.check(f"{kind} m={m} offset={offset}", a, b, kernel, form)
            cases.check("and once more", a, b, None, cases.PLAIN)


def test_activations_of_any_strides(rng):
    n, k = 48, 96
    b = cases.quantized(rng, n, k)
    for m in (6, 60):
        wide = cases.halves(rng, 2 * m, 2 * k + 8, "bfloat16")
        tall = cases.halves(rng, k, m, "bfloat16")
        views = {
            "rows of a wider array": lambda x, m=m: x[:m, 8 : 8 + k],
            "every second column": lambda x, m=m: x[:m, : 2 * k : 2],
            "every second row, backwards": lambda x: x[::-2, :k],
            "starting one element in": lambda x, m=m: x[:m, 1 : 1 + k],
            "one row for all": lambda x, m=m: cases.cupy().broadcast_to(x[:1, :k], (m, k)),
        }
        operands = {name: cases.Operand(view(wide.given), view(wide.values)) for name, view in views.items()}
        operands["transposed"] = cases.Operand(tall.given.T, tall.values.T)
        for name, a in operands.items():
            for form in (cases.PLAIN, cases.PREPACKED):
                cases.check(f"{name} m={m}", a, b, None, form)
            cases.check(f"{name} m={m}", a, b, "reference", cases.PLAIN)


@pytest.mark.parametrize("m", [65537, 262145])
def test_more_rows_than_a_grid_has_in_y(m, rng):
    b = cases.quantized(rng, 16, 16)
    for kind in cases.KINDS:
        a = cases.activations(rng, m, 16, kind)
        for form in (cases.PLAIN, cases.PREPACKED):
            cases.check(f"{kind} m={m}", a, b, None, form)
        cases.check(f"{kind} m={m}", a, b, "portable", cases.PLAIN)


def test_more_columns_than_a_grid_has_in_y(rng):
    n = 65537 * 16 + 5
    b = cases.quantized(rng, n, 16)
    for m in (1, 20):
        a = cases.halves(rng, m, 16, "float16")
        for form in (cases.PLAIN, cases.PREPACKED):
            cases.check(f"m={m}", a, b, None, form)


@pytest.mark.parametrize("layout", ["linear", "128x4", "8x4"])
def test_no_tokens_give_an_empty_result(layout):
    xp = cases.cupy()
    b = fp4rt.quantize(xp.ones((8, 64), np.float16), layout=layout)
    for a in (fp4rt.quantize(xp.ones((0, 64), np.float16), layout=layout), xp.ones((0, 64), np.float16)):
        for weight in (b, fp4rt.prepack(b)):
            found = fp4rt.matmul(a, weight, out_dtype="float16")
            assert found.shape == (0, 8)
            assert found.dtype == np.float16


@pytest.mark.parametrize("layout", ["linear", "128x4", "8x4"])
def test_zero_tensors_multiply_to_zero(layout, rng):
    xp = cases.cupy()
    a = fp4rt.quantize(xp.zeros((2, 32), np.float32), layout=layout)
    zero = fp4rt.quantize(xp.zeros((5, 32), np.float32), layout=layout)
    b = fp4rt.quantize(xp.asarray(rng.standard_normal((5, 32)), np.float32), layout=layout)
    for left, right in ((a, b), (a, zero), (xp.ones((2, 32), np.float16), zero)):
        for weight in (right, fp4rt.prepack(right)):
            assert not cases.bits(fp4rt.matmul(left, weight, out_dtype="float32")).any()


def test_a_nan_scale_of_one_expert_leaves_the_other_alone():
    """Two experts in one buffer: each tensor's padding rows lie between them."""
    xp = cases.cupy()
    token = xp.full((1, 64), 6, np.float16)
    weights = [xp.full((130, 64), value, np.float32) for value in (6, 3)]
    experts = [fp4rt.quantize(w, 1.0) for w in weights]
    joined = xp.concatenate([e.scales.reshape(-1) for e in experts])
    assert int(joined[1024]) == 0x30
    assert int(joined[520]) == 0
    joined[0] = 0x7F
    for index, wanted in ((0, 2304), (1, 1152)):
        scales = joined[1024 * index : 1024 * (index + 1)].reshape(256, 4)
        b = fp4rt.QuantizedTensor(experts[index].data, scales, experts[index].global_scale, (130, 64), "128x4")
        for weight in (b, fp4rt.prepack(b)):
            got = fp4rt.matmul(token, weight, out_dtype="float32").get()
            assert np.isnan(got[0, 0]) == (index == 0)
            assert (got[0, 1 - index :] == wanted).all()


def test_the_same_bits_a_thousand_times_beside_a_busy_stream(rng):
    """Every run of every kernel, while another stream keeps the multiprocessors and the memory busy."""
    xp = cases.cupy()
    n, k = 2064, 2064
    b = cases.quantized(rng, n, k)
    noise, quiet = xp.cuda.Stream(non_blocking=True), xp.cuda.Stream(non_blocking=True)
    big = xp.ones((1 << 24,), np.float32)
    for kind, m in (("bfloat16", 3), ("nvfp4", 16), ("float16", 90), ("nvfp4", 200)):
        a = cases.activations(rng, m, k, kind)
        for kernel, form in cases.ways():
            if kernel == "reference" or not cases.takes(kernel, m):
                continue
            weight = cases.Operand(b.weight(form), b.values)
            xp.cuda.Device().synchronize()
            out = xp.empty((m, n), np.float32)
            cases.run(a, weight, kernel, out=out, stream=quiet)
            quiet.synchronize()
            first, differing = out.copy(), xp.zeros((), np.int64)
            xp.cuda.Device().synchronize()
            for repeat in range(REPEATS if m == 3 else REPEATS // 5):
                if repeat % 8 == 0:
                    with noise:
                        big *= np.float32(1.0)
                cases.run(a, weight, kernel, out=out, stream=quiet)
                if repeat % 10 == 9:
                    with quiet:
                        differing += (out.view(np.uint32) != first.view(np.uint32)).sum()
            quiet.synchronize()
            noise.synchronize()
            assert int(differing) == 0, f"{kind} m={m} {kernel} {form}: {int(differing)} elements differed"


def test_shared_tiles_and_fast_stages_give_the_same_bits_every_time(rng):
    """Narrow tiles pass their stages on fastest; sums of several workers are added in one order."""
    from fp4rt.cuda.gemm.hopper import PrefillTile, SmallTile
    from fp4rt.cuda.gemm.matmul import launch

    if not cases.has_hopper():
        pytest.skip("the Hopper kernels need sm_90a")
    xp = cases.cupy()
    own_rows = {"k_cluster": 2, "own_groups": 3}
    noise, quiet = xp.cuda.Stream(non_blocking=True), xp.cuda.Stream(non_blocking=True)
    big = xp.ones((1 << 24,), np.float32)
    for tile, m, n, k in (
        (PrefillTile(64, 2, 16, 8, 3, 8), 640, 4096, 4096),
        (PrefillTile(64, 2, 16, 8, 3, 8), 128, 8192, 28672),
        (PrefillTile(128, 1, 8, 4, 2, 4, stage_chunks=2), 600, 8192, 4096),
        (PrefillTile(256, 1, 8, 4, 2, 4, cluster=2), 700, 8192, 4096),
        (PrefillTile(128, 1, 12, 6, 2, 4, row_groups=3), 1200, 6144, 8192),
        (SmallTile(8, 4, 1, 5, 1, 2, 1, 4, k_cluster=4), 64, 1280, 8192),
        (SmallTile(8, 16, 1, 3, 4, 1, 1, 2, **own_rows), 64, 28672, 8192),
        (SmallTile(2, 16, 1, 4, 4, 1, 1, 4, **own_rows), 16, 28672, 8192),
    ):
        a, b = cases.halves(rng, m, k, "bfloat16"), cases.quantized(rng, n, k)
        plan, left, weight = cases.plan_of_tile(a, b, tile)
        assert plan.sharing.sharers > 0 or isinstance(tile, SmallTile)
        out, differing = xp.empty((m, n), np.uint16), xp.zeros((), np.int64)
        xp.cuda.Device().synchronize()
        launch(plan, left, weight, "bfloat16", None, None, out.data.ptr, quiet.ptr)
        quiet.synchronize()
        first = out.copy()
        xp.cuda.Device().synchronize()
        for repeat in range(REPEATS // 2):
            if repeat % 4 == 0:
                with noise:
                    big *= np.float32(1.0)
            launch(plan, left, weight, "bfloat16", None, None, out.data.ptr, quiet.ptr)
            with quiet:
                differing += (out != first).sum()
        quiet.synchronize()
        noise.synchronize()
        assert int(differing) == 0, f"{tile} m={m}: {int(differing)} elements differed"


def test_explain_names_kernel_tile_workspace_and_reason(rng):
    b = cases.quantized(rng, 256, 512)
    for m in (1, 300):
        for kind in cases.KINDS:
            a = cases.activations(rng, m, 512, kind)
            for weight in (b.given, b.packed):
                found = fp4rt.explain(a.given, weight)
                assert found.kernel in ("portable", "decode", "small", "prefill")
                assert found.tile
                assert found.why
                assert ("activations" in found.workspace) <= (kind == "nvfp4")


def test_measured_tiles_are_remembered(rng, tmp_path, monkeypatch):
    from fp4rt.cuda.gemm.matmul import forget_plans

    monkeypatch.setenv("FP4RT_CACHE_DIR", str(tmp_path))
    a, b = cases.halves(rng, 4, 512, "bfloat16"), cases.quantized(rng, 256, 512)
    assert "measured" not in fp4rt.explain(a.given, b.given).why
    assert "measured" in fp4rt.explain(a.given, b.given, measure=True).why
    forget_plans()
    assert "measured" in fp4rt.explain(a.given, b.given).why
    cases.check("with the measured tile", a, b, None, cases.PLAIN)
    monkeypatch.undo()
    forget_plans()


def test_what_is_missing_for_a_kernel_is_said(rng):
    from fp4rt.cuda.gemm.matmul import matmul
    from fp4rt.errors import BackendUnavailable

    a, b = cases.halves(rng, 4, 64, "bfloat16"), cases.quantized(rng, 32, 64)
    view = fp4rt.interop.view(a.given)
    with pytest.raises(BackendUnavailable, match="no kernel 'fastest'"):
        matmul(view, b.given.views(), "float32", None, None, None, 0, kernel="fastest")
    with pytest.raises(BackendUnavailable, match="reference kernel reads plain weights"):
        matmul(view, b.packed.views(), "float32", None, None, None, 0, kernel="reference")
