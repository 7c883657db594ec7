"""``fp4rt.compat.flashinfer`` does what FlashInfer's own tests of these functions ask for, and fails as it fails."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import fp4rt  # noqa: E402
from fp4rt.compat import flashinfer  # noqa: E402
from fp4rt.compat.flashinfer import SfLayout  # noqa: E402
from fp4rt.layout import LAYOUTS, round_up  # noqa: E402
from tests.compat.golden_cases import NAMES as GOLDEN_NAMES  # noqa: E402
from tests.compat.golden_cases import golden_cases  # noqa: E402
from tests.cpu.comparison import assert_same_bits  # noqa: E402
from tests.golden.vectors import magnitudes  # noqa: E402

DTYPES = [torch.float16, torch.bfloat16]
SHAPES = [(128, 64), (256, 128), (120, 64), (200, 256), (1, 64), (3, 128), (16, 1024), (512, 256)]
NAMES = {SfLayout.layout_128x4: "128x4", SfLayout.layout_8x4: "8x4", SfLayout.layout_linear: "linear"}


def normal(*shape: int, dtype: Any = torch.bfloat16, device: str = "cpu", seed: int = 42) -> Any:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def encode_scale(x: Any) -> Any:
    return 448.0 * 6.0 / x.abs().max().float()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("layout", list(SfLayout), ids=lambda layout: layout.name)
def test_quantize_is_fp4rts_in_every_layout(device: str, layout: Any, shape: tuple[int, int], dtype: Any) -> None:
    x = normal(*shape, dtype=dtype, device=device)
    scale = encode_scale(x)
    with pytest.raises(ValueError, match="sfLayout must be one of"):
        flashinfer.nvfp4_quantize(x, scale, sfLayout="x")  # type: ignore[arg-type]
    out, out_scale = flashinfer.nvfp4_quantize(x, scale, sfLayout=layout)
    expected = fp4rt.quantize(x, scale, layout=NAMES[layout])
    assert (out.dtype, out_scale.dtype) == (torch.uint8, torch.uint8)
    assert torch.equal(out, expected.data)
    assert torch.equal(out_scale, expected.scales)
    swizzled, small = layout != SfLayout.layout_linear, layout == SfLayout.layout_8x4
    again = flashinfer.fp4_quantize(x, scale, 16, False, swizzled, small)
    assert all(torch.equal(a, b) for a, b in zip(again, (out, out_scale), strict=True))


@pytest.mark.parametrize("shape", [(17, 512), (33, 1024), (1025, 1024)], ids=str)
def test_row_major_scales_have_no_row_more_than_the_matrix(device: str, shape: tuple[int, int]) -> None:
    x = normal(*shape, device=device)
    _, scales = flashinfer.fp4_quantize(x, encode_scale(x), is_sf_swizzled_layout=False)
    assert tuple(scales.shape) == (shape[0], shape[1] // 16)


@pytest.mark.parametrize("layout", list(SfLayout), ids=lambda layout: layout.name)
def test_both_backend_names_mean_the_same(device: str, layout: Any) -> None:
    x = normal(33, 128, device=device)
    pair = [flashinfer.nvfp4_quantize(x, encode_scale(x), layout, backend=name) for name in ("cuda", "cute-dsl")]
    assert all(torch.equal(a, b) for a, b in zip(*pair, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("inverse", [False, True])
def test_a_global_scale_of_another_float_dtype_is_taken_as_fp32(device: str, dtype: Any, inverse: bool) -> None:
    x = normal(384, 256, device=device) * 5
    scale = encode_scale(x).to(dtype)
    found = flashinfer.fp4_quantize(x, scale, is_global_scale_inversed=inverse)
    expected = flashinfer.fp4_quantize(x, scale.float(), is_global_scale_inversed=inverse)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert found[1].any()


@pytest.mark.parametrize("number", [0.1, 3, np.float32(0.1)], ids=["float", "int", "numpy"])
@pytest.mark.parametrize("inverse", [False, True])
def test_a_number_is_a_global_scale_of_one_element(device: str, number: Any, inverse: bool) -> None:
    x = normal(5, 64, device=device)
    tensor = torch.tensor([float(number)], device=device)
    found = flashinfer.fp4_quantize(x, number, is_global_scale_inversed=inverse)
    expected = flashinfer.fp4_quantize(x, tensor, is_global_scale_inversed=inverse)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    found, expected = (flashinfer.nvfp4_batched_quantize(x[None], scale) for scale in (number, tensor))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("scale", [[2.0], "2.0", np.ones(1, np.float32)], ids=["list", "text", "array"])
def test_a_global_scale_that_is_neither_tensor_nor_number_is_named(scale: Any) -> None:
    with pytest.raises(TypeError, match=f"must be a tensor with one element or a number, got {type(scale).__name__}"):
        flashinfer.fp4_quantize(normal(5, 64), scale)


@pytest.mark.parametrize("layout", list(SfLayout), ids=lambda layout: layout.name)
def test_leading_dimensions_are_rows_and_stay_dimensions_of_the_codes(device: str, layout: Any) -> None:
    x = normal(2, 5, 64, device=device)
    out, scales = flashinfer.nvfp4_quantize(x, encode_scale(x), sfLayout=layout)
    expected, expected_scales = flashinfer.nvfp4_quantize(x.reshape(10, 64), encode_scale(x), sfLayout=layout)
    assert torch.equal(out, expected.reshape(2, 5, 32))
    assert torch.equal(scales, expected_scales)
    turned, _ = flashinfer.fp4_quantize(x.transpose(1, 2), encode_scale(x))
    assert torch.equal(turned, out.transpose(1, 2))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_golden_vectors_bit_for_bit(device: str, name: str, dtype: str) -> None:
    for what, x, scale, packed, recorded in golden_cases(name, dtype, device):
        for layout in SfLayout:
            out, scales = flashinfer.nvfp4_quantize(x, scale, sfLayout=layout)
            assert_same_bits(magnitudes(out.cpu().numpy()), magnitudes(packed), f"{what}, magnitudes")
            assert_same_bits(scales.cpu().numpy(), recorded[NAMES[layout]], f"{what}, scales in {layout.name}")


@pytest.mark.parametrize("fill", ["zeros", "maxes", "boundary"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_zeros_extremes_and_boundaries_are_handled(device: str, dtype: Any, fill: str) -> None:
    m, n = 16, 64
    row = torch.linspace(-12, 12, n // 2).repeat_interleave(2) + torch.tensor([-1e-3, 1e-3]).repeat(n // 2)
    x = {
        "zeros": torch.zeros(m, n),
        "maxes": torch.full((m, n), torch.finfo(dtype).max),
        "boundary": row.repeat(m, 1),
    }[fill]
    x = x.to(dtype).to(device)
    scale = fp4rt.global_scale(x)
    out, out_scale = flashinfer.nvfp4_quantize(x, scale)
    values = flashinfer.e2m1_and_ufp8sf_scale_to_float(out, out_scale, 1 / scale)
    assert torch.isfinite(values).all()
    if fill == "zeros":
        assert not out.any()
        assert not out_scale.any()
    if fill == "maxes":
        # 2688 / amax and its inverse are each rounded once; code and scale are exact there.
        assert torch.allclose(values, x.cpu().float(), rtol=2.0**-22, atol=0)


def test_no_global_scale_means_one_and_an_inverse_is_a_decode_scale(device: str) -> None:
    x = normal(5, 64, device=device)
    one = flashinfer.fp4_quantize(x)
    expected = fp4rt.quantize(x, 1.0)
    assert torch.equal(one[0], expected.data)
    assert torch.equal(one[1], expected.scales)
    scale = torch.full((1,), 64.0, device=device)
    inverse = flashinfer.fp4_quantize(x, 1 / scale, is_global_scale_inversed=True)
    direct = flashinfer.fp4_quantize(x, scale)
    assert all(torch.equal(a, b) for a, b in zip(inverse, direct, strict=True))


def test_a_column_major_matrix_is_quantized_along_its_columns(device: str) -> None:
    x = normal(64, 128, device=device)
    scale = encode_scale(x)
    out, out_scale = flashinfer.fp4_quantize(x.t(), scale)
    expected, expected_scale = flashinfer.fp4_quantize(x, scale)
    assert torch.equal(out, expected.t())
    assert torch.equal(out_scale, expected_scale.t())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_interleaving_equals_quantizing_swizzled(device: str, shape: tuple[int, int]) -> None:
    x = normal(*shape, device=device)
    _, linear = flashinfer.fp4_quantize(x, encode_scale(x), is_sf_swizzled_layout=False)
    _, swizzled = flashinfer.fp4_quantize(x, encode_scale(x))
    interleaved = flashinfer.block_scale_interleave(linear)
    assert (interleaved.dtype, interleaved.ndim) == (torch.uint8, 1)
    assert torch.equal(interleaved.reshape(swizzled.shape), swizzled)
    assert interleaved.device.type == device
    assert flashinfer.nvfp4_block_scale_interleave is flashinfer.block_scale_interleave


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16], ids=str)
def test_interleaving_takes_batches_and_pads_each(device: str, dtype: Any) -> None:
    scales = torch.randint(0, 256, (3, 130, 5), generator=torch.Generator().manual_seed(1)).to(dtype).to(device)
    result = flashinfer.block_scale_interleave(scales)
    assert result.shape == (3 * 256 * 8,)
    for given, found in zip(scales, result.reshape(3, 256, 8), strict=True):
        expected = LAYOUTS["128x4"].pack(given.cpu().float().numpy().astype(np.uint8))
        assert np.array_equal(found.cpu().float().numpy(), expected)


@pytest.mark.parametrize("swizzled", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_dequantizing_takes_the_decode_scale_and_returns_on_the_host(
    device: str, shape: tuple[int, int], swizzled: bool
) -> None:
    x = normal(*shape, device=device, dtype=torch.float16)
    scale = encode_scale(x)
    out, out_scale = flashinfer.fp4_quantize(x, scale, is_sf_swizzled_layout=swizzled)
    values = flashinfer.e2m1_and_ufp8sf_scale_to_float(
        out, out_scale.reshape(-1), 1 / scale, is_sf_swizzled_layout=swizzled
    )
    assert (values.dtype, tuple(values.shape), values.device.type) == (torch.float32, shape, "cpu")
    torch.testing.assert_close(values, x.cpu().float(), rtol=0.3, atol=0.5)
    unit = flashinfer.e2m1_and_ufp8sf_scale_to_float(out, out_scale, is_sf_swizzled_layout=swizzled)
    assert torch.equal(values, unit * (1 / scale).cpu())


def test_batches_are_quantized_matrix_by_matrix(device: str) -> None:
    a = normal(3, 120, 64, device=device)
    out, out_scale = flashinfer.nvfp4_batched_quantize(a, encode_scale(a))
    assert (tuple(out.shape), tuple(out_scale.shape)) == ((3, 120, 32), (3, 128 * 4))
    assert (out.dtype, out_scale.dtype) == (torch.uint8, torch.uint8)
    for index in range(3):
        data, scales = flashinfer.fp4_quantize(a[index], encode_scale(a))
        assert torch.equal(out[index], data)
        assert torch.equal(out_scale[index], scales.reshape(-1))


def test_the_shuffle_is_the_permutation_of_the_epilogue(device: str) -> None:
    rows = torch.arange(64, device=device).unsqueeze(1).repeat(1, 4).to(torch.uint8)
    wide = flashinfer.shuffle_matrix_a(rows, 128)[:, 0].tolist()
    assert wide[:8] == [0, 4, 8, 12, 16, 20, 24, 28]
    assert wide[8:10] == [1, 5]
    assert wide[32:34] == [32, 36]
    narrow = flashinfer.shuffle_matrix_a(rows, 64)[:, 0].tolist()
    assert narrow[:16] == [0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15]
    shuffled = flashinfer.shuffle_matrix_sf_a(rows, 128)
    assert torch.equal(shuffled, flashinfer.block_scale_interleave(flashinfer.shuffle_matrix_a(rows, 128)))
    with pytest.raises(AssertionError, match="multiple of 32, but got 50"):
        flashinfer.shuffle_matrix_a(rows[:50], 128)


def operands(m: int, n: int, k: int, device: str, a_layout: Any, shuffle: bool) -> tuple[Any, ...]:
    a, b = normal(m, k, device=device, seed=1), normal(n, k, device=device, seed=2)
    ga, gb = encode_scale(a), encode_scale(b)
    a_fp4, a_scale = flashinfer.nvfp4_quantize(a, ga, sfLayout=a_layout)
    b_fp4, b_scale = flashinfer.nvfp4_quantize(b, gb, do_shuffle=shuffle)
    return a, b, a_fp4, b_fp4.T, a_scale, b_scale.T, 1.0 / (ga * gb)


@pytest.mark.parametrize(
    ("m", "n", "k", "dtype", "backend", "a_layout"),
    [
        (7, 128, 256, torch.bfloat16, "trtllm", SfLayout.layout_128x4),
        (48, 256, 512, torch.bfloat16, "trtllm", SfLayout.layout_8x4),
        (13, 256, 128, torch.bfloat16, "cudnn", SfLayout.layout_128x4),
        (1, 128, 512, torch.bfloat16, "cutlass", SfLayout.layout_128x4),
        (31, 256, 256, torch.float16, "cutlass", SfLayout.layout_128x4),
        (48, 512, 128, torch.float16, "cute-dsl", SfLayout.layout_128x4),
        (3, 129, 320, torch.bfloat16, "auto", SfLayout.layout_128x4),
        (64, 512, 192, torch.bfloat16, "b12x", SfLayout.layout_128x4),
        (64, 512, 96, torch.bfloat16, "b12x", SfLayout.layout_128x4),
        (17, 128, 128, torch.float16, "cutedsl_low_latency", SfLayout.layout_128x4),
        (5, 130, 112, torch.bfloat16, "cutlass", SfLayout.layout_128x4),
    ],
)
def test_mm_fp4_points_the_way_of_the_unquantized_product(
    device: str, m: int, n: int, k: int, dtype: Any, backend: str, a_layout: Any
) -> None:
    a, b, a_fp4, b_fp4, a_scale, b_scale, alpha = operands(m, n, k, device, a_layout, backend == "trtllm")
    out = torch.empty(m, n, dtype=dtype, device=device)
    arguments = {"block_size": 16, "use_8x4_sf_layout": a_layout == SfLayout.layout_8x4, "backend": backend}
    arguments["skip_check"] = False
    result = flashinfer.mm_fp4(a_fp4, b_fp4, a_scale, b_scale, alpha, dtype, out, **arguments)
    assert result is out
    reference = (a.float() @ b.float().T).reshape(-1)
    similarity = torch.nn.functional.cosine_similarity(reference, out.float().reshape(-1), dim=0)
    assert similarity > 0.97
    fresh = flashinfer.mm_fp4(a_fp4, b_fp4, a_scale, b_scale, alpha, dtype, **arguments)
    assert torch.equal(fresh, out)
    qa = fp4rt.quantize(a, encode_scale(a))
    qb = fp4rt.quantize(b, encode_scale(b))
    assert torch.equal(fp4rt.matmul(qa, qb, out_dtype=dtype, alpha=alpha), out)


@pytest.mark.parametrize("backend", ["trtllm", "cutlass"])
def test_an_output_of_another_form_is_refused(device: str, backend: str) -> None:
    *_, a_fp4, b_fp4, a_scale, b_scale, alpha = operands(5, 128, 64, device, SfLayout.layout_128x4, backend == "trtllm")
    for out in (torch.empty(1, 128, dtype=torch.bfloat16, device=device), torch.empty(5, 128, device=device)):
        with pytest.raises((ValueError, TypeError), match="out"):
            flashinfer.mm_fp4(a_fp4, b_fp4, a_scale, b_scale, alpha, torch.bfloat16, out, backend=backend)


def test_what_is_no_matrix_or_no_batch_is_refused(device: str) -> None:
    x = torch.zeros(16, dtype=torch.bfloat16, device=device)
    with pytest.raises(AssertionError, match="but got 1 dimensions"):
        flashinfer.fp4_quantize(x, 1.0)
    for shape in ((1, 16), (0, 1, 16)):
        with pytest.raises(ValueError, match="batch >= 1, but got shape"):
            flashinfer.nvfp4_batched_quantize(x.new_zeros(shape), 1.0)


REGIMES = {
    "normal": lambda x: x,
    "tiny": lambda x: x * 1e-30,
    "large": lambda x: x * 1e5,
    "mixed_rows": lambda x: x * 10.0 ** torch.linspace(-18, 5, x.shape[0]).unsqueeze(1),
    "with_zeros": lambda x: x * (torch.arange(x.numel()).reshape(x.shape) % 3 == 0),
    "skewed": lambda x: x.sign() * x.abs() ** 6,
}


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 16, 16), (31, 64, 512), (257, 32, 64)])
def test_finite_values_of_any_size_give_finite_scales_and_one_product(
    device: str, regime: str, m: int, n: int, k: int
) -> None:
    a, b = (REGIMES[regime](normal(rows, k, dtype=torch.float32, seed=rows)).bfloat16() for rows in (m, n))
    scales = [448.0 * 6.0 / x.float().abs().max().clamp_min(1e-30) for x in (a, b)]
    a_fp4, a_scale = flashinfer.nvfp4_quantize(a.to(device), scales[0].to(device))
    b_fp4, b_scale = flashinfer.nvfp4_quantize(b.to(device), scales[1].to(device))
    for part in (a_scale, b_scale):
        assert (part < 0x7F).all()  # 0x7F is NaN, and a sign bit has no place in a scale
    alpha = (1.0 / (scales[0] * scales[1])).to(device)
    results = []
    for _ in range(2):
        out = torch.full((m, n), float("nan"), dtype=torch.bfloat16, device=device)
        flashinfer.mm_fp4(a_fp4, b_fp4.T, a_scale, b_scale.T, alpha, torch.bfloat16, out)
        results.append(out)
    assert torch.equal(*(result.view(torch.int16) for result in results))
    if regime in ("normal", "with_zeros"):
        assert results[0].isfinite().all()
        assert results[0].any()


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 8, 24, 128, 256])
def test_a_product_into_out_makes_no_second_result(m: int) -> None:
    n, k = 8192, 1024
    *_, a_fp4, b_fp4, a_scale, b_scale, alpha = operands(m, n, k, "cuda", SfLayout.layout_128x4, False)
    out = torch.empty(m, n, dtype=torch.bfloat16, device="cuda")
    for _ in range(2):  # the first call makes what later ones reuse
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        flashinfer.mm_fp4(a_fp4, b_fp4, a_scale, b_scale, alpha, out=out, backend="cutlass")
        torch.cuda.synchronize()
        transient = torch.cuda.max_memory_allocated() - before
    assert transient < 1 << 16


def test_an_out_that_does_not_fit_is_refused_and_not_written(device: str) -> None:
    *_, a_fp4, b_fp4, a_scale, b_scale, alpha = operands(5, 64, 64, device, SfLayout.layout_128x4, False)
    wide = torch.full((5, 128), 7.0, dtype=torch.bfloat16, device=device)
    for out in (wide.half()[:, :64].contiguous(), wide[:, :64], wide):
        kept = out.clone()
        with pytest.raises(ValueError, match="needs out|out must be"):
            flashinfer.mm_fp4(a_fp4, b_fp4, a_scale, b_scale, alpha, torch.bfloat16, out)
        assert torch.equal(out, kept)


def test_float8_scales_native_fp4_and_no_alpha_are_taken(device: str) -> None:
    *_, a_fp4, b_fp4, a_scale, b_scale, alpha = operands(5, 64, 64, device, SfLayout.layout_128x4, False)
    plain = flashinfer.mm_fp4(a_fp4, b_fp4, a_scale, b_scale, alpha)
    float8 = flashinfer.mm_fp4(
        a_fp4, b_fp4, a_scale.view(torch.float8_e4m3fn), b_scale.T.view(torch.float8_e4m3fn).T, alpha
    )
    assert torch.equal(plain, float8)
    unscaled = flashinfer.mm_fp4(a_fp4, b_fp4, a_scale, b_scale)
    ones = flashinfer.mm_fp4(a_fp4, b_fp4, a_scale, b_scale, torch.ones(1, device=device))
    assert torch.equal(unscaled, ones)
    if hasattr(torch, "float4_e2m1fn_x2"):
        native = flashinfer.mm_fp4(
            a_fp4.view(torch.float4_e2m1fn_x2), b_fp4.T.view(torch.float4_e2m1fn_x2).T, a_scale, b_scale, alpha
        )
        assert torch.equal(plain, native)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a": lambda t: t[0]}, "accepts 2d tensors"),
        ({"b": lambda t: t[:, :16].T}, "K dimension mismatch"),
        ({"b": lambda t: t[:, :32].T}, r"b must be column-major, got strides \(32, 1\).*; pass b.t\(\) of"),
        ({"b_descale": lambda t: t.T}, r"b_descale must be column-major, got strides \(4, 1\).*pass b_descale.t\(\)"),
        ({"a": lambda t: t.to(torch.int8)}, "float4_e2m1fn_x2 packed into uint8"),
        ({"a_descale": lambda t: t.to(torch.int8)}, "float8_e4m3fn or uint8"),
        ({"a_descale": lambda t: t[:64]}, r"a_descale in layout 128x4 must be \(128, 4\)"),
        ({"alpha": lambda t: t.double()}, "alpha must be a float tensor"),
        ({"alpha": lambda t: t.repeat(2)}, "alpha must be a scalar"),
        ({"out_dtype": lambda t: torch.float32}, "unsupported output dtype"),
        ({"block_size": lambda t: 32}, "nvfp4 only supports block_size = 16"),
        ({"use_nvfp4": lambda t: False}, "mxfp4 only supports block_size = 32"),
        ({"use_8x4_sf_layout": lambda t: True}, "only trtllm supports the 8x4"),
        ({"backend": lambda t: "trtllm", "out_dtype": lambda t: torch.float16}, "only torch.bfloat16"),
        ({"backend": lambda t: "magic"}, "unknown backend 'magic'"),
    ],
)
def test_what_mm_fp4_refuses_is_a_value_error(device: str, change: Any, message: str) -> None:
    *_, a_fp4, b_fp4, a_scale, b_scale, alpha = operands(5, 64, 64, device, SfLayout.layout_128x4, False)
    arguments: dict[str, Any] = {
        "a": a_fp4,
        "b": b_fp4,
        "a_descale": a_scale,
        "b_descale": b_scale,
        "alpha": alpha.reshape(1),
        "out_dtype": torch.bfloat16,
        "block_size": 16,
        "use_8x4_sf_layout": False,
        "backend": "cutlass",
        "use_nvfp4": True,
    }
    for name, function in change.items():
        arguments[name] = function(arguments[name])
    with pytest.raises(ValueError, match=message):
        flashinfer.mm_fp4(**arguments)


def test_other_recipes_are_not_implemented_and_say_so() -> None:
    x, one = normal(4, 64), torch.ones(1)
    with pytest.raises(NotImplementedError, match="can only be 16 or 32, got 8"):
        flashinfer.fp4_quantize(x, one, 8)
    with pytest.raises(NotImplementedError, match="only NVFP4"):
        flashinfer.fp4_quantize(x, one, 32, True)
    with pytest.raises(NotImplementedError, match="float16 and bfloat16, but got"):
        flashinfer.fp4_quantize(x.float(), one)
    with pytest.raises(NotImplementedError, match="only NVFP4"):
        flashinfer.e2m1_and_ufp8sf_scale_to_float(x, x, one, 16, 0)
    with pytest.raises(NotImplementedError, match="per-token"):
        flashinfer.nvfp4_quantize(x, one, per_token_activation=True)
    *_, a, b, a_scale, b_scale, _ = operands(4, 64, 64, "cpu", SfLayout.layout_128x4, False)
    with pytest.raises(NotImplementedError, match="MXFP4"):
        flashinfer.mm_fp4(a, b, a_scale, b_scale, block_size=32, use_nvfp4=False)


def test_what_flashinfer_asserts_is_an_assertion_error() -> None:
    x, one = normal(4, 72), torch.ones(1)
    with pytest.raises(AssertionError, match="multiple of 16, but got 72"):
        flashinfer.fp4_quantize(x, one)
    with pytest.raises(AssertionError, match="do_shuffle needs layout_128x4"):
        flashinfer.nvfp4_quantize(normal(32, 64), one, SfLayout.layout_8x4, do_shuffle=True)
    with pytest.raises(AssertionError, match="uint8 or bfloat16, but got"):
        flashinfer.block_scale_interleave(torch.ones(4, 4))
    with pytest.raises(ValueError, match="goes with per_token_activation=True only"):
        flashinfer.nvfp4_quantize(normal(4, 64), one, expanded_idx_to_permuted_idx=torch.arange(4))
    with pytest.raises(ValueError, match="unknown backend 'triton'"):
        flashinfer.fp4_quantize(normal(4, 64), one, backend="triton")


def test_signatures_begin_as_flashinfers() -> None:
    wanted = {
        "fp4_quantize": "input global_scale sf_vec_size sf_use_ue8m0 is_sf_swizzled_layout is_sf_8x4_layout",
        "nvfp4_quantize": "a a_global_sf sfLayout do_shuffle sf_vec_size enable_pdl backend",
        "block_scale_interleave": "unswizzled_sf",
        "e2m1_and_ufp8sf_scale_to_float": (
            "e2m1_tensor ufp8_scale_tensor global_scale_tensor sf_vec_size ufp8_type is_sf_swizzled_layout"
        ),
        "mm_fp4": (
            "a b a_descale b_descale alpha out_dtype out block_size use_8x4_sf_layout backend use_nvfp4 enable_pdl"
        ),
        "nvfp4_batched_quantize": "a a_global_sf sf_vec_size",
        "scaled_fp4_grouped_quantize": "a mask a_global_sf",
        "silu_and_mul_scaled_nvfp4_experts_quantize": "a mask a_global_sf",
        "silu_and_mul_nvfp4_quantize": (
            "input global_scale sf_vec_size is_sf_swizzled_layout is_sf_8x4_layout enable_pdl"
        ),
        "group_gemm_nvfp4_nt_groupwise": (
            "a b a_scale b_scale m_indptr alpha tile_m tile_n tile_k swap_ab out out_dtype"
        ),
        "grouped_gemm_nt_masked": ("lhs rhs out masked_m ab_dtype sf_dtype c_dtype sf_vec_size dst_signals sm_count"),
        "shuffle_matrix_a": "input_tensor epilogue_tile_m",
        "shuffle_matrix_sf_a": "input_tensor epilogue_tile_m num_elts_per_sf",
    }
    for name, parameters in wanted.items():
        assert " ".join(inspect.signature(getattr(flashinfer, name)).parameters).startswith(parameters), name
    assert [(layout.name, layout.value) for layout in SfLayout] == [
        ("layout_128x4", 0),
        ("layout_8x4", 1),
        ("layout_linear", 2),
    ]


def test_backends_are_asked_for_by_name_and_capability() -> None:
    assert flashinfer.mm_fp4.is_backend_supported("cutlass", 90)
    assert not flashinfer.mm_fp4.is_backend_supported("cutlass", 75)
    assert not flashinfer.mm_fp4.is_backend_supported("magic", 100)


def test_padded_shapes_hold_where_the_block_columns_are_no_multiple_of_four(device: str) -> None:
    x = normal(20, 48, device=device)
    _, scales = flashinfer.nvfp4_quantize(x, encode_scale(x))
    assert tuple(scales.shape) == (round_up(20, 128), 4)


def test_the_package_finds_its_adapters_and_names_them() -> None:
    import fp4rt.compat

    assert fp4rt.compat.flashinfer is flashinfer
    with pytest.raises(AttributeError, match="it has flashinfer, vllm"):
        _ = fp4rt.compat.tensorrt
