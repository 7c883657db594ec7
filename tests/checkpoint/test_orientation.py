"""Blocks run along k, however a model stores its weights; what is stored otherwise is left or said, never guessed."""

from __future__ import annotations

import json

import numpy as np
import pytest

import fp4rt
from fp4rt import checkpoint
from fp4rt.errors import CheckpointError


def save_model(folder, tensors, config=None):
    folder.mkdir()
    rng = np.random.default_rng(2)
    arrays = {name: rng.standard_normal(shape, np.float32) for name, shape in tensors.items()}
    checkpoint.save(folder / "model.safetensors", arrays)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return arrays


def notes_of(report):
    return {row.name: row.note for row in report.tensors if row.action == "copied"}


LEFT = "stored as (k, n), as Hugging Face's Conv1D does; NVFP4 weights are (n, k)"
GPT2 = {
    "h.0.attn.c_attn.weight": (96, 288),
    "h.0.attn.c_proj.weight": (96, 96),
    "h.0.mlp.c_fc.weight": (96, 384),
    "h.0.mlp.c_fc2.weight": (96, 384),
    "h.0.mlp.c_proj.weight": (384, 96),
}


@pytest.mark.parametrize(
    "config",
    [
        *({"model_type": name} for name in ("gpt2", "openai-gpt", "imagegpt", "decision_transformer", "jais")),
        {"model_type": "vision-encoder-decoder", "decoder": {"model_type": "gpt2"}},
        {"model_type": "clvp", "decoder_config": {"model_type": "clvp_decoder"}},
    ],
    ids=lambda config: config["model_type"],
)
@pytest.mark.parametrize("named", ["folder", "file"])
def test_weights_of_conv1d_are_left_with_the_reason(config, named, tmp_path):
    source = tmp_path / "model"
    save_model(source, {**GPT2, "pooler.weight": (16, 96)}, config)
    report = checkpoint.quantize(source / ("model.safetensors" if named == "file" else ""), tmp_path / "q")
    assert notes_of(report) == dict.fromkeys(GPT2, LEFT)
    assert list(checkpoint.open(tmp_path / "q").layers) == ["pooler.weight"]
    quantization = json.loads((tmp_path / "q/hf_quant_config.json").read_text())["quantization"]
    assert quantization["exclude_modules"] == sorted(name.removesuffix(".weight") for name in GPT2)


def test_a_model_of_conv1d_alone_is_refused_and_so_is_including_its_weights(tmp_path):
    save_model(tmp_path / "model", GPT2, {"model_type": "gpt2"})
    included = checkpoint.QuantizeOptions(selection=checkpoint.Selection(include=("*",), pad=True))
    for options in (None, included):
        with pytest.raises(CheckpointError, match=r"nothing to quantize; every tensor is left: stored as \(k, n\)"):
            checkpoint.quantize(tmp_path / "model", tmp_path / "q", options)


def test_a_bias_tells_the_weights_of_conv1d_without_a_configuration(tmp_path):
    biases = {"h.0.attn.c_attn.bias": (288,), "h.0.attn.c_proj.bias": (96,)}
    save_model(tmp_path / "model", {**GPT2, **biases, "a.weight": (32, 48), "a.bias": (32,)})
    report = checkpoint.quantize(tmp_path / "model", tmp_path / "q")
    assert notes_of(report) == {**dict.fromkeys(GPT2, LEFT), **dict.fromkeys((*biases, "a.bias"), "not a weight")}


def test_the_same_names_are_linear_in_other_models(tmp_path):
    biases = {"h.0.attn.c_attn.bias": (96,), "h.0.attn.c_proj.bias": (96,)}
    save_model(tmp_path / "model", {**GPT2, **biases}, {"model_type": "gpt_bigcode"})
    checkpoint.quantize(tmp_path / "model", tmp_path / "q")
    assert set(checkpoint.open(tmp_path / "q").layers) == set(GPT2)


