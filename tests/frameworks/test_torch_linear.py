"""``NVFP4Linear`` and ``quantize_model``: values, state dict, moves, compilation."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import re
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import fp4rt  # noqa: E402
from fp4rt.errors import DtypeError, ShapeError  # noqa: E402
from fp4rt.prepacked import PrepackedWeight  # noqa: E402
from fp4rt.torch import NVFP4Linear, ops, quantize_model  # noqa: E402

nn = torch.nn


def linear(in_features: int, out_features: int, device: str = "cpu", dtype: Any = torch.float16, **kwargs: Any) -> Any:
    torch.manual_seed(3)
    return nn.Linear(in_features, out_features, dtype=dtype, device=device, **kwargs)


def batch(*shape: int, device: str = "cpu", dtype: Any = torch.float16) -> Any:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5)).to(dtype).to(device)


def same_bits(a: Any, b: Any) -> bool:
    return a.dtype == b.dtype and torch.equal(a.cpu().view(torch.uint8), b.cpu().view(torch.uint8))


def operand(layer: Any) -> Any:
    """The weight in the form that the layer multiplies with: on a CUDA device that is the repacked one."""
    return fp4rt.prepack(layer.weight()) if layer.prepacked else layer.weight()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("in_features", [64, 40])
def test_w4a16_is_a_product_with_the_dequantized_weight(device: str, in_features: int, bias: bool) -> None:
    source = linear(in_features, 48, device, bias=bias)
    layer = NVFP4Linear.from_linear(source)
    x = batch(3, 5, in_features, device=device)
    y = layer(x)
    weight = layer.weight()
    rows = x.reshape(15, -1)
    expected = fp4rt.matmul(rows, operand(layer), out_dtype="float16", bias=source.bias).reshape(3, 5, 48)
    assert torch.equal(y, expected)
    exact = x.double() @ weight.dequantize().double().t() + (source.bias.double() if bias else 0)
    # One rounding to fp16 (2^-11), and fp32 additions of k products: k * 2^-24 of their magnitudes' sum.
    magnitudes = x.double().abs() @ weight.dequantize().double().abs().t() + 1
    bound = exact.abs() * 2.0**-11 + in_features * 2.0**-24 * magnitudes + 2.0**-24
    assert ((y.double() - exact).abs() <= bound).all()
    assert not y.requires_grad


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_w4a4_quantizes_its_input(device: str, dtype: Any) -> None:
    layer = NVFP4Linear.from_linear(linear(40, 48, device, dtype), mode="w4a4")
    x = batch(7, 40, device=device, dtype=dtype)
    y = layer(x)
    a = fp4rt.quantize(x, padded_n=48)
    assert torch.equal(y, fp4rt.matmul(a, operand(layer), out_dtype=dtype, bias=layer.bias))


def test_w4a4_takes_a_calibrated_input_scale(device: str) -> None:
    layer = NVFP4Linear.from_linear(linear(64, 48, device), mode="w4a4", input_global_scale=100.0)
    x = batch(7, 64, device=device)
    assert layer.input_global_scale.item() == 100.0
    y = layer(x)
    a = fp4rt.quantize(x, 100.0)
    assert torch.equal(y, fp4rt.matmul(a, operand(layer), out_dtype="float16", bias=layer.bias))
    assert "input_global_scale" in layer.state_dict()


def test_prepacking_changes_neither_a_result_nor_a_byte_of_the_state(device: str) -> None:
    layer = NVFP4Linear.from_linear(linear(272, 40, device))
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    x = batch(9, 272, device=device)
    weight = layer.weight()
    layer.prepack()
    assert layer.prepacked
    assert layer.weight_packed.numel() == 0  # held once
    assert torch.equal(layer(x), fp4rt.matmul(x, fp4rt.prepack(weight), out_dtype="float16", bias=layer.bias))
    after = layer.state_dict()
    assert list(after) == list(before)
    assert all(same_bits(after[name], before[name]) for name in before)
    layer.unpack()
    assert not layer.prepacked
    assert same_bits(layer.weight_packed, before["weight_packed"])


def test_the_state_dict_has_the_names_and_dtypes_of_compressed_tensors() -> None:
    layer = NVFP4Linear.from_linear(linear(64, 48), mode="w4a4", input_global_scale=2.0)
    state = {name: (value.dtype, tuple(value.shape)) for name, value in layer.state_dict().items()}
    assert state == {
        "bias": (torch.float16, (48,)),
        "weight_packed": (torch.uint8, (48, 32)),
        "weight_scale": (torch.uint8, (48, 4)),
        "weight_global_scale": (torch.float32, (1,)),
        "input_global_scale": (torch.float32, (1,)),
    }


@pytest.mark.parametrize("prepacked", [False, True])
def test_a_state_dict_goes_through_a_file_and_back(device: str, prepacked: bool) -> None:
    source = NVFP4Linear.from_linear(linear(40, 48, device))
    x = batch(4, 40, device=device)
    expected = source(x)
    if prepacked:
        source.prepack()
    file = io.BytesIO()
    torch.save(source.state_dict(), file)
    file.seek(0)
    target = NVFP4Linear(40, 48, dtype=torch.float16, device=device)
    if prepacked:
        target.prepack()  # holds another weight in packed form, which loading must drop
    target.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(target(x), expected)
    assert all(same_bits(target.state_dict()[name], value) for name, value in source.state_dict().items())


def test_float8_scales_are_loaded_by_their_bytes() -> None:
    """compressed-tensors stores them as float8_e4m3fn; copying into uint8 would convert 1.0 to byte 1."""
    source = NVFP4Linear.from_linear(linear(64, 48))
    state = source.state_dict()
    state["weight_scale"] = state["weight_scale"].view(torch.float8_e4m3fn)
    target = NVFP4Linear(64, 48, dtype=torch.float16)
    target.load_state_dict(state)
    assert torch.equal(target.weight_scale, source.weight_scale)


def test_a_state_dict_with_a_missing_scale_is_refused() -> None:
    state = NVFP4Linear.from_linear(linear(64, 48)).state_dict()
    del state["weight_global_scale"]
    with pytest.raises(RuntimeError, match="weight_global_scale"):
        NVFP4Linear(64, 48, dtype=torch.float16).load_state_dict(state)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_dtype_changes_the_bias_alone(dtype: Any) -> None:
    layer = NVFP4Linear.from_linear(linear(64, 48), mode="w4a4", input_global_scale=1234.567)
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    layer.to(dtype)
    assert layer.bias.dtype == dtype
    for name, value in before.items():
        if name != "bias":
            assert same_bits(layer.state_dict()[name], value), name


def test_a_layer_survives_copy_pickle_and_repr(device: str) -> None:
    layer = NVFP4Linear.from_linear(linear(64, 48, device)).eval()
    x = batch(4, 64, device=device)
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))
    assert "in_features=64, out_features=48, bias=True, mode='w4a16'" in repr(layer)
    assert not layer.training


# ---- the repacked weight is remembered from call to call, and never beyond a change


def called(device: str, seed: int = 3) -> tuple[Any, Any]:
    """A prepacked layer that has been called, and the result of calling it with ``batch(4, 272)``."""
    torch.manual_seed(seed)
    layer = NVFP4Linear.from_linear(nn.Linear(272, 40, dtype=torch.float16, device=device)).prepack()
    return layer, layer(batch(4, 272, device=device))


def test_a_repacked_weight_is_looked_at_once(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def make(*arguments: Any) -> PrepackedWeight:
        made.append(arguments[3])
        return PrepackedWeight(*arguments)

    monkeypatch.setattr(ops, "PrepackedWeight", make)
    layer, y = called(device)
    views = layer._kept.views()
    for _ in range(3):
        assert torch.equal(layer(batch(4, 272, device=device)), y)
    assert made == [(40, 272)]
    assert layer._kept.views() is views
    layer.prepacked_data = layer.prepacked_data.clone()
    for _ in range(3):
        assert torch.equal(layer(batch(4, 272, device=device)), y)
    assert made == [(40, 272)] * 2


@pytest.mark.parametrize("assign", [False, True])
def test_a_layer_that_was_called_takes_another_weight(device: str, assign: bool) -> None:
    (layer, before), (other, expected) = called(device), called(device, seed=4)
    x = batch(4, 272, device=device)
    assert not torch.equal(before, expected)
    old = weakref.ref(layer.prepacked_data)
    layer.load_state_dict({name: value.clone() for name, value in other.state_dict().items()}, assign=assign)
    gc.collect()
    assert old() is None
    assert torch.equal(layer.prepack()(x), expected)
    layer.set_weight(called(device)[0].weight())
    layer.bias = called(device)[0].bias
    assert torch.equal(layer.prepack()(x), before)


def test_buffers_that_were_exchanged_are_read(device: str) -> None:
    (layer, before), (other, expected) = called(device), called(device, seed=4)
    x = batch(4, 272, device=device)
    given = {**dict(other.named_buffers()), "bias": other.bias}
    assert torch.equal(torch.func.functional_call(layer, given, x), expected)
    assert torch.equal(layer(x), before)
    layer.prepacked_data.data = other.prepacked_data.clone()  # the same object with other memory
    layer.weight_global_scale.copy_(other.weight_global_scale)
    layer.bias = other.bias
    assert torch.equal(layer(x), expected)
    layer.weight_global_scale = other.weight_global_scale * 2
    layer.bias = other.bias = None
    assert torch.equal(layer(x) * 2, other(x))


def test_a_layer_that_was_moved_reads_its_new_memory_and_lets_go_of_the_old(device: str) -> None:
    layer, y = called(device)
    old = weakref.ref(layer.prepacked_data)
    layer._apply(torch.clone)  # as .to() another device
    gc.collect()
    assert old() is None
    assert torch.equal(layer(batch(4, 272, device=device)), y)
    assert torch.equal(layer.to(torch.bfloat16).to("cpu")(batch(4, 272)).float(), layer(batch(4, 272)).float())


def test_a_copy_of_a_layer_that_was_called_has_a_weight_of_its_own(device: str) -> None:
    layer, y = called(device)
    x = batch(4, 272, device=device)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), torch.load(file, weights_only=False)):
        assert other._kept is None
        assert torch.equal(other(x), y)
        other.prepacked_data.zero_()
        assert torch.equal(other(x), other.bias.expand(4, -1))
        assert torch.equal(layer(x), y)


def test_a_layer_that_was_called_compiles_to_a_full_graph(device: str) -> None:
    layer, y = called(device)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = batch(4, 272, device=device)
    with torch.no_grad():
        assert torch.equal(compiled(x), y)
        layer.load_state_dict(called(device, seed=4)[0].state_dict())
        layer.prepack()
        assert torch.equal(compiled(x), layer(x))
    assert torch.equal(layer(x), called(device, seed=4)[1])


@pytest.mark.parametrize("form", ["host", "prepacked", "prepacked on the host"])
def test_a_weight_of_any_kind_can_be_set(device: str, form: str) -> None:
    source = linear(40, 48, device, bias=False)
    quantized = fp4rt.quantize(source.weight.detach(), padded_n=48)
    host = fp4rt.QuantizedTensor(
        *(part.cpu().numpy() for part in (quantized.data, quantized.scales, quantized.global_scale)),
        quantized.shape,
        quantized.layout,
        48,
    )
    kinds = {"host": host, "prepacked": fp4rt.prepack(quantized), "prepacked on the host": fp4rt.prepack(host)}
    layer = NVFP4Linear.from_linear(source, weight=kinds[form])
    assert {buffer.device.type for buffer in layer.buffers()} == {device}
    assert torch.equal(layer.weight().dequantize(), quantized.dequantize())
    x = batch(3, 40, device=device)
    assert torch.equal(layer(x), NVFP4Linear.from_linear(source)(x))


def test_wrong_inputs_and_weights_are_named() -> None:
    with pytest.raises(DtypeError, match="needs b as a QuantizedTensor or the result of prepack, got Tensor"):
        NVFP4Linear.from_linear(linear(16, 16), weight=torch.zeros(16, 16))
    layer = NVFP4Linear.from_linear(linear(64, 48))
    with pytest.raises(ShapeError, match=r"x with 64 columns, got x\.shape = \(3, 32\)"):
        layer(batch(3, 32))
    with pytest.raises(ShapeError, match=r"x with 64 columns, got x\.shape = \(\)"):
        layer(batch(1)[0])
    for value in (batch(3, 64).numpy(), [1.0], None):
        with pytest.raises(DtypeError, match=r"needs x as a torch\.Tensor, got (ndarray|list|NoneType)"):
            layer(value)
    with pytest.raises(DtypeError, match="float16, bfloat16"):
        layer(batch(3, 64, dtype=torch.float32))
    with pytest.raises(ShapeError, match=r"weight of shape \(48, 64\)"):
        layer.set_weight(fp4rt.quantize(batch(48, 32)))
    with pytest.raises(ValueError, match="'w4a16', 'w4a4', got 'w8a8'"):
        NVFP4Linear(64, 48, mode="w8a8")
    with pytest.raises(ValueError, match="only with mode='w4a4'"):
        NVFP4Linear(64, 48, input_global_scale=True)


def test_fp32_activations_are_refused_with_the_remedy_or_cast_as_autocast_asks(device: str) -> None:
    model = torch.nn.Sequential(linear(64, 48, device, torch.float32), torch.nn.ReLU()).eval()
    quantize_model(model)
    x = batch(3, 64, device=device, dtype=torch.float32)
    with pytest.raises(DtypeError, match=r"NVFP4Linear\(in_features=64, .* got float32; call \.bfloat16\(\) on"):
        model(x)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast(device, dtype), torch.no_grad():
            y = model(x)
            assert torch.equal(compiled(x), y)
        assert y.dtype == dtype
        assert torch.equal(y, model(x.to(dtype)))  # what the message says: the model's input in 16 bits
    with torch.autocast(device), pytest.raises(DtypeError, match="got float64"):
        model(x.double())


@pytest.mark.parametrize("prepacked", [False, True])
@pytest.mark.parametrize("mode", ["w4a16", "w4a4"])
def test_under_autocast_a_layer_has_the_dtype_that_a_linear_has(device: str, mode: str, prepacked: bool) -> None:
    source = linear(64, 48, device, torch.float32)
    layer = NVFP4Linear.from_linear(source, mode=mode)
    if prepacked:
        layer.prepack()
    for given in (torch.float32, torch.float16, torch.bfloat16):
        x = batch(3, 64, device=device, dtype=given)
        for asked in (torch.float16, torch.bfloat16):
            with torch.autocast(device, asked), torch.no_grad():
                y = layer(x)
                assert y.dtype == source(x).dtype == asked
            assert torch.equal(y, layer(x.to(asked)))
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with torch.autocast(device, torch.float16), torch.no_grad():
        assert torch.equal(compiled(x), layer(x))


@pytest.mark.parametrize("mode", ["w4a16", "w4a4"])
def test_a_model_on_the_meta_device_gets_layers_to_load(device: str, mode: Any) -> None:
    source = nn.Sequential(linear(40, 48, device), nn.ReLU(), linear(48, 16, device, bias=False))
    with torch.device("meta"):
        empty = nn.Sequential(nn.Linear(40, 48), nn.ReLU(), nn.Linear(48, 16, bias=False)).half()
    assert quantize_model(empty, mode=mode) == quantize_model(source, mode=mode) == ["0", "2"]
    assert all(value.is_meta for value in empty.state_dict().values())
    empty.load_state_dict(source.state_dict(), assign=True)
    x = batch(3, 40, device=device)
    assert same_bits(empty(x), source(x))


def test_a_checkpoints_weight_in_any_layout_can_be_set(device: str) -> None:
    source = linear(64, 48, device)
    layer = NVFP4Linear.from_linear(source)
    other = NVFP4Linear.from_linear(source, weight=fp4rt.quantize(source.weight.detach(), layout="128x4"))
    assert all(same_bits(other.state_dict()[name], value) for name, value in layer.state_dict().items())


def test_a_checkpoints_weight_for_a_layer_on_the_meta_device_keeps_its_bytes() -> None:
    source = linear(64, 48, "cpu", bias=False)
    q = fp4rt.quantize(source.weight.detach().float().numpy(), layout="linear")
    with torch.device("meta"):
        empty = nn.Linear(64, 48, bias=False).half()
    layer = NVFP4Linear.from_linear(empty, weight=q)
    assert torch.equal(layer.weight_packed, torch.from_numpy(q.data))
    assert same_bits(layer(batch(3, 64, device="cpu")), NVFP4Linear.from_linear(source)(batch(3, 64, device="cpu")))


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_model_with_weights_that_are_not_finite_is_refused_as_it_is(value: float) -> None:
    model = nn.Sequential(linear(64, 48, "cpu"), linear(48, 16, "cpu"))
    with torch.no_grad():
        model[1].weight[3, 5] = value
    with pytest.raises(ValueError, match="needs finite weights, 1 has others; exclude it"):
        quantize_model(model)
    assert all(type(layer) is nn.Linear for layer in model)
    assert quantize_model(model, exclude="1") == ["0"]


@pytest.mark.parametrize("given", [None, nn.ReLU()])
def test_what_is_no_linear_layer_is_refused(given: Any) -> None:
    with pytest.raises(TypeError, match=rf"from_linear needs an nn.Linear, got {type(given).__name__}"):
        NVFP4Linear.from_linear(given)


# ---- models


class Mlp(nn.Module):
    """Two linear layers and a head, as a block of a transformer has them."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)
        self.head = nn.Linear(width, 8)

    def forward(self, x: Any) -> Any:
        return self.head(x + self.down(nn.functional.gelu(self.up(x))))


