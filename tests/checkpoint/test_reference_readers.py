"""Other people's code reads our files, and our code theirs: compressed-tensors, ModelOpt and comfy-kitchen on the CPU.

ModelOpt and comfy-kitchen are large and no dependency; their tests run where they are installed.
"""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest

import fp4rt
from fp4rt import checkpoint

torch = pytest.importorskip("torch", reason="needs torch, which the reference readers are written in")
safetensors_torch = pytest.importorskip("safetensors.torch", reason="needs torch")


def loaded(folder):
    """All tensors of a folder as torch reads them."""
    tensors = {}
    for shard in sorted(folder.glob("*.safetensors")):
        tensors.update(safetensors_torch.load_file(shard))
    return tensors


def as_numpy(tensor):
    bits = tensor.detach().contiguous().view(torch.int16).numpy()
    return bits.view(ml_dtypes.bfloat16)


@pytest.fixture(scope="module")
def compressed(quantized, tmp_path_factory):
    target = tmp_path_factory.mktemp("ct") / "model"
    checkpoint.convert(quantized, target, "compressed-tensors")
    return target


def test_compressed_tensors_reads_our_configuration(compressed):
    quantization = pytest.importorskip("compressed_tensors.quantization", reason="needs compressed-tensors")
    config = json.loads((compressed / "config.json").read_text())["quantization_config"]
    parsed = quantization.QuantizationConfig.model_validate(config)
    scheme = parsed.config_groups["group_0"]
    assert parsed.format == "nvfp4-pack-quantized"
    assert parsed.quantization_status == quantization.QuantizationStatus.COMPRESSED
    preset = quantization.preset_name_to_scheme("NVFP4A16", ["Linear"])
    assert scheme.weights.model_dump(exclude={"zp_dtype"}) == preset.weights.model_dump(exclude={"zp_dtype"})
    assert scheme.input_activations is None


def test_configuration_of_w4a4_is_the_preset(model, tmp_path):
    quantization = pytest.importorskip("compressed_tensors.quantization", reason="needs compressed-tensors")
    options = checkpoint.QuantizeOptions(form="compressed-tensors", activations=True)
    checkpoint.quantize(model, tmp_path / "q", options)
    config = json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]
    scheme = quantization.QuantizationConfig.model_validate(config).config_groups["group_0"]
    preset = quantization.preset_name_to_scheme("NVFP4", ["Linear"])
    for ours, theirs in ((scheme.weights, preset.weights), (scheme.input_activations, preset.input_activations)):
        assert ours.model_dump(exclude={"zp_dtype"}) == theirs.model_dump(exclude={"zp_dtype"})


def test_compressed_tensors_dequantizes_our_file_to_the_same_values(compressed):
    nvfp4 = pytest.importorskip("compressed_tensors.compressors.nvfp4", reason="needs compressed-tensors")
    quantization = pytest.importorskip("compressed_tensors.quantization", reason="needs compressed-tensors")
    config = json.loads((compressed / "config.json").read_text())["quantization_config"]
    scheme = quantization.QuantizationConfig.model_validate(config).config_groups["group_0"]
    tensors = loaded(compressed)
    opened = checkpoint.open(compressed)
    assert len(opened.layers) > 10
    for name in opened.layers:
        base = name.removesuffix(".weight")
        parts = ("weight_packed", "weight_scale", "weight_global_scale")
        state = {part: tensors[f"{base}.{part}"] for part in parts}
        theirs = nvfp4.NVFP4PackedCompressor.decompress(state, scheme)["weight"]
        ours = fp4rt.dequantize(opened.load(base), "bfloat16")
        assert theirs.dtype == torch.bfloat16
        assert np.array_equal(as_numpy(theirs), ours), name


def test_transformers_runs_our_file_through_compressed_tensors(tmp_path):
    """The same logits, bit for bit, as the model that fp4rt dequantized; its output head is tied to the embeddings."""
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    pytest.importorskip("compressed_tensors", reason="needs compressed-tensors")
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=50,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "model")
    options = checkpoint.QuantizeOptions(form="compressed-tensors")
    checkpoint.quantize(tmp_path / "model", tmp_path / "ct", options)
    checkpoint.dequantize(tmp_path / "ct", tmp_path / "bf16")
    tokens = torch.arange(10)[None]
    logits = [
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.bfloat16)(tokens).logits
        for name in ("ct", "bf16")
    ]
    assert torch.equal(*logits)
    assert logits[0].abs().max() > 0


