"""The format is found from names, shapes and configuration; where they fail or disagree, the error says so."""

from __future__ import annotations

import json

import numpy as np
import pytest

import fp4rt
from fp4rt import checkpoint
from fp4rt.errors import CheckpointError


def square(files, rows=128, columns=64, swizzled=False):
    """A matrix whose linear and swizzled scales have one shape: names and shapes alone cannot tell."""
    return {
        "w.weight": ("U8", [rows, columns // 2], bytes(rows * columns // 2)),
        "w.weight_scale": ("F8_E4M3", [rows, columns // 16], bytes([0x38]) * (rows * columns // 16)),
        "w.weight_scale_2": ("F32", [], files.f32(1.0)),
    }


def test_names_of_compressed_tensors_suffice(tmp_path, files):
    assert checkpoint.open(files.make(tmp_path / "x.safetensors", files.compressed_tensors())).format == (
        "compressed-tensors"
    )


def test_shape_of_the_scales_tells_modelopt(tmp_path, files):
    assert checkpoint.open(files.make(tmp_path / "x.safetensors", files.modelopt())).format == "modelopt"


def test_shape_of_the_scales_tells_comfy(tmp_path, files):
    tensors = {**files.modelopt(), "w.weight_scale": ("F8_E4M3", [128, 4], bytes(512))}
    assert checkpoint.open(files.make(tmp_path / "x.safetensors", tensors)).format == "comfy"


def test_ambiguity_is_an_error_that_lists_what_was_seen(tmp_path, files):
    path = files.make(tmp_path / "x.safetensors", square(files))
    with pytest.raises(CheckpointError, match=r"modelopt or comfy.*of 1 layer \(as 'w'\).*--from"):
        checkpoint.open(path)
    assert checkpoint.open(path, format="comfy").format == "comfy"
    assert checkpoint.open(path, format="modelopt").format == "modelopt"


def test_one_telling_layer_decides_for_all(tmp_path, files):
    tensors = {**square(files), **{name.replace("w.", "v."): value for name, value in files.modelopt().items()}}
    assert checkpoint.open(files.make(tmp_path / "x.safetensors", tensors)).format == "modelopt"


def test_wrong_format_by_hand_is_refused(tmp_path, files):
    with pytest.raises(CheckpointError, match="is not compressed-tensors"):
        checkpoint.open(files.make(tmp_path / "x.safetensors", square(files)), format="compressed-tensors")


@pytest.mark.parametrize("place", ["hf_quant_config", "config", "metadata"])
def test_configuration_tells_modelopt(place, tmp_path, files):
    quantization = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    metadata = {"quantization_config": json.dumps(quantization)} if place == "metadata" else None
    files.make(tmp_path / "model.safetensors", square(files), metadata)
    if place == "config":
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    if place == "hf_quant_config":
        table = {"quantization": {"quant_algo": "NVFP4", "group_size": 16}}
        (tmp_path / "hf_quant_config.json").write_text(json.dumps(table))
    assert checkpoint.open(tmp_path).format == "modelopt"


@pytest.mark.parametrize("place", ["metadata", "tensor"])
def test_comfy_says_so_in_metadata_or_a_tensor(place, tmp_path, files):
    marker = b'{"format": "nvfp4"}'
    tensors = square(files)
    metadata = None
    if place == "tensor":
        tensors["w.comfy_quant"] = ("U8", [len(marker)], marker)
    else:
        table = {"format_version": "1.0", "layers": {"w": {"format": "nvfp4"}}}
        metadata = {"_quantization_metadata": json.dumps(table)}
    assert checkpoint.open(files.make(tmp_path / "x.safetensors", tensors, metadata)).format == "comfy"


def test_contradicting_configuration_is_an_error_that_names_both_places(tmp_path, files):
    files.make(tmp_path / "model.safetensors", square(files), {"_quantization_metadata": "{}"})
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4"}}')
    with pytest.raises(CheckpointError, match=r"comfy: _quantization_metadata.*modelopt: hf_quant_config.json"):
        checkpoint.open(tmp_path)


def test_names_against_configuration_is_an_error(tmp_path, files):
    files.make(tmp_path / "model.safetensors", files.compressed_tensors())
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4"}}')
    with pytest.raises(CheckpointError, match="which format"):
        checkpoint.open(tmp_path)


def test_names_of_two_formats_are_an_error(tmp_path, files):
    other = {name.replace("w.", "v."): value for name, value in files.modelopt().items()}
    path = files.make(tmp_path / "x.safetensors", {**files.compressed_tensors(), **other})
    with pytest.raises(CheckpointError, match="names of two formats"):
        checkpoint.open(path)


def test_configuration_without_quantized_tensors_is_an_error(tmp_path, files):
    files.make(tmp_path / "model.safetensors", {"w.weight": ("F32", [1, 16], bytes(64))})
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4"}}')
    with pytest.raises(CheckpointError, match="says NVFP4, but no tensor"):
        checkpoint.open(tmp_path)


@pytest.mark.parametrize("key, value", [("quant_algo", "FP8"), ("group_size", 32)])
def test_other_algorithms_and_block_sizes_are_refused(key, value, tmp_path, files):
    files.make(tmp_path / "model.safetensors", files.modelopt())
    table = {"quantization": {"quant_algo": "NVFP4", key: value}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(table))
    with pytest.raises(CheckpointError, match=f"{key}.*{value}"):
        checkpoint.open(tmp_path)


@pytest.mark.parametrize("method", ["modelopt", "compressed-tensors"])
def test_another_block_size_of_a_weight_group_is_refused(method, tmp_path, files):
    names = {"modelopt": files.modelopt, "compressed-tensors": files.compressed_tensors}
    files.make(tmp_path / "model.safetensors", names[method]())
    weights = {"num_bits": 4, "type": "float", "group_size": 32}
    quantization = {"quant_method": method, "config_groups": {"group_0": {"weights": weights}}}
    quantization |= {"quant_algo": "NVFP4"} if method == "modelopt" else {"format": "nvfp4-pack-quantized"}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    with pytest.raises(CheckpointError, match="group_0.*group_size.*32"):
        checkpoint.open(tmp_path)


@pytest.mark.parametrize("layout", ["128x4", "8x4"])
def test_other_layouts_of_modelopt_carry_it_in_the_tensors_name(layout, tmp_path):
    rng = np.random.default_rng(3)
    x = rng.standard_normal((200, 96), np.float32)
    checkpoint.save(tmp_path / "plain.safetensors", {"w.weight": x})
    options = checkpoint.QuantizeOptions(layout=layout)
    checkpoint.quantize(tmp_path / "plain.safetensors", tmp_path / "q.safetensors", options)
    opened = checkpoint.open(tmp_path / "q.safetensors")
    assert opened.format == "modelopt"
    assert f"w.weight_scale_{layout}" in opened
    assert "w.weight_scale" not in opened
    q = opened.load("w", layout=layout)
    assert np.array_equal(np.asarray(opened[f"w.weight_scale_{layout}"]).view(np.uint8), q.scales)
    direct = fp4rt.quantize(x, float(q.global_scale[0]), layout=layout)
    assert np.array_equal(direct.data, q.data)
    assert np.array_equal(direct.scales, q.scales)


def test_wrongly_shaped_scales_name_the_shape_that_was_wanted(tmp_path, files):
    tensors = {**files.modelopt(), "w.weight_scale": ("F8_E4M3", [2, 1], b"\x40\x40")}
    with pytest.raises(CheckpointError, match=r"'w.weight_scale' has shape \(2, 1\).*needs \(1, 1\)"):
        checkpoint.open(files.make(tmp_path / "x.safetensors", tensors), format="modelopt")


def test_tensors_of_other_quantizations_are_plain(tmp_path, files):
    tensors = {
        "a.weight": ("F8_E4M3", [2, 16], bytes(32)),
        "a.weight_scale": ("F32", [], files.f32(1)),
        "b.blocks": ("U8", [4], bytes(4)),
    }
    assert checkpoint.open(files.make(tmp_path / "x.safetensors", tensors)).format == "plain"


def test_a_global_scale_beside_a_weight_that_is_no_codes_is_refused(tmp_path, files):
    """Block scales beside an FP8 weight are another quantization's; a global scale belongs to NVFP4 codes alone."""
    tensors = {**files.modelopt(), "v.weight": ("I64", [1, 1], bytes(8)), "v.weight_scale_2": ("F32", [], files.f32(1))}
    with pytest.raises(CheckpointError, match="'v.weight"):
        checkpoint.verify(files.make(tmp_path / "x.safetensors", tensors), format="modelopt")
    tensors["v.weight_scale"] = ("F8_E4M3", [1, 1], b"\x40")
    with pytest.raises(CheckpointError, match="'v.weight' is I64; wanted U8"):
        checkpoint.verify(files.make(tmp_path / "x.safetensors", tensors), format="modelopt")
