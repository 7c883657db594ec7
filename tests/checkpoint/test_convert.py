"""Between formats: codes and block scales move and never change, in single files, shards, stacks and fused layers."""

from __future__ import annotations

import json
import math
import re
import shutil

import ml_dtypes
import numpy as np
import pytest

import fp4rt
from bench.checkpoint_model import TINY, Size, write_model
from fp4rt import checkpoint
from fp4rt.checkpoint.fusing import FusedParts, fuse
from fp4rt.checkpoint.reader import TensorFile
from fp4rt.errors import CheckpointError


def chain(start, folder, *formats):
    """Convert from folder to folder; the last one."""
    for index, form in enumerate(formats):
        target = folder / f"{index}-{form}"
        checkpoint.convert(start, target, form)
        start = target
    return start


def test_round_trip_through_all_formats_is_byte_identical(quantized, tmp_path, read_tree):
    last = chain(quantized, tmp_path, "compressed-tensors", "comfy", "modelopt")
    assert read_tree(last) == read_tree(quantized)


def test_every_code_and_block_scale_is_the_same_in_every_format(quantized, tmp_path):
    reference = checkpoint.open(quantized)
    for form in ("compressed-tensors", "comfy"):
        other = checkpoint.open(chain(quantized, tmp_path / form, form))
        assert other.format == form
        assert set(other.layers) == set(reference.layers)
        for name in reference.layers:
            a, b = reference.load(name), other.load(name)
            assert np.array_equal(a.data, b.data), name
            assert np.array_equal(a.scales, b.scales), name
            assert a.global_scale[0] == b.global_scale[0]


def test_foreign_global_scale_moves_by_at_most_one_unit(tmp_path, files):
    """A decode scale that fp4rt did not make may have no exact reciprocal; codes and block scales are kept."""
    decode = np.float32(1.9999999)
    path = files.make(tmp_path / "x.safetensors", files.modelopt(decode))
    checkpoint.convert(path, tmp_path / "ct.safetensors", "compressed-tensors")
    checkpoint.convert(tmp_path / "ct.safetensors", tmp_path / "back.safetensors", "modelopt")
    back = TensorFile(tmp_path / "back.safetensors")
    assert abs(int(back["w.weight_scale_2"].view(np.int32)) - int(decode.view(np.int32))) <= 1
    assert bytes(back.raw("w.weight")) == files.codes


@pytest.mark.parametrize("decode", [1.9999999, 2.0**-10 * 1.7320508, 2.0**126 * 1.7320508])
def test_global_scales_that_do_not_come_back_are_counted_and_seen(decode, tmp_path, files):
    tensors = {**files.modelopt(decode), "w.input_scale": ("F32", [], files.f32(decode))}
    tensors |= {name.replace("w.", "v."): value for name, value in files.modelopt(0.25).items()}
    path = files.make(tmp_path / "mo.safetensors", tensors)
    dry = checkpoint.convert(path, tmp_path / "ct.safetensors", "compressed-tensors", dry_run=True)
    report = checkpoint.convert(path, tmp_path / "ct.safetensors", "compressed-tensors")
    assert dry.notes == report.notes
    assert report.notes == [
        "2 global scales have no fp32 reciprocal that leads back (as 'w.weight_scale_2'); converting back gives the "
        "nearest that has one"
    ]
    assert checkpoint.convert(tmp_path / "ct.safetensors", tmp_path / "back.safetensors", "modelopt").notes == []
    first, last = TensorFile(path), TensorFile(tmp_path / "back.safetensors")
    moved = {name for name in first if bytes(first.raw(name)) != bytes(last.raw(name))}
    assert moved == {"w.weight_scale_2", "w.input_scale"}

    def verdicts(other):
        return {row.name: row.verdict for row in checkpoint.compare(path, tmp_path / other)}

    assert verdicts("ct.safetensors") == {"w.weight": "identical", "v.weight": "identical"}
    assert verdicts("back.safetensors") == {"w.weight": "same values", "v.weight": "identical"}


def test_encode_scales_that_do_not_come_back_are_counted_too(tmp_path, files):
    path = files.make(tmp_path / "ct.safetensors", files.compressed_tensors(1.9999999))
    (note,) = checkpoint.convert(path, tmp_path / "mo.safetensors", "modelopt").notes
    assert note.startswith("1 global scale has no fp32 reciprocal that leads back (as 'w.weight_global_scale')")
    assert checkpoint.convert(path, tmp_path / "same.safetensors", "compressed-tensors").notes == []


def test_comfy_stores_high_nibble_first_and_swizzled_scales(quantized, tmp_path):
    comfy = checkpoint.open(chain(quantized, tmp_path, "comfy"))
    name = "model.layers.0.self_attn.k_proj"
    q = checkpoint.open(quantized).load(name)
    stored = comfy[f"{name}.weight"]
    assert np.array_equal(stored, (q.data << 4) | (q.data >> 4))
    swizzled = fp4rt.relayout(q, "128x4").scales
    assert np.array_equal(comfy[f"{name}.weight_scale"].view(np.uint8), swizzled)
    layers = json.loads(comfy.metadata["_quantization_metadata"])
    assert layers["format_version"] == "1.0"
    assert {"format": "nvfp4"} in layers["layers"].values()