def mlp(device: str = "cpu", dtype: Any = torch.float16) -> Any:
    torch.manual_seed(7)
    return Mlp().to(device, dtype).eval()


def test_linears_are_replaced_in_place_by_name(device: str) -> None:
    model = mlp(device)
    assert quantize_model(model, exclude="head") == ["up", "down"]
    assert isinstance(model.up, NVFP4Linear)
    assert type(model.head) is nn.Linear
    assert model.down.bias is None
    x = batch(4, 64, device=device)
    with torch.no_grad():
        y = model(x)
    expected = model.head(x + model.down(nn.functional.gelu(model.up(x))))
    assert torch.equal(y, expected)


def test_patterns_functions_and_shared_layers_select() -> None:
    model = mlp()
    assert quantize_model(model, include=["u*", "down"], exclude=lambda name, layer: layer.bias is None) == ["up"]
    shared = nn.Sequential(linear(64, 64), nn.Sequential())
    shared[1].append(shared[0])
    assert quantize_model(shared, mode="w4a4", input_global_scales={"0": 3.0}) == ["0", "1.0"]
    assert shared[0] is shared[1][0]
    assert shared[0].input_global_scale.item() == 3.0


def test_nothing_is_replaced_where_something_cannot_be() -> None:
    def sequence() -> Any:
        return nn.Sequential(linear(16, 16), linear(16, 16, dtype=torch.float64))

    model = sequence()
    with pytest.raises(DtypeError, match="1 has float64; exclude it"):
        quantize_model(model)
    for mode, scales, message in (
        ("w4a16", {"0": 3.0}, "only with mode='w4a4'"),
        ("w4a4", {"0": -3.0}, "one positive, finite number, got -3.0"),
        ("w4a4", {"0": torch.ones(2)}, "one positive, finite number"),
    ):
        with pytest.raises(ValueError, match=message):
            quantize_model(model, exclude="1", mode=mode, input_global_scales=scales)
    assert [type(layer) for layer in model] == [nn.Linear, nn.Linear]
    scale = fp4rt.global_scale(batch(4, 16))
    quantize_model(model, exclude="1", mode="w4a4", input_global_scales={"0": scale})
    assert torch.equal(model[0].input_global_scale, scale)


