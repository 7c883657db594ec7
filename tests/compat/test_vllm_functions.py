"""``fp4rt.compat.vllm`` does what vLLM's own tests of these functions ask for, and fails as vLLM fails."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from fp4rt.compat import vllm  # noqa: E402
from fp4rt.format import E2M1, E4M3  # noqa: E402
from fp4rt.layout import LAYOUTS, ceil_div, round_up  # noqa: E402
from tests.compat.golden_cases import NAMES, golden_cases  # noqa: E402
from tests.cpu.comparison import assert_same_bits  # noqa: E402
from tests.golden.vectors import GOLDEN, magnitudes  # noqa: E402

DTYPES = [torch.float16, torch.bfloat16]
SHAPES = [(128, 64), (128, 128), (256, 64), (256, 128)]
PRODUCTS = [(128, 128, 128), (128, 256, 256), (150, 128, 128), (128, 128, 192), (256, 128, 128), (1, 128, 256)]
PRODUCTS += [(2, 128, 128), (3, 128, 192), (1, 32, 32)]
PADDED_SHAPES = [(m, n) for m in (90, 128, 150) for n in (48, 64, 80, 128)]


def normal(m: int, n: int, dtype: Any, device: str, seed: int = 42) -> Any:
    return torch.randn(m, n, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def encode_scale(x: Any) -> Any:
    return 448.0 * 6.0 / x.abs().max().float()


def values(packed: Any) -> Any:
    """fp32 values of packed codes, the low nibble first."""
    table = torch.from_numpy(E2M1.values.copy())
    packed = packed.cpu()
    codes = torch.stack((packed & 0xF, packed >> 4), dim=-1).long()
    return table[codes].reshape(packed.shape[0], -1)


def linear_scales(scales: Any, layout: str, m: int, columns: int) -> Any:
    """fp32 row-major scales (m, columns)."""
    rows = LAYOUTS[layout].unpack(scales.cpu().view(torch.uint8).numpy(), m, columns)
    return torch.from_numpy(E4M3.values[rows])


def reference(x: Any, scale: Any) -> tuple[Any, Any]:
    """The formula of vLLM's test: values of the codes, and the block scales, both in fp32 on the host."""
    x, scale = x.cpu(), scale.cpu()
    m, n = x.shape
    blocks = x.float().reshape(m, n // 16, 16)
    sixth = torch.tensor(1.0 / 6.0, dtype=torch.float32)
    block_scale = (scale * (blocks.abs().amax(-1, keepdim=True) * sixth)).to(torch.float8_e4m3fn).float()
    inverse = block_scale * (1.0 / scale)
    factor = torch.where(inverse == 0, torch.zeros(()), 1.0 / inverse)
    scaled = (blocks * factor).clamp(-6.0, 6.0).reshape(m, n)
    grid = torch.from_numpy(E2M1.values[:8].copy())
    position = scaled.abs()
    lower = torch.searchsorted(grid, position, right=True).clamp(max=8) - 1
    upper = (lower + 1).clamp(max=7)
    middle = (grid[lower] + grid[upper]) / 2
    up = (position > middle) | ((position == middle) & (lower % 2 == 1))
    return grid[torch.where(up, upper, lower)] * torch.sign(scaled), block_scale.squeeze(-1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES + PADDED_SHAPES, ids=str)
def test_codes_and_swizzled_scales_follow_the_formula(device: str, shape: tuple[int, int], dtype: Any) -> None:
    m, n = shape
    x = normal(m, n, dtype, device)
    scale = encode_scale(x)
    out, out_scale = vllm.scaled_fp4_quant(x, scale)
    expected, expected_scale = reference(x, scale)
    assert (out.dtype, tuple(out.shape)) == (torch.uint8, (m, n // 2))
    assert (out_scale.dtype, tuple(out_scale.shape)) == (
        torch.float8_e4m3fn,
        (round_up(m, 128), round_up(n // 16, 4)),
    )
    assert torch.equal(values(out), expected)
    assert torch.equal(linear_scales(out_scale, "128x4", m, n // 16), expected_scale)
    assert (out.device.type, out_scale.device.type) == (device, device)


@pytest.mark.parametrize("shape", PADDED_SHAPES, ids=str)
def test_row_major_scales_have_no_padding(device: str, shape: tuple[int, int]) -> None:
    m, n = shape
    x = normal(m, n, torch.float16, device)
    out, out_scale = vllm.scaled_fp4_quant(x, encode_scale(x), is_sf_swizzled_layout=False)
    expected, expected_scale = reference(x, encode_scale(x))
    assert tuple(out_scale.shape) == (m, n // 16)
    assert torch.equal(values(out), expected)
    assert torch.equal(out_scale.cpu().float(), expected_scale)


@pytest.mark.parametrize("layout", ["swizzled", "linear", "trtllm"])
@pytest.mark.parametrize("shape", [(128, 48), (128, 80), (150, 48), (150, 80), (64, 7152), (7, 48), (32, 80)], ids=str)
def test_padded_columns_are_code_0_and_scale_0_in_every_layout(
    device: str, shape: tuple[int, int], layout: str
) -> None:
    m, n = shape
    padded_n = round_up(n, 32) if round_up(n, 32) != n else n + 32
    x = normal(m, n, torch.bfloat16, device)
    arguments = {"is_sf_swizzled_layout": layout != "linear", "backend": "trtllm" if layout == "trtllm" else "none"}
    name = "linear" if layout == "linear" else "8x4" if layout == "trtllm" and m <= 32 else "128x4"
    plain, plain_scale = vllm.scaled_fp4_quant(x, encode_scale(x), **arguments)
    out, out_scale = vllm.scaled_fp4_quant(x, encode_scale(x), padded_n=padded_n, **arguments)
    assert tuple(out.shape) == (m, padded_n // 2)
    assert torch.equal(out[:, : n // 2], plain)
    assert not out[:, n // 2 :].any()
    scales = out_scale.cpu().view(torch.uint8).numpy()
    assert scales.shape == LAYOUTS[name].shape(m, padded_n // 16)
    valid = np.zeros(scales.size, bool)
    valid[LAYOUTS[name].offsets(m, padded_n // 16)[:, : n // 16]] = True
    assert not scales.reshape(-1)[~valid].any()
    ours = LAYOUTS[name].unpack(scales, m, padded_n // 16)[:, : n // 16]
    assert np.array_equal(ours, LAYOUTS[name].unpack(plain_scale.cpu().view(torch.uint8).numpy(), m, n // 16))


def test_trtllm_takes_8x4_up_to_32_rows_whatever_the_flag_says(device: str) -> None:
    for m, flag, shape in ((32, True, (32, 4)), (32, False, (32, 4)), (33, True, (128, 4)), (33, False, (33, 4))):
        x = normal(m, 64, torch.float16, device)
        _, scales = vllm.scaled_fp4_quant(x, encode_scale(x), flag, backend="flashinfer-trtllm")
        assert tuple(scales.shape) == shape


def test_the_8x4_route_has_the_same_values(device: str) -> None:
    x = normal(13, 80, torch.bfloat16, device)
    out, scales = vllm.scaled_fp4_quant(x, encode_scale(x), backend="trtllm")
    expected, expected_scale = reference(x, encode_scale(x))
    assert torch.equal(values(out), expected)
    assert torch.equal(linear_scales(scales, "8x4", 13, 5), expected_scale)
    data, bytes_ = vllm.flashinfer_quant_nvfp4_8x4_sf_layout(x, encode_scale(x))
    assert torch.equal(data, out)
    assert torch.equal(bytes_, scales.view(torch.uint8))


def test_any_number_of_dimensions_is_flattened_to_rows(device: str) -> None:
    x = normal(6, 64, torch.float16, device)
    whole = vllm.scaled_fp4_quant(x, encode_scale(x))
    parts = vllm.scaled_fp4_quant(x.reshape(2, 3, 64), encode_scale(x).reshape(1))
    row = vllm.scaled_fp4_quant(x[0], encode_scale(x))
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(whole, parts, strict=True))
    assert tuple(row[0].shape) == (1, 32)
    assert torch.equal(row[0][0], whole[0][0])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_golden_vectors_bit_for_bit(device: str, name: str, dtype: str) -> None:
    for what, x, scale, packed, recorded in golden_cases(name, dtype, device):
        out, swizzled = vllm.scaled_fp4_quant(x, scale)
        plain, linear = vllm.scaled_fp4_quant(x, scale, is_sf_swizzled_layout=False)
        data, small = vllm.flashinfer_quant_nvfp4_8x4_sf_layout(x, scale)
        for codes in (out, plain, data):
            assert_same_bits(magnitudes(codes.cpu().numpy()), magnitudes(packed), f"{what}, magnitudes")
        for layout, scales in (("128x4", swizzled), ("linear", linear), ("8x4", small)):
            assert_same_bits(scales.cpu().view(torch.uint8).numpy(), recorded[layout], f"{what}, scales in {layout}")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, g: vllm.scaled_fp4_quant(x[0, 0], g), "input.ndim needs to be >= 1"),
        (lambda x, g: vllm.scaled_fp4_quant(x[:, :50], g), "last dim has to be multiple of 16, but got 50"),
        (lambda x, g: vllm.scaled_fp4_quant(x.float(), g), "needs to be fp16 or bf16 but got torch.float32"),
        (lambda x, g: vllm.scaled_fp4_quant(x, g, padded_n=48), "padded_n must be >= n"),
        (lambda x, g: vllm.scaled_fp4_quant(x, g, padded_n=72), "multiple of 16.*pass padded_n=80"),
        (lambda x, g: vllm.scaled_fp4_experts_quant(x[0], g, g, g, 1), "input.ndim needs to be == 2, but got 1"),
        (lambda x, g: vllm.silu_and_mul_scaled_fp4_experts_quant(x[:, :33], g, g, g, 1), "input width must be even"),
        (lambda x, g: vllm.cutlass_scaled_fp4_mm(x[0], x, x, x, g, torch.float16), "must be matrices"),
        (lambda x, g: vllm.swizzle_blockscale(x), "must be torch.float8_e4m3fn"),
    ],
)
def test_what_vllm_asserts_is_an_assertion_error_here(device: str, call: Any, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        call(normal(4, 64, torch.float16, device), torch.ones(1, device=device))


def test_signatures_are_vllms() -> None:
    wanted = {
        "scaled_fp4_quant": "input input_global_scale is_sf_swizzled_layout=True backend='none' padded_n=None",
        "create_fp4_scale_tensor": "m n device is_sf_swizzled_layout",
        "create_fp4_output_tensors": "m n device is_sf_swizzled_layout padded_n=None",
        "cutlass_scaled_fp4_mm": "a b block_scale_a block_scale_b alpha out_dtype",
        "cutlass_scaled_mm_supports_fp4": "cuda_device_capability",
        "cutlass_fp4_moe_mm": (
            "out_tensors a_tensors b_tensors a_scales b_scales alphas problem_sizes expert_offsets sf_offsets"
        ),
        "scaled_fp4_experts_quant": "input_tensor input_global_scale expert_offsets blockscale_offsets topk",
        "silu_and_mul_scaled_fp4_experts_quant": (
            "input_tensor input_global_scale expert_offsets blockscale_offsets topk"
        ),
        "flashinfer_scaled_fp4_mm": (
            "a b block_scale_a block_scale_b alpha out_dtype backend block_size=16 use_nvfp4=True"
        ),
    }
    for name, parameters in wanted.items():
        found = inspect.signature(getattr(vllm, name)).parameters.values()
        spelled = " ".join(p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in found)
        assert spelled == parameters, name


# ---- buffers


def test_output_tensors_have_vllms_shapes_and_dtypes(device: str) -> None:
    swizzled = vllm.create_fp4_scale_tensor(150, 80, torch.device(device), True)
    assert (swizzled.dtype, tuple(swizzled.shape)) == (torch.int32, (256, 2))
    assert not swizzled.any()  # its padding may never be written
    plain = vllm.create_fp4_scale_tensor(150, 80, torch.device(device), False)
    assert (plain.dtype, tuple(plain.shape)) == (torch.uint8, (150, 5))


ALLOCATIONS = [(32, 4096, None), (128, 4096, None), (1, 64, None), (127, 1024, None), (256, 16384, None), (150, 80, 96)]


@pytest.mark.parametrize("is_swizzled", [True, False])
@pytest.mark.parametrize(("m", "n", "padded_n"), ALLOCATIONS)
def test_output_tensors_are_those_of_the_quantization(
    device: str, m: int, n: int, padded_n: int | None, is_swizzled: bool
) -> None:
    codes, scales = vllm.create_fp4_output_tensors(m, n, torch.device(device), is_swizzled, padded_n)
    x = normal(m, n, torch.bfloat16, device)
    out, out_scale = vllm.scaled_fp4_quant(x, torch.ones(1, device=device), is_swizzled, padded_n=padded_n)
    assert (codes.dtype, codes.shape) == (out.dtype, out.shape)
    assert scales.view(torch.float8_e4m3fn).shape == out_scale.shape


def test_every_byte_is_written_whatever_the_memory_held(device: str) -> None:
    """The fault of the original: stale bytes in the swizzled padding became scale factors."""
    x = normal(3, 48, torch.float16, device)
    clean = vllm.scaled_fp4_quant(x, encode_scale(x), padded_n=64)
    for _ in range(5):
        stale = [torch.full((512,), 0x7F, dtype=torch.uint8, device=device) for _ in range(20)]
        del stale
        again = vllm.scaled_fp4_quant(x, encode_scale(x), padded_n=64)
        assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(clean, again, strict=True))


# ---- products


def quantized(
    m: int, k: int, dtype: Any, device: str, seed: int, padded_k: int | None = None
) -> tuple[Any, Any, Any, Any]:
    """(codes, scales, encode scale, float64 values on the host)."""
    x = normal(m, k, dtype, device, seed)
    scale = encode_scale(x)
    codes, scales = vllm.scaled_fp4_quant(x, scale, padded_n=padded_k)
    k = padded_k or k
    blocks = linear_scales(scales, "128x4", m, k // 16).double() / scale.cpu().double()
    exact = values(codes).double().reshape(m, k // 16, 16) * blocks.unsqueeze(-1)
    return codes, scales, scale, exact.reshape(m, k)


def assert_product(out: Any, a: Any, b: Any) -> None:
    """``out`` is a @ b.T up to k fp32 additions, three roundings around alpha, and the one to the output dtype."""
    exact = a @ b.t()
    rounding = 2.0**-11 if out.dtype == torch.float16 else 2.0**-8
    bound = (a.shape[1] + 3) * 2.0**-24 * (a.abs() @ b.abs().t()) + exact.abs() * rounding * (1 + 2.0**-20) + 2.0**-24
    assert ((out.cpu().double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", PRODUCTS, ids=str)
def test_the_product_is_that_of_the_dequantized_operands(device: str, shape: tuple[int, int, int], dtype: Any) -> None:
    m, n, k = shape
    a, a_scale, a_global, a_exact = quantized(m, k, dtype, device, 1)
    b, b_scale, b_global, b_exact = quantized(n, k, dtype, device, 2)
    alpha = 1.0 / (a_global * b_global)
    out = vllm.cutlass_scaled_fp4_mm(a, b, a_scale, b_scale, alpha, dtype)
    assert (out.dtype, tuple(out.shape)) == (dtype, (m, n))
    assert_product(out, a_exact, b_exact)
    assert torch.equal(vllm.flashinfer_scaled_fp4_mm(a, b, a_scale, b_scale, alpha, dtype, "cutlass"), out)


@pytest.mark.parametrize("m", [7, 32, 33])
def test_the_trtllm_route_multiplies_8x4_activations_with_shuffled_weights(device: str, m: int) -> None:
    from fp4rt.compat import flashinfer

    x, w = normal(m, 64, torch.bfloat16, device, 1), normal(64, 64, torch.bfloat16, device, 2)
    gx, gw = encode_scale(x), encode_scale(w)
    alpha = 1.0 / (gx * gw)
    expected = vllm.cutlass_scaled_fp4_mm(
        *(
            part
            for pair in zip(vllm.scaled_fp4_quant(x, gx), vllm.scaled_fp4_quant(w, gw), strict=True)
            for part in pair
        ),
        alpha,
        torch.bfloat16,
    )
    a, a_scale = vllm.scaled_fp4_quant(x, gx, backend="trtllm")
    b, b_scale = flashinfer.nvfp4_quantize(w, gw, do_shuffle=True)
    codes, linear = vllm.scaled_fp4_quant(w, gw, is_sf_swizzled_layout=False)  # as a checkpoint holds them
    assert torch.equal(flashinfer.shuffle_matrix_a(codes, 128), b)
    assert torch.equal(flashinfer.shuffle_matrix_sf_a(linear.view(torch.uint8), 128), b_scale.reshape(-1))
    out = vllm.flashinfer_scaled_fp4_mm(a, b, a_scale, b_scale, alpha, torch.bfloat16, "trtllm")
    assert torch.equal(out, expected)


def test_a_vector_is_no_operand_of_a_product() -> None:
    codes, scales, alpha = torch.zeros((4, 32), dtype=torch.uint8), torch.zeros((128, 4), dtype=torch.uint8), None
    with pytest.raises(AssertionError, match="b must be a matrix, but got 1 dimension$"):
        vllm.flashinfer_scaled_fp4_mm(codes, codes[0], scales, scales, alpha, torch.bfloat16, "cutlass")
    with pytest.raises(AssertionError, match="block_scale_a must be a matrix, but got 3 dimensions$"):
        vllm.flashinfer_scaled_fp4_mm(codes, codes, scales[None], scales, alpha, torch.bfloat16, "cutlass")


def test_a_padded_k_makes_an_unaligned_k_multipliable(device: str) -> None:
    a, a_scale, a_global, a_exact = quantized(5, 48, torch.float16, device, 1, 64)
    b, b_scale, b_global, b_exact = quantized(32, 48, torch.float16, device, 2, 64)
    alpha = 1.0 / (a_global * b_global)
    assert_product(vllm.cutlass_scaled_fp4_mm(a, b, a_scale, b_scale, alpha, torch.float16), a_exact, b_exact)
    a, a_scale, *_ = quantized(5, 48, torch.float16, device, 1)
    b, b_scale, *_ = quantized(32, 48, torch.float16, device, 2)
    with pytest.raises(RuntimeError, match=r"k to be divisible by 32, but got k = 48; quantize with padded_n=64"):
        vllm.cutlass_scaled_fp4_mm(a, b, a_scale, b_scale, alpha, torch.float16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a": lambda t: t.float()}, "a must be torch.uint8"),
        ({"a": lambda t: t[:, ::2]}, "a must be contiguous"),
        ({"block_scale_a": lambda t: t.view(torch.uint8)}, "scale_a must be torch.float8_e4m3fn"),
        ({"alpha": lambda t: t.double()}, "alpha must be torch.float32"),
        ({"alpha": lambda t: None}, r"alpha must be a torch.float32 tensor with numel\(\) = 1, but got NoneType"),
        (
            {"alpha": lambda t: t.repeat(2)},
            r"alpha must be torch.float32 with numel\(\) = 1, but got torch.float32 with 2",
        ),
        ({"b": lambda t: t[:, :16].contiguous()}, r"shapes cannot be multiplied \(5x32 and 32x16\)"),
        ({"b": lambda t: t[:30]}, "n to be divisible by 32, but got n = 30"),
        ({"block_scale_b": lambda t: t[:64]}, r"scale_b must be padded and swizzled to a shape \(128, 4\)"),
        ({"out_dtype": lambda t: torch.float32}, "unsupported output data type"),
    ],
)
def test_what_vllms_compiled_code_checks_is_a_runtime_error_here(device: str, change: Any, message: str) -> None:
    a, a_scale, a_global, _ = quantized(5, 64, torch.float16, device, 1)
    b, b_scale, b_global, _ = quantized(32, 64, torch.float16, device, 2)
    arguments: dict[str, Any] = {
        "a": a,
        "b": b,
        "block_scale_a": a_scale,
        "block_scale_b": b_scale,
        "alpha": 1.0 / (a_global * b_global),
        "out_dtype": torch.float16,
    }
    for name, function in change.items():
        arguments[name] = function(arguments[name])
    with pytest.raises(RuntimeError, match=message):
        vllm.cutlass_scaled_fp4_mm(**arguments)


# ---- experts and activations


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_experts_are_quantized_each_with_its_own_scale(device: str, dtype: str) -> None:
    golden = np.load(GOLDEN / f"moe_{dtype}.npz")
    x = torch.from_numpy(golden["x_bits"].view(np.int16)).view(getattr(torch, dtype)).to(device)
    offsets = [torch.from_numpy(golden[name]).to(device) for name in ("expert_offsets", "blockscale_offsets")]
    scales = torch.from_numpy(golden["gs_per_expert"]).to(device)
    out, out_scale = vllm.scaled_fp4_experts_quant(x, scales, *offsets, 1)
    assert out_scale.dtype == torch.float8_e4m3fn
    assert tuple(out_scale.shape) == (163840, round_up(x.shape[1] // 16, 4))
    rows = int(golden["total_rows"])
    assert np.array_equal(out.cpu().numpy(), golden["packed"])
    assert np.array_equal(out_scale[:rows].cpu().view(torch.uint8).numpy(), golden["scale_buffer"])


def test_one_expert_is_a_plain_quantization(device: str) -> None:
    x = normal(150, 80, torch.bfloat16, device)
    scale = encode_scale(x).reshape(1)
    offsets = torch.tensor([0, 150], dtype=torch.int32, device=device)
    blocks = torch.tensor([0, 256], dtype=torch.int32, device=device)
    out, out_scale = vllm.scaled_fp4_experts_quant(x, scale, offsets, blocks, 1)
    expected, expected_scale = vllm.scaled_fp4_quant(x, scale)
    assert torch.equal(out, expected)
    assert torch.equal(out_scale[:256].view(torch.uint8), expected_scale.view(torch.uint8))


def test_nan_infinity_and_negative_zero_stay_in_their_block(device: str) -> None:
    x = normal(4, 64, torch.bfloat16, device)
    x[0, 3], x[1, 20], x[2, 40], x[3, 5] = float("nan"), float("inf"), -float("inf"), -0.0
    scale = torch.full((1,), 300.0, device=device)
    offsets = torch.tensor([0, 4], dtype=torch.int32, device=device)
    out, out_scale = vllm.scaled_fp4_experts_quant(x, scale, offsets, offsets * 32, 1)
    expected, expected_scale = vllm.scaled_fp4_quant(x, scale)
    assert torch.equal(out, expected)
    assert torch.equal(out_scale[:128].view(torch.uint8), expected_scale.view(torch.uint8))


def test_rows_of_no_expert_write_no_scale(device: str) -> None:
    x = normal(10, 64, torch.float16, device)
    offsets = torch.tensor([0, 4], dtype=torch.int32, device=device)
    blocks = torch.tensor([0, 128], dtype=torch.int32, device=device)
    _, out_scale = vllm.scaled_fp4_experts_quant(x, torch.ones(1, device=device), offsets, blocks, 1)
    rows = LAYOUTS["128x4"].unpack(out_scale[:128].cpu().view(torch.uint8).numpy(), 128, 4)
    assert rows[:4].all()
    assert not rows[4:].any()


def test_rows_of_scales_that_no_expert_reaches_stay_unwritten_and_the_documentation_says_so(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: torch.full(shape, 0x7F, **options))
    x = normal(130, 48, torch.float16, device)
    offsets = torch.tensor([0, 1, 130], dtype=torch.int32, device=device)
    blocks = torch.tensor([0, 128, 384], dtype=torch.int32, device=device)
    _, scales = vllm.scaled_fp4_experts_quant(x, torch.ones(2, device=device), offsets, blocks, 1)
    reached = 256 + 128 * 2
    assert (scales.view(torch.uint8)[:reached] != 0x7F).all()
    assert (scales.view(torch.uint8)[reached:] == 0x7F).all()
    for text in (vllm.__doc__, vllm.scaled_fp4_experts_quant.__doc__):
        assert "stay unwritten" in " ".join(text.split())


@pytest.mark.parametrize("scale", [3.0, torch.ones(1).double(), torch.ones(2)], ids=["number", "float64", "two"])
def test_a_global_scale_that_the_compiled_code_does_not_take_is_a_runtime_error(scale: Any) -> None:
    x = normal(4, 64, torch.float16, "cpu")
    offsets = torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises(RuntimeError, match=r"scaled_fp4_quant: input_global_scale must be .*torch.float32"):
        vllm.scaled_fp4_quant(x, scale)
    with pytest.raises(RuntimeError, match=r"scaled_fp4_experts_quant: input_global_scale must be .*torch.float32"):
        vllm.scaled_fp4_experts_quant(x, scale, offsets, offsets, 1)


def test_experts_need_one_offset_of_scales_more_than_there_are() -> None:
    x, offsets = normal(4, 64, torch.float16, "cpu"), torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises(RuntimeError, match=r"blockscale_offsets needs numel\(\) = 2, but got 1"):
        vllm.scaled_fp4_experts_quant(x, torch.ones(1), offsets, offsets[:1], 1)


def test_more_rows_than_the_limit_name_the_variable(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_MAX_TOKENS_PER_EXPERT_FP4_MOE", "4")
    x = normal(9, 64, torch.float16, device)
    offsets = torch.tensor([0, 9], dtype=torch.int32, device=device)
    with pytest.raises(AssertionError, match=r"at most 4 \* topk = 8, but got 9.*VLLM_MAX_TOKENS_PER_EXPERT_FP4_MOE"):
        vllm.scaled_fp4_experts_quant(x, torch.ones(1, device=device), offsets, offsets, 2)


@pytest.mark.parametrize("limit", ["256", "300"])
def test_a_low_limit_leaves_room_for_every_experts_scales(
    device: str, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    """Each expert's rows of scales are padded to 128: four of 64 rows take 512, more than the limit."""
    monkeypatch.setenv("VLLM_MAX_TOKENS_PER_EXPERT_FP4_MOE", limit)
    x = torch.full((256, 64), 6.0, dtype=torch.bfloat16, device=device)
    offsets, scale_offsets = (
        torch.arange(0, 4 * step + 1, step, dtype=torch.int32, device=device) for step in (64, 128)
    )
    _, scales = vllm.scaled_fp4_experts_quant(x, torch.ones(4, device=device), offsets, scale_offsets, 1)
    assert scales.shape[0] >= 512
    assert int((scales.view(torch.uint8) == 0x38).sum()) == 256 * 4


@pytest.mark.parametrize("limit", ["many", "-5", "0"])
def test_a_limit_that_is_none_names_the_variable(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_MAX_TOKENS_PER_EXPERT_FP4_MOE", limit)
    offsets = torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises(
        ValueError, match=f"VLLM_MAX_TOKENS_PER_EXPERT_FP4_MOE must be a positive integer, got '{limit}'"
    ):
        vllm.scaled_fp4_experts_quant(normal(4, 64, torch.float16, "cpu"), torch.ones(1), offsets, offsets, 1)


def test_gate_and_up_are_of_one_width() -> None:
    with pytest.raises(AssertionError, match="silu_and_mul_nvfp4_quant: input width must be even .*, but got 255"):
        vllm.silu_and_mul_nvfp4_quant(normal(4, 255, torch.float16, "cpu"), torch.ones(1))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_silu_is_computed_in_fp32_and_rounded_once(device: str, dtype: str) -> None:
    golden = np.load(GOLDEN / f"silu_{dtype}.npz")
    gate_up = torch.from_numpy(golden["gate_up_bits"].view(np.int16)).view(getattr(torch, dtype)).to(device)
    m, k = gate_up.shape[0], gate_up.shape[1] // 2
    scale = torch.tensor(golden["gs"], device=device)
    if device == "cpu":
        out, out_scale = vllm.silu_and_mul_nvfp4_quant(gate_up, scale)
        assert np.array_equal(out.numpy(), golden["act_fp32_once/packed"])
        rows = LAYOUTS["128x4"].unpack(out_scale.view(torch.uint8).numpy(), m, k // 16)
        assert np.array_equal(rows, golden["act_fp32_once/sf"])
    # On every device: the activation, then the plain quantization.
    activation = (torch.nn.functional.silu(gate_up[:, :k].float()) * gate_up[:, k:].float()).to(gate_up.dtype)
    expected, _ = vllm.scaled_fp4_quant(activation, scale)
    out, _ = vllm.silu_and_mul_nvfp4_quant(gate_up, scale)
    different = (out != expected).sum().item()
    assert different <= out.numel() // 1000  # exp of two libraries may differ in its last bit
    offsets = torch.tensor([0, m], dtype=torch.int32, device=device)
    experts, _ = vllm.silu_and_mul_scaled_fp4_experts_quant(gate_up, scale.reshape(1), offsets, offsets, 1)
    assert torch.equal(experts, out)


@pytest.mark.parametrize("shape", [(130, 5), (2, 130, 5)], ids=str)
def test_swizzle_blockscale_pads_with_zeros(device: str, shape: tuple[int, ...]) -> None:
    scale = torch.arange(1, np.prod(shape) + 1).reshape(shape).remainder(120).to(torch.uint8)
    result = vllm.swizzle_blockscale(scale.view(torch.float8_e4m3fn).to(device))
    assert tuple(result.shape) == (*shape[:-2], 256, 8)
    for index in range(ceil_div(scale.ndim, 2) if scale.ndim == 3 else 1):
        given = scale[index] if scale.ndim == 3 else scale
        found = result[index] if scale.ndim == 3 else result
        assert np.array_equal(found.cpu().view(torch.uint8).numpy(), LAYOUTS["128x4"].pack(given.numpy()))


def test_it_runs_on_every_architecture_from_8_0() -> None:
    assert vllm.cutlass_scaled_mm_supports_fp4(90)
    assert not vllm.cutlass_scaled_mm_supports_fp4(75)


def test_the_functions_go_through_a_full_graph(device: str) -> None:
    weight = normal(32, 64, torch.float16, device, 2)
    b, b_scale = vllm.scaled_fp4_quant(weight, encode_scale(weight))

    def step(x: Any, scale: Any) -> Any:
        a, a_scale = vllm.scaled_fp4_quant(x, scale)
        return vllm.cutlass_scaled_fp4_mm(a, b, a_scale, b_scale, 1.0 / scale, torch.float16)

    x, scale = normal(5, 64, torch.float16, device), torch.full((1,), 100.0, device=device)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, scale), step(x, scale))