def test_comfy_nibbles_of_a_known_row(tmp_path):
    """CASES B23, stored the other way round: the even element in the high half."""
    x = np.array([[0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6, -0.0]], np.float32)
    q = fp4rt.quantize(x, 1.0, layout="linear")
    assert q.data.tobytes() == bytes.fromhex("21436507A9CBED8F")
    checkpoint.save(tmp_path / "x.safetensors", {"w": q}, format="comfy")
    opened = checkpoint.open(tmp_path / "x.safetensors")
    assert opened["w.weight"][0].tobytes() == bytes.fromhex("123456709ABCDEF8")
    loaded = fp4rt.dequantize(opened.load("w"))
    assert np.array_equal(loaded, x)
    assert np.array_equal(np.signbit(loaded), np.signbit(x))


def test_swizzled_scales_of_a_stack_are_padded_for_each_expert(tmp_path, files):
    """CASES B13: two experts of 130 rows; each has 256 rows of scales in the file."""
    tensors = {
        "experts.up_proj": ("U8", [2, 130, 32], b"\x77" * (2 * 130 * 32)),
        "experts.up_proj_weight_scale": ("F8_E4M3", [2, 130, 4], b"\x38" * 520 + b"\x30" * 520),
        "experts.up_proj_weight_scale_2": ("F32", [2], files.f32(1, 1)),
    }
    path = files.make(tmp_path / "x.safetensors", tensors)
    checkpoint.convert(path, tmp_path / "comfy.safetensors", "comfy")
    scales = checkpoint.open(tmp_path / "comfy.safetensors")["experts.up_proj_weight_scale"].view(np.uint8)
    assert scales.shape == (2, 256, 4)
    joined = scales.reshape(-1)
    assert joined[1024] == 0x30
    assert joined[520] == 0
    checkpoint.convert(tmp_path / "comfy.safetensors", tmp_path / "back.safetensors", "modelopt")
    back = checkpoint.open(tmp_path / "back.safetensors")
    for expert, value in ((0, 6.0), (1, 3.0)):
        assert np.all(fp4rt.dequantize(back.load("experts.up_proj", expert=expert)) == value)
        token = np.full((1, 64), 6, ml_dtypes.bfloat16)
        assert np.all(fp4rt.matmul(token, back.load("experts.up_proj", expert=expert)) == 384 * value)


def test_value_that_float16_cannot_hold_is_refused(tmp_path, files):
    path = files.make(tmp_path / "x.safetensors", files.modelopt(65536.0))
    with pytest.raises(CheckpointError, match=r"'w\.weight' has values beyond 65504.*bf16"):
        checkpoint.dequantize(path, tmp_path / "y.safetensors", "fp16")
    checkpoint.dequantize(path, tmp_path / "y.safetensors", "bf16")


def test_comfy_pads_rows_to_sixteen_and_reading_takes_them_away(tmp_path):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((20, 64), np.float32)
    q = fp4rt.quantize(x, layout="linear")
    checkpoint.save(tmp_path / "x.safetensors", {"w": q}, format="comfy")
    opened = checkpoint.open(tmp_path / "x.safetensors")
    assert opened["w.weight"].shape == (32, 32)
    assert not opened["w.weight"][20:].any()
    loaded = opened.load("w")
    assert loaded.shape == (20, 64)
    assert np.array_equal(loaded.data, q.data)
    assert np.array_equal(loaded.scales, q.scales)
    assert checkpoint.verify(tmp_path / "x.safetensors") == []


def test_parts_of_a_layer_may_lie_in_different_shards(quantized, tmp_path, read_tree):
    """As other writers cut shards by size: codes in one file, scales in the next."""
    moved = tmp_path / "moved"
    shutil.copytree(quantized, moved)
    index = json.loads((moved / "model.safetensors.index.json").read_text())
    first, second = sorted(set(index["weight_map"].values()))[:2]
    name = next(n for n, f in index["weight_map"].items() if f == first and n.endswith("weight_scale"))
    tensors = {shard: TensorFile(quantized / shard) for shard in (first, second)}

    def rewrite(shard, names):
        from fp4rt.checkpoint.writer import TensorFileWriter, TensorSpec

        specs = [TensorSpec(n, f.entry(n).dtype, f.entry(n).shape) for n, f in names]
        with TensorFileWriter(moved / shard, specs, {}) as writer:
            for n, f in names:
                writer.write(n, f.raw(n))

    rewrite(first, [(n, tensors[first]) for n in tensors[first] if n != name])
    rewrite(second, [(name, tensors[first]), *((n, tensors[second]) for n in tensors[second])])
    index["weight_map"][name] = second
    (moved / "model.safetensors.index.json").write_text(json.dumps(index))
    a = chain(quantized, tmp_path / "a", "compressed-tensors")
    b = chain(moved, tmp_path / "b", "compressed-tensors")
    differences = checkpoint.compare(a, b)
    assert {row.verdict for row in differences} == {"identical"}
    weight_map = json.loads((b / "model.safetensors.index.json").read_text())["weight_map"]
    assert weight_map[name] == first  # with its codes again