def test_encoders_work_in_eval_mode(device: str) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dtype=torch.float16, device=device)
    model = nn.TransformerEncoder(layer, 2).eval()
    x, padding = batch(2, 3, 32, device=device), torch.zeros(2, 3, dtype=torch.bool, device=device)
    padding[1, 2] = True
    with torch.inference_mode():
        exact = model(x, src_key_padding_mask=padding)
        assert len(quantize_model(model)) == 4
        got = model(x, src_key_padding_mask=padding)
        single = model.layers[0](x)
    assert torch.isfinite(single).all()
    assert float((got - exact)[~padding].norm() / exact[~padding].norm()) < 0.3  # four 4-bit layers


def test_a_selection_that_means_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"include pattern 'mlp\.\*' matches no linear layer"):
        quantize_model(mlp(), include="mlp.*")
    with pytest.raises(ValueError, match="lone nn"):
        quantize_model(linear(64, 64))
    with pytest.raises(ValueError, match=r"\['gate'\]"):
        quantize_model(mlp(), mode="w4a4", input_global_scales={"gate": 1.0})
    with pytest.raises(ValueError, match="got 'int4'"):
        quantize_model(mlp(), mode="int4")
    with pytest.raises(TypeError, match=r"needs a torch.nn.Module, got NoneType"):
        quantize_model(None)


