"""Groups of matrices: masked rows as in FlashInfer, rows sorted by expert as in vLLM; a group equals itself alone."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from fp4rt.compat import flashinfer, vllm  # noqa: E402
from fp4rt.layout import round_up  # noqa: E402
from tests.torch_graphs import captured  # noqa: E402

DTYPES = [torch.float16, torch.bfloat16]
BATCHES = [(1, 256, 128), (2, 128, 64), (3, 256, 128), (1, 120, 64), (2, 130, 80)]
NVFP4 = {"ab_dtype": "float4_e2m1fn", "sf_dtype": "float8_e4m3fn", "sf_vec_size": 16}


def normal(*shape: int, dtype: Any = torch.bfloat16, device: str = "cpu", seed: int = 42) -> Any:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def encode_scales(x: Any) -> Any:
    """One a matrix."""
    return 448.0 * 6.0 / x.abs().amax(dim=(-2, -1)).float()


def counts(*values: int, device: str) -> Any:
    return torch.tensor(values, dtype=torch.int32, device=device)


def masks(groups: int, m: int, device: str) -> Any:
    return counts(*[1 + (m - 1) * i // groups for i in range(1, groups + 1)], device=device)


def swizzled(tiles: Any, index: int) -> Any:
    """A matrix's bytes in layout 128x4, from FlashInfer's six dimensions."""
    _, _, down, _, across, _ = tiles.shape
    return tiles.permute(5, 2, 4, 0, 1, 3)[index].reshape(down * 128, across * 4).view(torch.uint8)


# ---- masked


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", BATCHES, ids=str)
@pytest.mark.parametrize("silu", [False, True])
def test_each_matrix_is_quantized_up_to_its_mask(
    device: str, shape: tuple[int, int, int], dtype: Any, silu: bool
) -> None:
    groups, m, k = shape
    given = normal(groups, m, 2 * k if silu else k, dtype=dtype, device=device)
    x = (torch.nn.functional.silu(given[..., :k].float()) * given[..., k:].float()).to(dtype) if silu else given
    mask, scales = masks(groups, m, device), encode_scales(x)
    unused = torch.arange(m, device=device) >= mask.unsqueeze(1)
    given[unused] = float("nan")
    function = flashinfer.scaled_fp4_grouped_quantize
    if silu:
        function = flashinfer.silu_and_mul_scaled_nvfp4_experts_quantize
    out, out_scale = function(given, mask, scales)
    assert (out.dtype, tuple(out.shape)) == (torch.uint8, (m, k // 2, groups))
    assert out.permute(2, 0, 1).is_contiguous()
    assert out_scale.dtype == torch.float8_e4m3fn
    assert tuple(out_scale.shape) == (32, 4, round_up(m, 128) // 128, 4, round_up(k // 16, 4) // 4, groups)
    assert out_scale.permute(5, 2, 4, 0, 1, 3).is_contiguous()
    for i in range(groups):
        alone = torch.where(unused[i].unsqueeze(1), 0, x[i])
        data, scale = flashinfer.fp4_quantize(alone, scales[i])
        # exp of two libraries may differ in its last bit
        different = int((out[..., i] != data).sum()) + int((swizzled(out_scale, i) != scale).sum())
        assert different <= (data.numel() // 1000 if silu else 0)
        assert not out[unused[i], :, i].any()


def test_the_fused_activation_is_the_activation_then_the_quantization(device: str) -> None:
    gate_up = normal(2, 5, 128, device=device)
    scale = torch.full((1,), 64.0, device=device)
    _, linear = flashinfer.silu_and_mul_nvfp4_quantize(gate_up, scale, is_sf_swizzled_layout=False)
    out, small = flashinfer.silu_and_mul_nvfp4_quantize(gate_up, scale, is_sf_8x4_layout=True)
    assert (tuple(out.shape), tuple(linear.shape), tuple(small.shape)) == ((10, 32), (10, 4), (16, 4))
    expected, expected_scale = vllm.silu_and_mul_nvfp4_quant(gate_up, scale)
    found, found_scale = flashinfer.silu_and_mul_nvfp4_quantize(gate_up, scale)
    assert torch.equal(found, expected)
    assert torch.equal(found_scale, expected_scale.view(torch.uint8))


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("with_alpha", [True, False])
def test_the_masked_product_writes_used_rows_only(device: str, name: str, with_alpha: bool) -> None:
    groups, m, n, k = 3, 70, 48, 96
    x, w = normal(groups, m, k, device=device, seed=1), normal(groups, n, k, device=device, seed=2)
    few = torch.full((groups,), 4.0, device=device)  # without alpha, fp16 holds products of small scales only
    x_scales, w_scales = (encode_scales(x), encode_scales(w)) if with_alpha else (few, few)
    mask = counts(0, 33, m, device=device)
    lhs = flashinfer.scaled_fp4_grouped_quantize(x, mask, x_scales)
    rhs = flashinfer.scaled_fp4_grouped_quantize(w, counts(n, n, n, device=device), w_scales)
    alpha = (1.0 / (x_scales * w_scales)).bfloat16().view(1, 1, groups) if with_alpha else None
    out = torch.full((groups, m, n), 7.0, dtype=getattr(torch, name), device=device).permute(1, 2, 0)
    flashinfer.grouped_gemm_nt_masked(lhs, rhs, out, mask, c_dtype=name, alpha=alpha, alpha_dtype="bfloat16", **NVFP4)
    for i, rows in enumerate(mask.tolist()):
        exact = [
            flashinfer.e2m1_and_ufp8sf_scale_to_float(part[..., i].contiguous(), swizzled(scale, i)).double()
            for part, scale in (lhs, rhs)
        ]
        factor = 1.0 if alpha is None else alpha.flatten()[i].double().item()
        product = exact[0] @ exact[1].t() * factor
        rounding = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24}[name]
        sums = exact[0].abs() @ exact[1].abs().t() * abs(factor)
        bound = (k + 3) * 2.0**-24 * sums + product.abs() * rounding * 1.001 + 2.0**-24
        assert ((out[:rows, :, i].cpu().double() - product[:rows]).abs() <= bound[:rows]).all()
        assert (out[rows:, :, i] == 7).all()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"ab_dtype": "float8_e4m3fn"}, NotImplementedError, "only NVFP4"),
        ({"sf_dtype": "float8_e8m0fnu"}, NotImplementedError, "only NVFP4"),
        ({"sf_vec_size": 32}, NotImplementedError, "only NVFP4"),
        ({"dst_signals": torch.zeros(2)}, NotImplementedError, "no dst_signals"),
        ({"c_dtype": "float16"}, ValueError, "c_dtype 'float16'"),
        ({"c_dtype": "float8_e5m2"}, ValueError, "one of float16, bfloat16, float32"),
        ({"out": torch.zeros(4, 32, 3, dtype=torch.bfloat16)}, ValueError, r"got out \(4, 32, 3\)"),
        ({"masked_m": counts(4, device="cpu")}, ValueError, r"masked_m needs numel\(\) = 2, but got 1"),
        ({"alpha": torch.ones(1)}, ValueError, r"alpha needs numel\(\) = 2, but got 1"),
        ({"alpha": torch.ones(3)}, ValueError, r"alpha needs numel\(\) = 2, but got 3"),
        ({"lhs": lambda a, s: (a, s[..., :1])}, ValueError, r"scales of lhs must be .*\(32, 4, 1, 4, 1, 2\), got"),
        ({"rhs": lambda b, s: (b, s.repeat(1, 1, 1, 1, 1, 2))}, ValueError, "scales of rhs must be"),
        ({"lhs": lambda a, s: (a.float(), s)}, ValueError, "codes of lhs must be uint8"),
    ],
)
def test_what_the_masked_product_refuses_before_it_writes(change: Any, error: Any, message: str) -> None:
    x, mask = normal(2, 4, 64), counts(4, 4, device="cpu")
    lhs = flashinfer.scaled_fp4_grouped_quantize(x, mask, encode_scales(x))
    w = normal(2, 32, 64)
    rhs = flashinfer.scaled_fp4_grouped_quantize(w, mask * 8, encode_scales(w))
    out = torch.full((4, 32, 2), 7.0, dtype=torch.bfloat16)
    arguments = {"lhs": lhs, "rhs": rhs, "out": out, "masked_m": mask, "c_dtype": "bfloat16", **NVFP4}
    for name, value in change.items():
        arguments[name] = value(*arguments[name]) if name in ("lhs", "rhs") else value
    with pytest.raises(error, match=message):
        flashinfer.grouped_gemm_nt_masked(**arguments)
    assert (out == 7).all()


def test_what_the_masked_quantization_refuses() -> None:
    x, mask, one = normal(2, 4, 72), counts(4, 4, device="cpu"), torch.ones(2)
    with pytest.raises(AssertionError, match="multiple of 16, but got 72"):
        flashinfer.scaled_fp4_grouped_quantize(x, mask, one)
    with pytest.raises(AssertionError, match=r"a_global_sf needs numel\(\) = 2, but got 1"):
        flashinfer.scaled_fp4_grouped_quantize(x[..., :64], mask, one[:1])
    with pytest.raises(AssertionError, match=r"mask needs numel\(\) = 2, but got 3"):
        flashinfer.scaled_fp4_grouped_quantize(x[..., :64], counts(4, 4, 4, device="cpu"), one)
    for function in (flashinfer.scaled_fp4_grouped_quantize, flashinfer.silu_and_mul_scaled_nvfp4_experts_quantize):
        for given in (x[0, :, :64], x[..., :64].float()):
            with pytest.raises(AssertionError, match=f"{function.__name__}: a must be float16 or bfloat16 with 3"):
                function(given, mask, one)
    with pytest.raises(AssertionError, match="multiple of 32, but got 48"):
        flashinfer.silu_and_mul_scaled_nvfp4_experts_quantize(x[..., :48], mask, one)


@pytest.mark.gpu
def test_masked_functions_are_captured_and_follow_the_mask() -> None:
    groups, m, n, k = 2, 16, 64, 128
    x, w = normal(groups, m, k, device="cuda", seed=1), normal(groups, n, k, device="cuda", seed=2)
    scales, mask, full = encode_scales(x), counts(3, 16, device="cuda"), counts(n, n, device="cuda")
    rhs = flashinfer.scaled_fp4_grouped_quantize(w, full, encode_scales(w))
    out = torch.zeros(groups, m, n, dtype=torch.bfloat16, device="cuda").permute(1, 2, 0)

    def step() -> None:
        lhs = flashinfer.scaled_fp4_grouped_quantize(x, mask, scales)
        flashinfer.grouped_gemm_nt_masked(lhs, rhs, out, mask, c_dtype="bfloat16", **NVFP4)

    graph, _ = captured(step)
    for rows in ((3, 16), (16, 0), (1, 5)):
        mask.copy_(counts(*rows, device="cuda"))
        out.fill_(7)
        graph.replay()
        replayed = out.clone()
        out.fill_(7)
        step()
        assert torch.equal(replayed, out)


# ---- sorted by expert


def layer(tokens: int, topk: int, experts: int, n: int, k: int, dtype: Any, device: str) -> dict[str, Any]:
    """Rows of ``tokens`` sent to ``topk`` experts each, sorted by expert, and a weight (n, k) an expert."""
    generator = torch.Generator().manual_seed(7)
    chosen = torch.rand(tokens, experts, generator=generator).topk(topk).indices.flatten()
    rows = torch.bincount(chosen, minlength=experts)
    offsets = torch.zeros(experts + 1, dtype=torch.int32)
    offsets[1:] = rows.cumsum(0)
    scale_offsets = torch.zeros(experts + 1, dtype=torch.int32)
    scale_offsets[1:] = ((rows + 127) // 128 * 128).cumsum(0)
    x = normal(tokens, k, dtype=dtype, seed=1)[chosen.argsort(stable=True) // topk]
    sizes = torch.stack((rows, torch.full_like(rows, n), torch.full_like(rows, k)), dim=1).int()
    weights = normal(experts, n, k, dtype=dtype, device=device, seed=2)
    w_scales = encode_scales(weights)
    codes = [vllm.scaled_fp4_quant(w, g) for w, g in zip(weights, w_scales, strict=True)]
    return {
        "x": x.to(device),
        "b": torch.stack([data for data, _ in codes]),
        "b_scales": torch.stack([scales.view(torch.uint8) for _, scales in codes]).view(torch.float8_e4m3fn),
        "w_scales": w_scales,
        "sizes": sizes.to(device),
        "offsets": offsets.to(device),
        "scale_offsets": scale_offsets.to(device),
    }


def sorted_product(given: dict[str, Any], x: Any, a: Any, a_scales: Any, x_scales: Any) -> Any:
    out = torch.full((x.shape[0], given["b"].shape[1]), float("nan"), dtype=x.dtype, device=x.device)
    vllm.cutlass_fp4_moe_mm(
        out,
        a,
        given["b"],
        a_scales,
        given["b_scales"],
        1.0 / (x_scales * given["w_scales"]),
        given["sizes"],
        given["offsets"][:-1],
        given["scale_offsets"][:-1],
    )
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "topk", "experts"), [(2, 1, 40), (64, 6, 8), (200, 2, 3), (1, 1, 1)])
def test_every_expert_of_a_layer_equals_itself_alone(
    device: str, tokens: int, topk: int, experts: int, dtype: Any
) -> None:
    """The two products of a layer, with the fused activation between them; some experts have no token."""
    inter, k = 64, 96
    up = layer(tokens, topk, experts, 2 * inter, k, dtype, device)
    down = layer(tokens, topk, experts, k, inter, dtype, device)
    x_scales = torch.linspace(50.0, 500.0, experts, device=device)
    offsets, scale_offsets = up["offsets"], up["scale_offsets"]
    a, a_scales = vllm.scaled_fp4_experts_quant(up["x"], x_scales, offsets, scale_offsets, topk)
    c1 = sorted_product(up, up["x"], a, a_scales, x_scales)
    h, h_scales = vllm.silu_and_mul_scaled_fp4_experts_quant(c1, x_scales, offsets, scale_offsets, topk)
    c2 = sorted_product(down, c1, h, h_scales, x_scales)
    ends = offsets.tolist()
    for i, (begin, end) in enumerate(itertools.pairwise(ends)):
        if begin == end:
            continue
        alone, alone_scales = vllm.scaled_fp4_quant(up["x"][begin:end], x_scales[i])
        alpha = 1.0 / (x_scales[i] * up["w_scales"][i])
        first = vllm.cutlass_scaled_fp4_mm(alone, up["b"][i], alone_scales, up["b_scales"][i], alpha, dtype)
        assert torch.equal(c1[begin:end], first)
        alone, alone_scales = vllm.silu_and_mul_nvfp4_quant(first, x_scales[i])
        alpha = 1.0 / (x_scales[i] * down["w_scales"][i])
        second = vllm.cutlass_scaled_fp4_mm(alone, down["b"][i], alone_scales, down["b_scales"][i], alpha, dtype)
        assert torch.equal(c2[begin:end], second)


def test_b13_an_expert_reads_its_own_scales_and_no_other_s(device: str) -> None:
    weights = torch.stack((torch.full((160, 64), 6.0), torch.full((160, 64), 3.0))).half().to(device)
    one = torch.ones(1, device=device)
    codes = [vllm.scaled_fp4_quant(w, one) for w in weights]
    scales = torch.stack([scale.view(torch.uint8) for _, scale in codes])
    x = torch.full((2, 64), 6.0, dtype=torch.float16, device=device)
    offsets, scale_offsets = counts(0, 1, 2, device=device), counts(0, 128, 256, device=device)
    a, a_scales = vllm.scaled_fp4_experts_quant(x, one.repeat(2), offsets, scale_offsets, 1)
    given = {
        "b": torch.stack([data for data, _ in codes]),
        "b_scales": scales.view(torch.float8_e4m3fn),
        "w_scales": one.repeat(2),
        "sizes": counts(1, 160, 64, 1, 160, 64, device=device).reshape(2, 3),
        "offsets": offsets,
        "scale_offsets": scale_offsets,
    }
    out = sorted_product(given, x, a, a_scales, one.repeat(2))
    assert (out[0] == 2304).all()
    assert (out[1] == 1152).all()
    scales[0, 0, 0] = 0x7F  # a NaN of expert 0
    out = sorted_product(given, x, a, a_scales, one.repeat(2))
    assert out[0, 0].isnan()
    assert (out[1] == 1152).all()


def test_sizes_in_host_memory_give_the_same(device: str) -> None:
    given = layer(20, 2, 3, 64, 96, torch.bfloat16, device)
    scales = torch.ones(3, device=device)
    a, a_scales = vllm.scaled_fp4_experts_quant(given["x"], scales, given["offsets"], given["scale_offsets"], 2)
    on_device = sorted_product(given, given["x"], a, a_scales, scales)
    on_host = given | {name: given[name].cpu() for name in ("sizes", "offsets", "scale_offsets")}
    assert torch.equal(sorted_product(on_host, given["x"], a, a_scales, scales), on_device)


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [(4, 4, 4, 4), (128, 128), (0, 300, 4, 129)], ids=str)
def test_flashinfers_sorted_groups_equal_themselves_alone(device: str, rows: tuple[int, ...], out_dtype: Any) -> None:
    groups, n, k = len(rows), 64, 128
    indptr = counts(0, *itertools.accumulate(rows), device=device)
    x, w = normal(sum(rows), k, device=device, seed=1), normal(groups, n, k, device=device, seed=2)
    a, b, b_scales, alphas, alone = [], [], [], [], []
    a_scales = torch.zeros((sum(rows) + 127 * groups + 127) // 128 * 128, k // 16, dtype=torch.uint8, device=device)
    for i, (begin, end) in enumerate(itertools.pairwise(indptr.tolist())):
        gx, gw = torch.full((1,), 300.0, device=device), encode_scales(w[i]).reshape(1)
        data, scale = flashinfer.nvfp4_quantize(x[begin:end], gx)
        weight, weight_scale = flashinfer.nvfp4_quantize(w[i], gw)
        first = (begin + 127 * i) // 128 * 128
        a_scales[first : first + scale.shape[0]] = scale
        a.append(data)
        b.append(weight)
        b_scales.append(weight_scale)
        alphas.append(1.0 / (gx * gw))
        alone.append(flashinfer.mm_fp4(data, weight.T, scale, weight_scale.T, alphas[i], out_dtype))
    operands = (torch.cat(a), torch.stack(b), a_scales, torch.stack(b_scales), indptr)
    found = flashinfer.group_gemm_nvfp4_nt_groupwise(*operands, torch.cat(alphas), out_dtype=out_dtype)
    assert found.dtype == out_dtype
    assert torch.equal(found, torch.cat(alone))
    out = torch.empty_like(found)
    assert flashinfer.group_gemm_nvfp4_nt_groupwise(*operands, torch.cat(alphas), tile_k=256, out=out) is out
    assert torch.equal(out, found)
    ones = torch.ones(groups, device=device)
    plain = flashinfer.group_gemm_nvfp4_nt_groupwise(*operands)
    assert torch.equal(plain, flashinfer.group_gemm_nvfp4_nt_groupwise(*operands, ones))


def test_what_flashinfers_sorted_product_refuses() -> None:
    a, b = torch.zeros(8, 32, dtype=torch.uint8), torch.zeros(2, 32, 32, dtype=torch.uint8)
    scales = torch.zeros(384, 4, dtype=torch.uint8), torch.zeros(2, 128, 4, dtype=torch.uint8)
    indptr, function = counts(0, 4, 8, device="cpu"), flashinfer.group_gemm_nvfp4_nt_groupwise
    with pytest.raises(RuntimeError, match="do not fit"):
        function(a, b, *scales, indptr[:2])
    with pytest.raises(RuntimeError, match="expert 1 has rows 4 ... 9"):
        function(a, b, *scales, counts(0, 4, 9, device="cpu"))
    with pytest.raises(RuntimeError, match="expert 0 has rows 4 ... 0"):
        function(a, b, *scales, counts(4, 0, 8, device="cpu"))
    with pytest.raises(RuntimeError, match="rows of scales 128 ... 256, but there are 8 and 128"):
        function(a, b, scales[0][:128], scales[1], indptr)
    with pytest.raises(ValueError, match=r"out must be \(8, 32\)"):
        function(a, b, *scales, indptr, out=torch.zeros(8, 31, dtype=torch.float16))
    with pytest.raises(ValueError, match=r"of torch.float16, got .* of torch.bfloat16"):
        function(a, b, *scales, indptr, out=torch.zeros(8, 32, dtype=torch.bfloat16), out_dtype=torch.float16)
    out = torch.full((8, 32), 7.0, dtype=torch.bfloat16)
    for number in (1, 3):
        with pytest.raises(RuntimeError, match=rf"alpha needs numel\(\) = 2, but got {number}"):
            function(a, b, *scales, indptr, torch.ones(number), out=out)
    assert (out == 7).all()
    with pytest.raises(ValueError, match=r"alpha must be torch.float32, got torch.float64"):
        function(a, b, *scales, indptr, torch.ones(2).double())
    with pytest.raises(ValueError, match="a must be torch.uint8 .*, got torch.float32"):
        function(a.float(), b, *scales, indptr)
    with pytest.raises(ValueError, match="b must be torch.uint8 .*, got torch.bfloat16"):
        function(a, b.bfloat16(), *scales, indptr)
    with pytest.raises(ValueError, match="a_scale must be torch.uint8 or torch.float8_e4m3fn, got torch.float32"):
        function(a, b, scales[0].float(), scales[1], indptr)
    for given in ({"out_dtype": torch.float32}, {"out": out.float()}):
        with pytest.raises(ValueError, match="out_dtype must be torch.float16 or torch.bfloat16, got torch.float32"):
            function(a, b, *scales, indptr, **given)


@pytest.mark.gpu
def test_a_capture_needs_the_sizes_in_host_memory() -> None:
    given = layer(20, 2, 3, 64, 96, torch.bfloat16, "cuda")
    scales = torch.ones(3, device="cuda")
    a, a_scales = vllm.scaled_fp4_experts_quant(given["x"], scales, given["offsets"], given["scale_offsets"], 2)
    expected = sorted_product(given, given["x"], a, a_scales, scales)
    on_host = given | {name: given[name].cpu() for name in ("sizes", "offsets", "scale_offsets")}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(RuntimeError, match="pass them in host"):
            sorted_product(given, given["x"], a, a_scales, scales)
        out = sorted_product(on_host, given["x"], a, a_scales, scales)
    graph.replay()
    assert torch.equal(out, expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a_tensors": lambda t: t.view(torch.int8)}, "a must be a contiguous torch.uint8"),
        ({"b_tensors": lambda t: t[0]}, "b must be .* with 3 dimensions"),
        ({"a_scales": lambda t: t.view(torch.uint8)}, "a_blockscale must be .*float8_e4m3fn"),
        ({"b_scales": lambda t: t[0]}, "b_blockscales must be .* with 3 dimensions"),
        ({"alphas": lambda t: t.double()}, "alphas must be .*float32 tensor with 1 dimension, but"),
        ({"alphas": lambda t: t[:2]}, r"alphas needs numel\(\) = 3, but got 2"),
        ({"alphas": lambda t: t.repeat(2)}, r"alphas needs numel\(\) = 3, but got 6"),
        ({"out_tensors": lambda t: t.repeat(1, 2)[:, :64]}, "output must be .* contiguous, but got"),
        ({"problem_sizes": lambda t: t.long()}, "problem_sizes must be .*int32"),
        ({"problem_sizes": lambda t: t[:, :2].contiguous()}, r"need problem_sizes \(3, 3\)"),
        ({"b_tensors": lambda t: t[:1]}, r"1 expert needs problem_sizes \(1, 3\)"),
        ({"expert_offsets": lambda t: t[:2]}, "3 experts need problem_sizes .* got .* 2 and 3"),
        ({"expert_offsets": lambda t: t + 1}, "expert 2 has rows"),
        ({"sf_offsets": lambda t: t + 163840 * 2 - 256}, "expert 2 has rows .* rows of scales"),
        ({"problem_sizes": lambda t: t + 32}, r"expert 0 has \(n, k\) = \(96, 128\), but b has \(64, 96\)"),
        ({"b_scales": lambda t: t[:, :64].contiguous()}, r"must be \(rows, 8\) and \(3, 128, 8\), got"),
        ({"a_scales": lambda t: t[:, :4].contiguous()}, r"must be \(rows, 8\) and \(3, 128, 8\), got"),
        ({"out_tensors": lambda t: t.float()}, "output must be float16 or bfloat16"),
        ({"a_tensors": lambda t: t[:, :32].contiguous()}, "have different k"),
    ],
)
def test_what_vllms_compiled_code_checks_is_a_runtime_error_here(change: Any, message: str) -> None:
    given = layer(20, 2, 3, 64, 96, torch.bfloat16, "cpu")
    scales = torch.ones(3)
    a, a_scales = vllm.scaled_fp4_experts_quant(given["x"], scales, given["offsets"], given["scale_offsets"], 2)
    arguments: dict[str, Any] = {
        "out_tensors": torch.full((40, 64), 7.0, dtype=torch.bfloat16),
        "a_tensors": a,
        "b_tensors": given["b"],
        "a_scales": a_scales,
        "b_scales": given["b_scales"],
        "alphas": scales,
        "problem_sizes": given["sizes"],
        "expert_offsets": given["offsets"][:-1],
        "sf_offsets": given["scale_offsets"][:-1],
    }
    for name, function in change.items():
        arguments[name] = function(arguments[name])
    with pytest.raises(RuntimeError, match=message):
        vllm.cutlass_fp4_moe_mm(**arguments)
    assert (arguments["out_tensors"] == 7).all()