def test_configuration_and_companions_go_along(quantized, tmp_path, model):
    ct = chain(quantized, tmp_path, "compressed-tensors")
    config = json.loads((ct / "config.json").read_text())
    original = json.loads((model / "config.json").read_text())
    quantization = config.pop("quantization_config")
    assert config == original
    assert quantization["quant_method"] == "compressed-tensors"
    assert quantization["format"] == "nvfp4-pack-quantized"
    assert quantization["ignore"] == ["lm_head", "model.layers.2.mlp.gate"]  # the head is tied: a module, no tensor
    assert not (ct / "hf_quant_config.json").exists()
    assert (ct / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()
    hf_quant = json.loads((quantized / "hf_quant_config.json").read_text())["quantization"]
    assert hf_quant == {
        "quant_algo": "W4A16_NVFP4",
        "kv_cache_quant_algo": None,
        "group_size": 16,
        "exclude_modules": ["lm_head", "model.layers.2.mlp.gate"],
    }


def test_dequantized_model_has_the_original_names_and_no_quantization(quantized, tmp_path, model):
    checkpoint.dequantize(quantized, tmp_path / "bf16", "bf16")
    plain, original = checkpoint.open(tmp_path / "bf16"), checkpoint.open(model)
    assert plain.format == "plain"
    assert set(plain) == set(original)
    assert "quantization_config" not in json.loads((tmp_path / "bf16" / "config.json").read_text())
    for name in original:
        assert plain[name].shape == original[name].shape
        assert plain[name].dtype == original[name].dtype
    q = checkpoint.open(quantized)
    for name in q.layers:
        assert np.array_equal(plain[name], fp4rt.dequantize(q.load(name), "bfloat16"))


@pytest.mark.parametrize("name, dtype", [("fp16", "float16"), ("fp32", "float32"), ("bf16", "bfloat16")])
def test_dequantized_dtype_is_the_one_asked_for(name, dtype, quantized, tmp_path):
    checkpoint.convert(quantized, tmp_path / "out", name)
    layer = "model.layers.0.self_attn.q_proj.weight"
    assert checkpoint.open(tmp_path / "out")[layer].dtype.name == dtype
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == dtype


def test_activation_scales_change_convention_too(tmp_path, files):
    tensors = {**files.modelopt(0.25), "w.input_scale": ("F32", [], files.f32(0.5))}
    path = files.make(tmp_path / "x.safetensors", tensors)
    checkpoint.convert(path, tmp_path / "ct.safetensors", "compressed-tensors")
    ct = TensorFile(tmp_path / "ct.safetensors")
    assert ct["w.input_global_scale"].tolist() == [2.0]
    config = json.loads(ct.metadata["quantization_config"])
    assert config["config_groups"]["group_0"]["input_activations"]["dynamic"] == "local"
    checkpoint.convert(tmp_path / "ct.safetensors", tmp_path / "mo.safetensors", "modelopt")
    assert TensorFile(tmp_path / "mo.safetensors")["w.input_scale"] == 0.5
    quantization = json.loads((tmp_path / "hf_quant_config.json").read_text())["quantization"]
    assert quantization["quant_algo"] == "NVFP4"


def stack(files, count, inputs):
    """B03's matrix ``count`` times, with activation scales of the shape ``inputs``."""
    return {
        "e.down_proj": ("U8", [count, 1, 8], files.codes * count),
        "e.down_proj_weight_scale": ("F8_E4M3", [count, 1, 1], b"\x40" * count),
        "e.down_proj_weight_scale_2": ("F32", [], files.f32(0.25)),
        "e.down_proj_input_scale": ("F32", inputs, files.f32(*[0.5] * math.prod(inputs))),
    }


@pytest.mark.parametrize("inputs", [[3], [0], [2, 2], [2, 0]])
def test_a_stack_has_one_activation_scale_or_one_for_each_expert(inputs, tmp_path, files):
    path = files.make(tmp_path / "x.safetensors", stack(files, 2, inputs))
    said = re.escape(f"'e.down_proj_input_scale' has shape {tuple(inputs)}; wanted () for one scale, or (2,) for one")
    with pytest.raises(CheckpointError, match=said):
        checkpoint.verify(path, "modelopt")
    with pytest.raises(CheckpointError, match=said):
        checkpoint.open(path, "modelopt")
    with pytest.raises(CheckpointError, match=said):
        checkpoint.convert(path, tmp_path / "y.safetensors", "compressed-tensors", format="modelopt")


@pytest.mark.parametrize("inputs", [[], [1], [1, 1], [2], [2, 1]])
def test_every_expert_keeps_its_activation_scale(inputs, tmp_path, files):
    path = files.make(tmp_path / "x.safetensors", stack(files, 2, inputs))
    assert checkpoint.verify(path, "modelopt") == []
    checkpoint.convert(path, tmp_path / "y.safetensors", "compressed-tensors", format="modelopt")
    converted = checkpoint.open(tmp_path / "y.safetensors")
    assert [converted.input_scale(f"e.{expert}.down_proj").tolist() for expert in range(2)] == [[2.0], [2.0]]


@pytest.mark.parametrize("kind, name", [("modelopt", "w.input_scale"), ("compressed_tensors", "w.input_global_scale")])
@pytest.mark.parametrize("shape", [[0], [2], [1, 0]])
def test_a_matrix_has_one_activation_scale(shape, kind, name, tmp_path, files):
    scale = ("F32", shape, files.f32(*[0.5] * math.prod(shape)))
    path = files.make(tmp_path / "x.safetensors", {**getattr(files, kind)(), name: scale})
    with pytest.raises(CheckpointError, match=rf"'{name}' has shape {re.escape(str(tuple(shape)))}; wanted \(1?,?\)"):
        checkpoint.open(path)


def test_a_fused_matrix_has_one_activation_scale_or_one_for_each_part(tmp_path, files):
    rows = {"fp4rt.fused_rows": json.dumps({"l.q_proj.weight": [1, 1]})}
    layer = {name: value for name, value in parts_of((1, 1, 1), files).items() if "q_proj" in name}
    layer["l.q_proj.weight_scale_2"] = ("F32", [2], files.f32(1, 2))
    for count in (1, 2, 3):
        layer["l.q_proj.input_scale"] = ("F32", [count], files.f32(*[0.5] * count))
        path = files.make(tmp_path / f"{count}.safetensors", layer, rows)
        if count == 3:
            with pytest.raises(CheckpointError, match=r"'l.q_proj.input_scale' has shape \(3,\); wanted .*, or \(2,\)"):
                checkpoint.open(path, "modelopt")
        else:
            assert checkpoint.open(path, "modelopt").input_scale("l.q_proj").tolist() == [2.0] * count


def test_a_stack_of_no_experts_is_refused(tmp_path, files):
    path = files.make(tmp_path / "x.safetensors", stack(files, 0, []))
    with pytest.raises(CheckpointError, match=r"'e.down_proj' has shape \(0, 1, 8\); a stack has 1 expert or more"):
        checkpoint.verify(path, "modelopt")


def test_layers_with_and_without_activation_scales_become_two_groups(tmp_path, files):
    other = {name.replace("w.", "v."): value for name, value in files.modelopt().items()}
    tensors = {**files.modelopt(), "w.input_scale": ("F32", [], files.f32(0.5)), **other}
    path = files.make(tmp_path / "x.safetensors", tensors)
    checkpoint.convert(path, tmp_path / "ct.safetensors", "compressed-tensors")
    groups = json.loads(TensorFile(tmp_path / "ct.safetensors").metadata["quantization_config"])["config_groups"]
    assert [(group["targets"], group["input_activations"] is None) for group in groups.values()] == [
        (["w"], False),
        (["v"], True),
    ]
    checkpoint.convert(tmp_path / "ct.safetensors", tmp_path / "mo.safetensors", "modelopt")
    quantization = json.loads((tmp_path / "hf_quant_config.json").read_text())["quantization"]
    assert quantization["quant_algo"] == "MIXED_PRECISION"
    assert quantization["quantized_layers"]["v"] == {"quant_algo": "W4A16_NVFP4", "group_size": 16}


@pytest.fixture(scope="module")
def stacked(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stacked")
    source = write_model(folder / "model", Size(**{**TINY.__dict__, "stacked": True}), shards=2)
    checkpoint.quantize(source, folder / "q")
    return source, folder / "q"


EXPERTS = "model.layers.2.mlp.experts"


def test_stacked_experts_have_a_global_scale_each(stacked):
    source, quantized = stacked
    opened, plain = checkpoint.open(quantized), checkpoint.open(source)
    layer = opened.layer(f"{EXPERTS}.gate_up_proj")
    assert layer.shape == (2, 64, 64)
    assert opened[f"{EXPERTS}.gate_up_proj_weight_scale_2"].shape == (2,)
    for expert in range(2):
        q = opened.load(f"{EXPERTS}.gate_up_proj", expert=expert)
        direct = fp4rt.quantize(plain[f"{EXPERTS}.gate_up_proj"][expert], float(q.global_scale[0]), layout="linear")
        assert np.array_equal(q.data, direct.data)
        assert np.array_equal(q.scales, direct.scales)
    with pytest.raises(CheckpointError, match="stack of 2 experts"):
        opened.load(f"{EXPERTS}.gate_up_proj")


def test_stacked_experts_become_modules_in_compressed_tensors(stacked, tmp_path):
    _, quantized = stacked
    ct = checkpoint.open(chain(quantized, tmp_path, "compressed-tensors"))
    before = checkpoint.open(quantized)
    for expert in range(2):
        whole = before.load(f"{EXPERTS}.gate_up_proj", expert=expert)
        gate, up = (ct.load(f"{EXPERTS}.{expert}.{part}") for part in ("gate_proj", "up_proj"))
        assert np.array_equal(np.concatenate([gate.data, up.data]), whole.data)
        assert np.array_equal(np.concatenate([gate.scales, up.scales]), whole.scales)
        assert gate.global_scale[0] == up.global_scale[0] == whole.global_scale[0]
        down = ct.load(f"{EXPERTS}.{expert}.down_proj")
        assert np.array_equal(down.data, before.load(f"{EXPERTS}.down_proj", expert=expert).data)


def test_stacked_experts_are_compared_with_those_that_lie_apart(stacked, tmp_path):
    source, quantized = stacked
    ct = chain(quantized, tmp_path, "compressed-tensors")
    modules = {f"{EXPERTS}.{e}.{part}_proj.weight" for e in range(2) for part in ("gate", "up", "down")}
    for a, b in ((quantized, ct), (ct, quantized)):
        rows = checkpoint.compare(a, b)
        assert {row.verdict for row in rows} == {"identical"}
        assert modules < {row.name for row in rows}
    whole = {row.name: row for row in checkpoint.compare(source, quantized)}
    apart = {row.name: row for row in checkpoint.compare(source, ct)}
    assert all(row.verdict == "differs" and row.sqnr_db > 15 for name, row in apart.items() if name in modules)
    assert all(row == whole[name] for name, row in apart.items() if name not in modules)
    stacks = [whole[f"{EXPERTS}.{name}"] for name in ("gate_up_proj", "down_proj")]
    assert max(row.max_error for row in stacks) == max(apart[name].max_error for name in modules)


@pytest.mark.parametrize("transposed", [False, True])
def test_unquantized_stacks_are_compared_with_experts_apart(transposed, tmp_path):
    rng = np.random.default_rng(4)
    gate_up = rng.standard_normal((2, 12, 16), np.float32)
    lies = np.ascontiguousarray(gate_up.transpose(0, 2, 1)) if transposed else gate_up
    halves = {
        f"experts.{e}.{name}_proj.weight": gate_up[e, 6 * i : 6 * i + 6]
        for e in range(2)
        for i, name in enumerate(("gate", "up"))
    }
    wrong = {**halves, "experts.1.up_proj.weight": halves["experts.1.up_proj.weight"] + 1}
    del wrong["experts.0.gate_proj.weight"]
    for name, tensors in {"stack": {"experts.gate_up_proj": lies}, "apart": halves, "wrong": wrong}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text('{"hidden_size": 16}')
        checkpoint.save(tmp_path / name / "model.safetensors", tensors)
    verdicts = {
        b: {row.name: row.verdict for row in checkpoint.compare(tmp_path / "stack", tmp_path / b)}
        for b in ("apart", "wrong")
    }
    assert verdicts["apart"] == dict.fromkeys(halves, "identical")
    assert verdicts["wrong"] == {
        "experts.0.gate_proj.weight": "only in A",
        "experts.0.up_proj.weight": "identical",
        "experts.1.gate_proj.weight": "identical",
        "experts.1.up_proj.weight": "differs",
    }


def test_a_stack_is_not_taken_apart_where_gate_and_up_alternate_or_nobody_keeps_them_apart(tmp_path):
    x = np.ones((2, 16, 16), np.float32)
    tensors = {"a": {"experts.gate_up_proj": x}, "b": {"experts.0.gate_proj.weight": x[0]}, "c": {"z": x}}
    for name, table in tensors.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text('{"model_type": "gpt_oss"}')
        checkpoint.save(tmp_path / name / "model.safetensors", table)
    for b in "bc":
        assert {row.name: row.verdict for row in checkpoint.compare(tmp_path / "a", tmp_path / b)} == {
            "experts.gate_up_proj": "only in A",
            next(iter(tensors[b])): "only in B",
        }


def test_transposed_stacks_are_compared_with_every_form_that_they_take(tmp_path):
    rng = np.random.default_rng(6)
    (tmp_path / "plain").mkdir()
    stacks = {"experts.gate_up_proj": (2, 32, 48), "experts.down_proj": (2, 16, 32)}
    tensors = {name: rng.standard_normal(shape, np.float32) for name, shape in stacks.items()}
    checkpoint.save(tmp_path / "plain" / "model.safetensors", tensors)
    (tmp_path / "plain" / "config.json").write_text('{"model_type": "llama4"}')
    checkpoint.quantize(tmp_path / "plain", tmp_path / "q")
    checkpoint.convert(tmp_path / "q", tmp_path / "apart", "compressed-tensors")
    for name in ("q", "apart"):
        checkpoint.dequantize(tmp_path / name, tmp_path / f"{name} as floats", "fp32")
    for a, b, verdict, count in (
        ("q", "apart", "identical", 6),
        ("q", "q as floats", "same values", 2),
        ("q", "apart as floats", "same values", 6),
        ("apart", "q as floats", "same values", 6),
        ("q as floats", "apart as floats", "identical", 6),
        ("plain", "q", "differs", 2),
        ("plain", "apart", "differs", 6),
    ):
        for pair in ((a, b), (b, a)):
            rows = checkpoint.compare(*(tmp_path / name for name in pair))
            assert [row.verdict for row in rows] == [verdict] * count, pair
            assert all(row.sqnr_db > 15 for row in rows), pair


def test_a_stack_is_not_taken_apart_into_names_that_are_there_or_halves_that_are_none(tmp_path):
    x = np.ones((2, 6, 16), np.float32)
    stack, module = "experts.gate_up_proj", "experts.0.gate_proj.weight"
    half = {module: x[0, :3]}
    tensors = {"both": {stack: x, **half}, "apart": half, "stack": {stack: x}, "odd": {stack: x[:, :5]}}
    for name, table in tensors.items():
        checkpoint.save(tmp_path / f"{name}.safetensors", table)

    def verdicts(a, b):
        rows = checkpoint.compare(tmp_path / f"{a}.safetensors", tmp_path / f"{b}.safetensors")
        return {row.name: row.verdict for row in rows}

    assert verdicts("both", "apart") == {stack: "only in A", module: "identical"}
    assert verdicts("apart", "both") == {module: "identical", stack: "only in B"}
    assert verdicts("stack", "both") == {stack: "identical", module: "only in B"}
    assert verdicts("odd", "apart") == {stack: "only in A", module: "only in B"}


def test_stacked_experts_survive_comfy(stacked, tmp_path, read_tree):
    _, quantized = stacked
    last = chain(quantized, tmp_path, "comfy", "modelopt")
    assert read_tree(last) == read_tree(quantized)


def test_experts_stored_transposed_are_quantized_along_k(tmp_path):
    """Llama 4 and gpt-oss keep (experts, k, n): blocks still run along k."""
    rng = np.random.default_rng(5)
    x = rng.standard_normal((2, 48, 20), np.float32)
    source = tmp_path / "model"
    source.mkdir()
    checkpoint.save(source / "model.safetensors", {"experts.gate_up_proj": x})
    (source / "config.json").write_text('{"model_type": "llama4"}')
    checkpoint.quantize(source, tmp_path / "q")
    opened = checkpoint.open(tmp_path / "q")
    assert opened["experts.gate_up_proj"].shape == (2, 24, 20)
    assert opened["experts.gate_up_proj_weight_scale"].shape == (2, 3, 20)
    assert opened.layer("experts.gate_up_proj").transposed
    for expert in range(2):
        q = opened.load("experts.gate_up_proj", expert=expert)
        direct = fp4rt.quantize(np.ascontiguousarray(x[expert].T), float(q.global_scale[0]), layout="linear")
        assert np.array_equal(q.data, direct.data)
    checkpoint.dequantize(tmp_path / "q", tmp_path / "bf16")
    back = checkpoint.open(tmp_path / "bf16")["experts.gate_up_proj"]
    assert back.shape == x.shape
    assert np.abs(back.astype(np.float32) - x).max() < 0.5
    with pytest.raises(CheckpointError, match="no comfy form"):
        checkpoint.convert(tmp_path / "q", tmp_path / "comfy", "comfy")
    for form, layout in (("comfy", None), ("modelopt", "128x4"), ("modelopt", "8x4")):
        said = (
            f"stored as \\(experts, k, n\\), which has no {layout or form} form; modelopt keeps it, with linear scales"
        )
        with pytest.raises(CheckpointError, match=said):
            checkpoint.convert(tmp_path / "q", tmp_path / "c", form, layout=layout)
        with pytest.raises(CheckpointError, match=said):
            checkpoint.quantize(source, tmp_path / "c", checkpoint.QuantizeOptions(form, layout))
        assert not (tmp_path / "c").exists()


def test_interleaved_gate_and_up_are_not_cut(tmp_path):
    source = tmp_path / "model"
    source.mkdir()
    x = np.random.default_rng(0).standard_normal((2, 32, 32)).astype(ml_dtypes.bfloat16)
    checkpoint.save(source / "model.safetensors", {"experts.gate_up_proj": x})
    (source / "config.json").write_text('{"model_type": "gpt_oss"}')
    checkpoint.quantize(source, tmp_path / "q")
    with pytest.raises(CheckpointError, match="interleaves"):
        checkpoint.convert(tmp_path / "q", tmp_path / "ct", "compressed-tensors")


def test_gate_and_up_of_an_odd_number_of_rows_are_not_cut(tmp_path, files):
    tensors = {
        "experts.gate_up_proj": ("U8", [2, 3, 8], files.codes * 6),
        "experts.gate_up_proj_weight_scale": ("F8_E4M3", [2, 3, 1], b"\x40" * 6),
        "experts.gate_up_proj_weight_scale_2": ("F32", [2], files.f32(1, 1)),
    }
    path = files.make(tmp_path / "x.safetensors", tensors)
    with pytest.raises(CheckpointError, match="'experts.gate_up_proj' has 3 rows an expert; gate and up need"):
        checkpoint.convert(path, tmp_path / "ct.safetensors", "compressed-tensors")


def parts_of(decodes, files, rows=2):
    rng = np.random.default_rng(1)
    tensors = {}
    for name, decode in zip("qkv", decodes, strict=True):
        tensors[f"l.{name}_proj.weight"] = ("U8", [rows, 16], rng.integers(0, 256, rows * 16, np.uint8).tobytes())
        scales = rng.integers(0x20, 0x70, rows * 2, np.uint8).tobytes()
        tensors[f"l.{name}_proj.weight_scale"] = ("F8_E4M3", [rows, 2], scales)
        tensors[f"l.{name}_proj.weight_scale_2"] = ("F32", [], files.f32(decode))
        tensors[f"l.{name}_proj.bias"] = ("F32", [rows], files.f32(*range(rows)))
    return tensors


QKV = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}


def whole(path):
    opened = checkpoint.open(path)
    return np.concatenate([fp4rt.dequantize(opened.load(f"l.{name}_proj")) for name in "qkv"])


def test_fusing_equal_scales_is_lossless(tmp_path, files):
    path = files.make(tmp_path / "x.safetensors", parts_of((0.25, 0.25, 0.25), files))
    for mode in ("keep", "rescale"):
        report = checkpoint.convert(
            path, tmp_path / f"{mode}.safetensors", "modelopt", fuse=QKV, fused_scales=mode, overwrite=True
        )
        fused = checkpoint.open(tmp_path / f"{mode}.safetensors")
        assert np.array_equal(fp4rt.dequantize(fused.load("l.qkv_proj")), whole(path))
        assert fused["l.qkv_proj.bias"].tolist() == [0, 1] * 3
        assert next(row.note for row in report.tensors if row.action == "fused") == "lossless"
        assert report.notes == []


def test_fusing_different_scales_can_keep_them_by_part(tmp_path, files):
    path = files.make(tmp_path / "x.safetensors", parts_of((0.25, 1.0, 0.3), files))
    report = checkpoint.convert(path, tmp_path / "f.safetensors", "modelopt", fuse=QKV, fused_scales="keep")
    assert report.notes == [
        "1 fused layer has a global scale for each part (as 'l.qkv_proj'), which a reader must apply by rows; "
        "--fused-scales rescale makes them one"
    ]
    fused = checkpoint.open(tmp_path / "f.safetensors")
    assert fused["l.qkv_proj.weight_scale_2"].shape == (3,)
    parts = fused.load_parts("l.qkv_proj")
    assert np.array_equal(np.concatenate([fp4rt.dequantize(part) for part in parts]), whole(path))
    with pytest.raises(CheckpointError, match="3 global scales.*load_parts"):
        fused.load("l.qkv_proj")
    checkpoint.dequantize(tmp_path / "f.safetensors", tmp_path / "plain.safetensors", "fp32")
    assert np.array_equal(checkpoint.open(tmp_path / "plain.safetensors")["l.qkv_proj.weight"], whole(path))
    for form in ("compressed-tensors", "comfy"):
        checkpoint.convert(tmp_path / "f.safetensors", tmp_path / f"{form}.safetensors", form)
        again = checkpoint.open(tmp_path / f"{form}.safetensors").load_parts("l.qkv_proj")
        assert np.array_equal(np.concatenate([fp4rt.dequantize(part) for part in again]), whole(path))


def test_fusing_by_rescaling_states_its_loss(tmp_path, files):
    path = files.make(tmp_path / "x.safetensors", parts_of((0.25, 1.0, 0.3), files, rows=64))
    report = checkpoint.convert(path, tmp_path / "f.safetensors", "modelopt", fuse=QKV, fused_scales="rescale")
    row = next(row for row in report.tensors if row.name == "l.qkv_proj.weight")
    got, wanted = fp4rt.dequantize(checkpoint.open(tmp_path / "f.safetensors").load("l.qkv_proj")), whole(path)
    assert np.array_equal(got[64:128], wanted[64:128])  # the part with the largest range is untouched
    error = got.astype(np.float64) - wanted
    assert row.max_error == np.abs(error).max() > 0
    assert row.sqnr_db == pytest.approx(10 * np.log10((wanted.astype(np.float64) ** 2).sum() / (error**2).sum()))
    assert np.all(np.abs(error) <= np.abs(wanted) / 16 + 2.0**-9 * 6)  # half a unit of e4m3
    assert "rounded again" in row.note
    assert report.notes == []
    lost = [FusedParts((), 30.0, 0.5, count).describe() for count in (1, 2)]
    assert lost == ["1 block scale was rounded again: 30.0 dB", "2 block scales were rounded again: 30.0 dB"]


def test_block_scales_that_are_nan_before_and_after_fusing_are_no_loss():
    x = np.random.default_rng(3).standard_normal((4, 32)).astype(np.float32)
    parts = [fp4rt.quantize(x, global_scale=np.float32(scale), layout="linear") for scale in (100.0, 300.0)]
    clean = fuse(parts, "rescale")
    parts[1].scales[2, 1] = 0x7F
    spoilt = fuse(parts, "rescale")
    assert np.isnan(fp4rt.dequantize(spoilt.parts[0])[4 + 2, 16:]).all()
    assert clean.lost_blocks - 1 <= spoilt.lost_blocks <= clean.lost_blocks
    assert 0 < spoilt.max_error <= clean.max_error
    assert 20 < spoilt.sqnr_db < 60


def test_fusing_names_a_missing_part(tmp_path, files):
    tensors = {name: value for name, value in parts_of((1, 1, 1), files).items() if ".k_proj" not in name}
    path = files.make(tmp_path / "x.safetensors", tensors)
    with pytest.raises(CheckpointError, match=r"'l.k_proj' is missing"):
        checkpoint.convert(path, tmp_path / "f.safetensors", "modelopt", fuse=QKV)


def test_scales_by_part_without_their_rows_are_refused(tmp_path, files):
    tensors = {**files.modelopt(), "w.weight_scale_2": ("F32", [2], files.f32(1, 2))}
    with pytest.raises(CheckpointError, match=r"holds 2 scales.*fp4rt.fused_rows"):
        checkpoint.open(files.make(tmp_path / "x.safetensors", tensors))


def test_fusing_into_a_name_that_no_header_holds_is_refused(tmp_path, files):
    path = files.make(tmp_path / "x.safetensors", parts_of((1, 1, 1), files))
    with pytest.raises(CheckpointError, match=r"name must be a string of UTF-8, got 'qkv\\udcff'"):
        checkpoint.convert(path, tmp_path / "f.safetensors", "modelopt", fuse={"qkv\udcff": QKV["qkv_proj"]})
    assert not (tmp_path / "f.safetensors").exists()


def test_half_a_surrogate_pair_of_a_configuration_goes_along(tmp_path, files):
    folder = tmp_path / "mo"
    folder.mkdir()
    files.make(folder / "model.safetensors", files.modelopt())
    (folder / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4"}}')
    (folder / "config.json").write_text(r'{"prompt": "a\ud800\u00e4"}')
    checkpoint.convert(folder, tmp_path / "ct", "compressed-tensors")
    assert json.loads((tmp_path / "ct" / "config.json").read_bytes())["prompt"] == "a\ud800ä"


@pytest.mark.parametrize("part", ["pre_quant_scale", "svdquant_lora_a"])
def test_what_another_format_would_lose_is_refused(part, tmp_path, files):
    tensors = {**files.modelopt(), f"w.{part}": ("F32", [16], bytes(64))}
    path = files.make(tmp_path / "x.safetensors", tensors)
    with pytest.raises(CheckpointError, match=f"w.{part}.*changes what the layer computes"):
        checkpoint.convert(path, tmp_path / "y.safetensors", "compressed-tensors")
    with pytest.raises(CheckpointError, match="a plain checkpoint"):
        checkpoint.dequantize(path, tmp_path / "y.safetensors")


def test_layers_of_other_quantizations_are_not_carried_into_another_format(tmp_path, files):
    fp8 = {"v.weight": ("F8_E4M3", [2, 16], bytes(32)), "v.weight_scale": ("F32", [], files.f32(1))}
    path = files.make(tmp_path / "x.safetensors", {**files.modelopt(), **fp8})
    with pytest.raises(CheckpointError, match=r"'v.weight' is quantized as F8_E4M3"):
        checkpoint.convert(path, tmp_path / "y.safetensors", "comfy")
    checkpoint.convert(path, tmp_path / "y.safetensors", "modelopt", layout="128x4")  # the same format: copied
    assert bytes(TensorFile(tmp_path / "y.safetensors").raw("v.weight")) == bytes(32)
    folder = tmp_path / "mixed"
    folder.mkdir()
    path.rename(folder / "model.safetensors")
    layers = {"w": {"quant_algo": "W4A16_NVFP4", "group_size": 16}, "v": {"quant_algo": "FP8"}}
    table = {"quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}}
    (folder / "hf_quant_config.json").write_text(json.dumps(table))
    with pytest.raises(CheckpointError, match=r"'v.weight' is quantized as F8_E4M3.*would not tell of it"):
        checkpoint.convert(folder, tmp_path / "z", "modelopt")  # the same, but its description is written anew


def test_fp8_cache_scheme_is_translated(tmp_path, files):
    folder = tmp_path / "mo"
    folder.mkdir()
    files.make(folder / "model.safetensors", files.modelopt())
    table = {"quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}}
    (folder / "hf_quant_config.json").write_text(json.dumps(table))
    ct = chain(folder, tmp_path, "compressed-tensors")
    scheme = json.loads((ct / "config.json").read_text())["quantization_config"]["kv_cache_scheme"]
    assert scheme["num_bits"] == 8
    back = chain(ct, tmp_path / "b", "modelopt")
    assert json.loads((back / "hf_quant_config.json").read_text())["quantization"]["kv_cache_quant_algo"] == "FP8"


def test_plain_checkpoint_is_not_converted(model, tmp_path):
    with pytest.raises(CheckpointError, match="fp4rt quantize"):
        checkpoint.convert(model, tmp_path / "x", "comfy")


def test_name_that_the_result_would_have_twice_is_refused(tmp_path, files):
    tensors = {**files.compressed_tensors(), "w.weight": ("F32", [1], bytes(4))}
    path = files.make(tmp_path / "x.safetensors", tensors)
    with pytest.raises(CheckpointError, match="two tensors of the result would be called 'w.weight'"):
        checkpoint.convert(path, tmp_path / "y.safetensors", "modelopt")