@pytest.mark.parametrize("mode", ["w4a16", "w4a4"])
def test_a_compiled_mlp_equals_eager(device: str, mode: str) -> None:
    model = mlp(device)
    quantize_model(model, mode=mode)
    for module in model.modules():
        if isinstance(module, NVFP4Linear) and device == "cuda":
            module.prepack()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for m in (1, 5):
            x = batch(m, 64, device=device)
            assert torch.equal(compiled(x), model(x))


def test_the_default_compiler_takes_a_full_graph_too(device: str) -> None:
    layer = NVFP4Linear.from_linear(linear(64, 48, device)).eval()
    if device == "cuda":
        layer.prepack()
    compiled = torch.compile(layer, fullgraph=True)
    x = batch(4, 64, device=device)
    with torch.no_grad():
        assert torch.equal(compiled(x), layer(x))


@pytest.mark.parametrize("sizes", [(None, 16), (16.0, 16), (16, "16")])
def test_sizes_that_are_no_integers_are_refused(sizes: tuple[Any, Any]) -> None:
    with pytest.raises(DtypeError, match="NVFP4Linear needs (in|out)_features as an integer"):
        NVFP4Linear(*sizes)


@pytest.mark.parametrize("sizes", [(-16, 16), (0, 16), (16, -3)])
def test_sizes_that_no_layer_has_are_refused(sizes: tuple[int, int]) -> None:
    with pytest.raises(ShapeError, match="in_features of at least 1 and out_features of at least 0"):
        NVFP4Linear(*sizes)