STACKS = {"l.experts.gate_up_proj": (2, 64, 48), "l.experts.down_proj": (2, 32, 64), "l.experts.odd": (2, 16, 16)}


@pytest.mark.parametrize(
    "config",
    [
        {"hidden_size": 64},
        {"model_type": "new", "text_config": {"hidden_size": 64}},
        *({"model_type": name} for name in ("llama4", "gpt_oss", "aria", "qwen3_vl_moe", "openai_privacy_filter")),
        {"model_type": "multimodal", "text_config": {"model_type": "llama4_text"}},
    ],
    ids=json.dumps,
)
@pytest.mark.parametrize("named", ["folder", "file"])
def test_stacks_are_quantized_along_k_by_shape_and_by_model(config, named, tmp_path):
    """Blocks along n would have scales of (2, 64, 3) for gate_up_proj."""
    source = tmp_path / "model"
    plain = save_model(source, STACKS, config)
    report = checkpoint.quantize(source / ("model.safetensors" if named == "file" else ""), tmp_path / "q")
    opened = checkpoint.open(tmp_path / "q")
    assert report.notes == []
    assert opened["l.experts.gate_up_proj_weight_scale"].shape == (2, 4, 48)
    for name in STACKS:
        assert opened.layer(name).transposed
        q = opened.load(name, expert=1)
        direct = fp4rt.quantize(np.ascontiguousarray(plain[name][1].T), float(q.global_scale[0]), layout="linear")
        assert np.array_equal(q.data, direct.data)


def test_a_shape_overrules_the_type_of_the_model(tmp_path):
    tensors = {"l.experts.gate_up_proj": (2, 48, 64), "l.experts.down_proj": (2, 64, 32)}
    save_model(tmp_path / "model", tensors, {"model_type": "qwen3_vl_moe", "text_config": {"hidden_size": 64}})
    assert checkpoint.quantize(tmp_path / "model", tmp_path / "q").notes == []
    opened = checkpoint.open(tmp_path / "q")
    assert not any(opened.layer(name).transposed for name in tensors)


@pytest.mark.parametrize("config", [None, {"model_type": "new"}, {"hidden_size": 999}, {"hidden_size": True}])
def test_what_is_assumed_of_a_stack_is_said(config, tmp_path):
    save_model(tmp_path / "model", {**STACKS, "a.weight": (16, 16)}, config)
    report = checkpoint.quantize(tmp_path / "model", tmp_path / "q")
    assert report.notes == [
        "3 stacks are taken as (experts, n, k), the last axis being k (as 'l.experts.gate_up_proj'): no config.json "
        "says otherwise; where it is (experts, k, n), leave it with --exclude"
    ]
    only = checkpoint.QuantizeOptions(selection=checkpoint.Selection(include=("a",)))
    assert checkpoint.quantize(tmp_path / "model", tmp_path / "r", only).notes == []


LATENT = {"hidden_size": 64, "moe_latent_size": 32, "moe_intermediate_size": 64}
APART = {"text_config": {"d_model": 64}, "vision_config": {"hidden_size": 96}}