def test_we_dequantize_a_file_of_compressed_tensors_to_its_own_values(tmp_path):
    nvfp4 = pytest.importorskip("compressed_tensors.compressors.nvfp4", reason="needs compressed-tensors")
    quantization = pytest.importorskip("compressed_tensors.quantization", reason="needs compressed-tensors")
    scheme = quantization.preset_name_to_scheme("NVFP4A16", ["Linear"])
    torch.manual_seed(0)
    weight = torch.randn(48, 64, dtype=torch.bfloat16) * 0.05
    encode = (2688 / weight.abs().max().float()).reshape(1)
    amax = weight.float().reshape(48, 4, 16).abs().amax(-1)
    scale = (encode * amax / 6).to(torch.float8_e4m3fn)
    state = {"weight": weight, "weight_scale": scale.to(torch.bfloat16), "weight_global_scale": encode}
    stored = nvfp4.NVFP4PackedCompressor.compress(state, scheme)
    safetensors_torch.save_file({f"w.{name}": value for name, value in stored.items()}, tmp_path / "x.safetensors")
    theirs = nvfp4.NVFP4PackedCompressor.decompress(dict(stored), scheme)["weight"]
    ours = fp4rt.dequantize(checkpoint.load(tmp_path / "x.safetensors", "w"), "bfloat16")
    assert np.array_equal(as_numpy(theirs), ours)


def bound(ours):
    """Two fp32 roundings: theirs multiplies by the stored reciprocal, ours divides by its reciprocal."""
    return 4 * np.spacing(np.abs(ours))


def test_modelopt_dequantizes_our_file_to_the_same_values(quantized):
    qtensor = pytest.importorskip("modelopt.torch.quantization.qtensor", reason="needs nvidia-modelopt")
    tensors, opened = loaded(quantized), checkpoint.open(quantized)
    for name in opened.layers:
        packed = tensors[name]
        theirs = qtensor.NVFP4QTensor((packed.shape[0], packed.shape[1] * 2), torch.float32, packed).dequantize(
            scale=tensors[f"{name}_scale"], double_scale=tensors[f"{name}_scale_2"], block_sizes={-1: 16}
        )
        ours = fp4rt.dequantize(opened.load(name))
        assert np.all(np.abs(theirs.numpy() - ours) <= bound(ours)), name


def test_we_dequantize_a_file_of_modelopt_to_its_own_values(tmp_path):
    qtensor = pytest.importorskip("modelopt.torch.quantization.qtensor", reason="needs nvidia-modelopt")
    torch.manual_seed(0)
    weight = torch.randn(48, 64) * 0.05
    packed, scale, scale_2 = qtensor.NVFP4QTensor.quantize(weight.clone(), 16)
    stored = {"w.weight": packed._quantized_data, "w.weight_scale": scale, "w.weight_scale_2": scale_2}
    safetensors_torch.save_file(stored, tmp_path / "x.safetensors")
    theirs = packed.dequantize(torch.float32, scale=scale, double_scale=scale_2, block_sizes={-1: 16})
    ours = fp4rt.dequantize(checkpoint.load(tmp_path / "x.safetensors", "w"))
    assert np.all(np.abs(theirs.numpy() - ours) <= bound(ours))


def test_quantization_config_is_what_modelopt_derives_from_hf_quant_config(model, tmp_path):
    convert = pytest.importorskip("modelopt.torch.export.convert_hf_config", reason="needs nvidia-modelopt")
    for index, activations in enumerate((False, True)):
        target = tmp_path / str(index)
        checkpoint.quantize(model, target, checkpoint.QuantizeOptions(activations=activations))
        hf_quant = json.loads((target / "hf_quant_config.json").read_text())
        ours = json.loads((target / "config.json").read_text())["quantization_config"]
        assert ours == convert.convert_hf_quant_config_format(hf_quant)


def test_comfy_kitchen_dequantizes_our_file_to_the_same_values(quantized, tmp_path):
    eager = pytest.importorskip("comfy_kitchen.backends.eager.quantization", reason="needs comfy-kitchen")
    checkpoint.convert(quantized, tmp_path / "comfy", "comfy")
    tensors, opened = loaded(tmp_path / "comfy"), checkpoint.open(tmp_path / "comfy")
    for name in opened.layers:
        theirs = eager.dequantize_nvfp4(
            tensors[name], tensors[f"{name}_scale_2"], tensors[f"{name}_scale"], torch.float32
        )
        q = opened.load(name)
        ours = fp4rt.dequantize(q)
        assert np.all(np.abs(theirs.numpy()[: q.shape[0]] - ours) <= bound(ours)), name


def test_we_dequantize_what_comfy_kitchen_quantized(tmp_path):
    eager = pytest.importorskip("comfy_kitchen.backends.eager.quantization", reason="needs comfy-kitchen")
    torch.manual_seed(0)
    weight = torch.randn(144, 96) * 0.05
    decode = weight.abs().max() / 2688
    packed, scales = eager.quantize_nvfp4(weight, decode)
    stored = {"w.weight": packed, "w.weight_scale": scales, "w.weight_scale_2": decode}
    safetensors_torch.save_file(stored, tmp_path / "x.safetensors")
    theirs = eager.dequantize_nvfp4(packed, decode, scales, torch.float32)
    opened = checkpoint.open(tmp_path / "x.safetensors")
    assert opened.format == "comfy"
    ours = fp4rt.dequantize(opened.load("w"))
    assert np.all(np.abs(theirs.numpy() - ours) <= bound(ours))