def test_a_checkpoint_goes_into_a_model_as_the_readme_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors.torch import save_file

    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"```py\n(.*?)```", readme, re.DOTALL)  # which has no model of its own
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Sequential(torch.nn.Linear(32, 16)))
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    fp4rt.checkpoint.quantize(tmp_path / "model.safetensors", tmp_path / "model-nvfp4")
    wanted = copy.deepcopy(model)
    fp4rt.torch.quantize_model(wanted)
    exec(program, {"fp4rt": fp4rt, "model": model})
    assert [type(layer).__name__ for layer in (model[0], model[2][0])] == ["NVFP4Linear", "NVFP4Linear"]
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    for each in (model, wanted):
        for layer in (each[0], each[2][0]):
            layer.bias.data = layer.bias.data.bfloat16()
    torch.testing.assert_close(model(x), wanted(x), rtol=0, atol=0)


def at_once(work: Any, threads: int = 4) -> list[BaseException]:
    """What went wrong where threads all did the work together."""
    gate, wrong = threading.Barrier(threads), []

    def run() -> None:
        gate.wait()
        try:
            work()
        except Exception as error:
            wrong.append(error)

    running = [threading.Thread(target=run) for _ in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    return wrong


def test_threads_that_call_and_repack_a_new_layer_at_once_see_a_whole_weight(device: str) -> None:
    state = NVFP4Linear.from_linear(linear(32, 16)).state_dict()
    x, interval, wrong = batch(1, 32, device=device), sys.getswitchinterval(), []
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(200):
            layer = NVFP4Linear(32, 16, device=device, dtype=torch.float16)
            layer.load_state_dict(state)
            wrong += at_once(lambda layer=layer: (layer(x), layer.prepack()(x)))
    finally:
        sys.setswitchinterval(interval)
    assert wrong == []


def test_a_layer_is_repacked_once_however_many_threads_ask_for_it(device: str, monkeypatch: Any) -> None:
    calls, prepack = [], fp4rt.api.prepack

    def slow(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        time.sleep(0.05)
        return prepack(*args, **kwargs)

    monkeypatch.setattr(fp4rt.api, "prepack", slow)
    layer = NVFP4Linear.from_linear(linear(32, 16, device))
    assert at_once(layer.prepack) == []
    assert len(calls) == 1