@pytest.mark.parametrize(
    "config, up, down",
    [
        ({"model_type": "nemotron_h", **LATENT}, (4, 64, 32), (4, 32, 64)),
        ({"model_type": "vl", "llm_config": LATENT}, (4, 64, 32), (4, 32, 64)),
        ({**LATENT, "moe_latent_size": None}, (4, 64, 64), (4, 64, 64)),
        ({"hidden_size": 64, "moe_intermediate_size": 32}, (4, 48, 64), (4, 64, 48)),
        ({"text_config": {"hidden_size": 64}, "vision_config": {"hidden_size": 48}}, (4, 48, 64), (4, 64, 48)),
        (APART, (4, 96, 64), (4, 64, 96)),
    ],
)
def test_hidden_sizes_that_are_not_those_of_experts_flip_no_stack(config, up, down, tmp_path):
    """NemotronHExperts lie as (e, n, k) behind a projection to moe_latent_size; images have a hidden_size, too."""
    tensors = {"l.experts.up_proj": up, "l.experts.w1": up, "l.experts.down_proj": down}
    save_model(tmp_path / "model", tensors, config)
    checkpoint.quantize(tmp_path / "model", tmp_path / "q")
    opened = checkpoint.open(tmp_path / "q")
    assert not any(opened.layer(name).transposed for name in tensors)
    for name, (experts, rows, columns) in tensors.items():
        assert opened[f"{name}_weight_scale"].shape == (experts, rows, columns // 16)


@pytest.mark.parametrize(
    "config, told",
    [
        (LATENT, True),
        ({"hidden_size": 64}, False),
        ({"hidden_size": 32}, True),
        ({"hidden_size": 32, "moe_intermediate_size": 48}, True),  # experts with more rows than the model says
        ({"thinker_config": {"hidden_size": 128}, "talker_config": {"hidden_size": 32}}, False),
        (APART, False),
    ],
)
def test_an_orientation_that_no_extent_tells_is_said_to_be_assumed(config, told, tmp_path):
    save_model(tmp_path / "model", {"l.experts.up_proj": (4, 128, 32)}, config)
    notes = checkpoint.quantize(tmp_path / "model", tmp_path / "q").notes
    assert [note.partition(" (")[0] for note in notes] == ([] if told else ["1 stack is taken as"])


@pytest.mark.parametrize("inner", [None, 48])
def test_stacks_of_gates_and_ups_in_the_plural_lie_as_their_extents_say(inner, tmp_path):
    tensors = {"l.experts.gate_and_up_projs": (2, 64, 96), "l.experts.down_projs": (2, 48, 64)}
    save_model(tmp_path / "model", tensors, {"hidden_size": 64, "moe_intermediate_size": inner})
    assert checkpoint.quantize(tmp_path / "model", tmp_path / "q").notes == []
    opened = checkpoint.open(tmp_path / "q")
    assert all(opened.layer(name).transposed for name in tensors)


@pytest.mark.parametrize("inner", [16, 32, 128, 192])
@pytest.mark.parametrize("part", [None, "language_model", "llm", "lm_config", "generator"])
def test_parts_of_experts_and_padded_ones_lie_as_the_extents_at_their_ends_say(inner, part, tmp_path):
    tensors = {"l.experts.gate_up_proj": (2, 64, 2 * inner), "l.experts.down_proj": (2, inner, 64)}
    config = {"hidden_size": 64, "moe_intermediate_size": 96}
    save_model(tmp_path / "model", tensors, config if part is None else {part: config})
    checkpoint.quantize(tmp_path / "model", tmp_path / "q")
    opened = checkpoint.open(tmp_path / "q")
    assert [opened.layer(name).transposed for name in tensors] == [True, True]


def test_stacks_that_contradict_each_other_say_nothing_of_others(tmp_path):
    tensors = {"a.experts.up_proj": (2, 64, 32), "b.experts.up_proj": (2, 32, 64), "c.experts.odd": (2, 16, 16)}
    save_model(tmp_path / "model", tensors, {"hidden_size": 64})
    (note,) = checkpoint.quantize(tmp_path / "model", tmp_path / "q").notes
    assert "1 stack is taken as (experts, n, k), the last axis being k (as 'c.experts.odd')" in note
    opened = checkpoint.open(tmp_path / "q")
    assert [opened.layer(name).transposed for name in tensors] == [True, False, False]


def test_interleaved_rows_are_not_cut_where_only_the_file_is_named(tmp_path):
    save_model(tmp_path / "model", {"experts.gate_up_proj": (2, 32, 32)}, {"model_type": "gpt_oss"})
    checkpoint.quantize(tmp_path / "model", tmp_path / "q")
    with pytest.raises(CheckpointError, match="interleaves"):
        checkpoint.convert(
            tmp_path / "q" / "model.safetensors", tmp_path / "ct", "compressed-tensors", format="modelopt"
        )
