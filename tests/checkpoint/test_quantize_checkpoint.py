"""What ``quantize`` takes, leaves, refuses and writes."""

from __future__ import annotations

import json
import re
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

import fp4rt
from fp4rt import checkpoint
from fp4rt.checkpoint.header import TensorEntry
from fp4rt.checkpoint.joined import joined_modules
from fp4rt.checkpoint.methods import (
    CANDIDATES,
    METHODS,
    Method,
    NonFinite,
    largest_magnitude,
    percentile,
    quantize_matrix,
)
from fp4rt.checkpoint.overrides import read_overrides
from fp4rt.checkpoint.selection import Selection
from fp4rt.cpu import reference
from fp4rt.errors import CheckpointError, DtypeError, LayoutError
from fp4rt.format import BLOCK, E2M1, E4M3, E4M3_MAX_BYTE, NEGATIVE_ZERO_CODE, R6


def entry(name, shape=(64, 64), dtype="BF16"):
    return TensorEntry(name, dtype, tuple(shape), 0, 0)


TAKEN = [
    "encoder.layer.0.attention.self.query.weight",
    "encoder.layer.0.attention.output.dense.weight",
    "encoder.layer.5.intermediate.dense.weight",
    "pooler.dense.weight",
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.0.mlp.gate_proj.weight",
    "model.layers.0.mlp.experts.7.down_proj.weight",
    "model.layers.0.mlp.shared_expert.up_proj.weight",
    "model.diffusion_model.blocks.0.norm1.linear.weight",
    "cls.predictions.transform.dense.weight",
    "model.decoder.layers.0.fc1.weight",
    "vision_model.head.mlp.fc1.weight",
    "weight",
]
LEFT = {
    "embeddings.word_embeddings.weight": "an embedding",
    "embeddings.token_type_embeddings.weight": "an embedding",
    "bert.embeddings.position_embeddings.weight": "an embedding",
    "model.embed_tokens.weight": "an embedding",
    "transformer.wte.weight": "an embedding",
    "encoder.layer.0.output.LayerNorm.weight": "a norm",
    "model.layers.0.input_layernorm.weight": "a norm",
    "model.norm.weight": "a norm",
    "transformer.h.0.ln_1.weight": "a norm",
    "lm_head.weight": "the output head",
    "output.weight": "the output head",
    "language_model.output.weight": "the output head",
    "model.layers.61.shared_head.head.weight": "the output head",
    "talker.codec_head.weight": "the output head",
    "head.weight": "the output head",
    "score.weight": "the output head",
    "classifier.weight": "the output head",
    "classifier.out_proj.weight": "the output head",
    "qa_outputs.weight": "the output head",
    "cls.predictions.decoder.weight": "the output head",
    "v_head.summary.weight": "the output head",
    "model.layers.0.mlp.gate.wg.weight": "a router",
    "model.layers.0.mlp.gate.weight": "a router",
    "model.layers.0.block_sparse_moe.gate.weight": "a router",
    "model.layers.0.mlp.router.layer.weight": "a router",
    "model.layers.0.mlp.shared_expert_gate.weight": "a router",
    "encoder.layer.0.attention.self.query.bias": "not a weight",
    "model.rotary_emb.inv_freq": "not a weight",
}


@pytest.mark.parametrize("name", TAKEN)
def test_linear_weights_are_taken_by_default(name):
    assert Selection().reason_to_leave(entry(name)) is None


@pytest.mark.parametrize("name", LEFT)
def test_other_tensors_are_left_with_a_reason(name):
    assert Selection().reason_to_leave(entry(name)) == LEFT[name]


def test_stacks_of_experts_are_taken_and_other_3d_tensors_left():
    assert Selection().reason_to_leave(entry("l.mlp.experts.gate_up_proj", (4, 32, 64))) is None
    assert Selection().reason_to_leave(entry("l.mlp.experts.gate_up_proj.weight", (4, 32, 64))) is None
    assert "3-dimensional" in Selection().reason_to_leave(entry("l.conv1d.weight", (64, 4, 16)))


def test_columns_that_are_no_multiple_of_sixteen_are_left_with_the_remedy():
    reason = Selection().reason_to_leave(entry("a.weight", (64, 50)))
    assert reason == "50 columns are no multiple of 16; --pad stores zeros behind them"
    assert Selection(pad=True).reason_to_leave(entry("a.weight", (64, 50))) is None
    assert Selection().reason_to_leave(entry("a.weight", (64, 1))).startswith("1 column is no multiple of 16;")


@pytest.mark.parametrize("dtype", ["I64", "U8", "F64", "F8_E4M3", "BOOL"])
def test_other_dtypes_are_left(dtype):
    assert dtype in Selection().reason_to_leave(entry("a.weight", dtype=dtype))


def test_include_takes_exactly_what_matches():
    selection = Selection(include=("lm_head",))
    assert selection.reason_to_leave(entry("lm_head.weight")) is None
    assert selection.reason_to_leave(entry("a.q_proj.weight")) == "matches no --include pattern"
    both = Selection(include=("default", "lm_head.weight"))
    assert both.reason_to_leave(entry("lm_head.weight")) is None
    assert both.reason_to_leave(entry("a.q_proj.weight")) is None
    assert both.reason_to_leave(entry("model.norm.weight")) == "a norm"


def test_exclude_wins_over_include():
    selection = Selection(include=("*",), exclude=("*.q_proj",))
    assert selection.reason_to_leave(entry("a.q_proj.weight")) == "excluded by a pattern"
    assert selection.reason_to_leave(entry("a.k_proj.weight")) is None


@pytest.mark.parametrize("options", [{"include": ("nothing.*",)}, {"exclude": ("typo",)}])
def test_pattern_that_fits_nothing_is_an_error(options, model, tmp_path):
    with pytest.raises(CheckpointError, match="fits no tensor"):
        checkpoint.quantize(model, tmp_path / "q", checkpoint.QuantizeOptions(selection=Selection(**options)))


@pytest.mark.parametrize(
    "options, error, said",
    [
        ({"input_amax": -1}, CheckpointError, "input_amax must be positive and finite.*got -1"),
        ({"input_amax": 0.0}, CheckpointError, "input_amax must be positive and finite"),
        ({"input_amax": np.inf}, CheckpointError, "input_amax must be positive and finite"),
        ({"input_amax": np.nan}, CheckpointError, "input_amax must be positive and finite"),
        ({"input_amax": 1e-36}, CheckpointError, "and so must 2688 / input_amax in fp32"),
        ({"input_amax": 1e39}, CheckpointError, "input_amax must be positive and finite"),
        ({"input_amax": 10**400}, CheckpointError, "input_amax must be positive and finite"),
        ({"input_amax": "6"}, DtypeError, "input_amax must be a number, got '6'"),
        ({"method": "mse"}, DtypeError, r"method as a Method, as Method\(\"mse\"\), got 'mse'"),
        ({"selection": "*mlp*"}, DtypeError, r"selection as a Selection, as Selection\(.*, got '\*mlp\*'"),
        ({"form": "gguf"}, CheckpointError, "unknown format 'gguf'"),
        ({"form": None}, DtypeError, "form as a string, got None"),
        ({"form": "comfy", "layout": "8x4"}, CheckpointError, "possible with modelopt only"),
        ({"layout": "9x9"}, LayoutError, "unknown scale layout '9x9'"),
        ({"layout": 128}, DtypeError, "layout as a string or None, got 128"),
        ({"activations": "no"}, DtypeError, "activations as a bool, got 'no'"),
        ({"override": "o.toml"}, DtypeError, "override as a function or None, got 'o.toml'"),
    ],
)
def test_options_that_cannot_be_are_refused_where_they_are_made(options, error, said):
    with pytest.raises(error, match=said):
        checkpoint.QuantizeOptions(**options)


def test_numbers_of_any_kind_are_taken_as_floats(tmp_path):
    """Fractions and integers beyond 64 bits have no format of their own in every Python."""
    checkpoint.save(tmp_path / "x.safetensors", {"a.weight": np.ones((2, 16), np.float32)})
    third = Fraction(1, 3)
    options = checkpoint.QuantizeOptions(activations=True, input_amax=third, method=Method("percentile", 100 - third))
    report = checkpoint.quantize(tmp_path / "x.safetensors", tmp_path / "q.safetensors", options)
    assert report.notes == [
        "activations: input_scale = 0.333333 / 2688, not calibrated; magnitudes up to 0.333333 are not clipped"
    ]
    assert report.tensors[0].method == "percentile 99.6667"
    assert options == checkpoint.QuantizeOptions(activations=True, input_amax=1 / 3, method=options.method)


@pytest.mark.parametrize("patterns", ["*mlp*", ("*", 1), None, 3])
@pytest.mark.parametrize("name", ["include", "exclude"])
def test_a_selection_takes_patterns_and_no_single_string(name, patterns):
    with pytest.raises(
        DtypeError, match=rf"needs {name} as a tuple or list of patterns.*got {re.escape(repr(patterns))}"
    ):
        Selection(**{name: patterns})
    assert Selection(**{name: ["*.a"]}).exclude == (["*.a"] if name == "exclude" else ())


def test_a_percentile_is_a_number():
    with pytest.raises(DtypeError, match="percentile must be a number, got '99'"):
        Method("percentile", "99")


@pytest.mark.parametrize(
    "arguments, error, said",
    [
        ({"jobs": 0}, CheckpointError, "jobs must be 1 or more, got 0"),
        ({"jobs": 1.5}, DtypeError, "jobs must be an integer, got 1.5"),
        ({"executor": 4}, DtypeError, "executor must have a function submit, got 4"),
        ({"progress": True}, DtypeError, "progress must be a function or None, got True"),
        ({"overwrite": "no"}, DtypeError, "needs overwrite as a bool, got 'no'"),
        ({"overwrite": 1}, DtypeError, "needs overwrite as a bool, got 1"),
        ({"dry_run": "no"}, DtypeError, "needs dry_run as a bool, got 'no'"),
    ],
)
def test_no_run_begins_with_arguments_that_cannot_be(arguments, error, said, model, quantized, tmp_path):
    for run in (
        lambda: checkpoint.quantize(model, tmp_path / "q", **arguments),
        lambda: checkpoint.convert(quantized, tmp_path / "q", "comfy", **arguments),
        lambda: checkpoint.dequantize(quantized, tmp_path / "q", **arguments),
    ):
        with pytest.raises(error, match=said):
            run()
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("path", [None, 3, b"q"])
def test_paths_are_strings_or_paths(path, quantized, tmp_path):
    for name, run in (
        ("quantize", checkpoint.quantize),
        ("convert", lambda source, target: checkpoint.convert(source, target, "comfy")),
        ("dequantize", checkpoint.dequantize),
    ):
        with pytest.raises(DtypeError, match=f"{name} needs source as a path, got {path!r}"):
            run(path, tmp_path / "q")
        with pytest.raises(DtypeError, match=f"{name} needs target as a path, got {path!r}"):
            run(quantized, path)


FUSE = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}


@pytest.mark.parametrize(
    "arguments, error, said",
    [
        ({"to": ["comfy"]}, DtypeError, r"convert needs to as a string, got \['comfy'\]"),
        ({"to": None}, DtypeError, "convert needs to as a string, got None"),
        ({"format": ["modelopt"]}, DtypeError, "convert needs format as a string or None"),
        ({"layout": 128}, DtypeError, "convert needs layout as a string or None, got 128"),
        ({"layout": "9x9"}, LayoutError, "unknown scale layout '9x9'"),
        ({"fuse": 5}, DtypeError, r"convert needs fuse as a mapping or None, as \{.*, got 5"),
        ({"fuse": ["a"]}, DtypeError, "convert needs fuse as a mapping or None"),
        ({"fuse": {"qkv_proj": "qkv"}}, DtypeError, "convert needs the parts of 'qkv_proj' as a list of strings"),
        (
            {"fuse": {"qkv_proj": ["q_proj", 1]}},
            DtypeError,
            "convert needs the parts of 'qkv_proj' as a list of strings",
        ),
        ({"fuse": FUSE, "fused_scales": 5}, DtypeError, "convert needs fused_scales as a string, got 5"),
        ({"fused_scales": "zzz"}, CheckpointError, "unknown way to fuse scales 'zzz'; use one of keep, rescale"),
        ({"fuse": FUSE, "fused_scales": "zzz"}, CheckpointError, "unknown way to fuse scales 'zzz'"),
        ({"fused_scales": "rescale"}, CheckpointError, "fused_scales='rescale' needs fuse.*; add that or drop it"),
        ({"to": "bf16", "fused_scales": "rescale"}, CheckpointError, "fused_scales='rescale' needs fuse"),
        ({"to": "bf16", "layout": ""}, CheckpointError, "bf16 is no NVFP4 format; fuse and layout do not apply"),
    ],
)
def test_no_conversion_begins_with_arguments_that_cannot_be(arguments, error, said, quantized, tmp_path):
    with pytest.raises(error, match=said):
        checkpoint.convert(quantized, tmp_path / "q", **{"to": "modelopt", **arguments})
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("arguments", [{"dtype": ["bf16"]}, {"dtype": None}, {"format": 3}])
def test_no_dequantization_does_either(arguments, quantized, tmp_path):
    (name,) = arguments
    with pytest.raises(DtypeError, match=f"dequantize needs {name} as a string"):
        checkpoint.dequantize(quantized, tmp_path / "q", **arguments)
    assert not any(tmp_path.iterdir())


def test_options_and_overrides_of_another_kind_leave_nothing_behind(model, tmp_path):
    with pytest.raises(DtypeError, match="needs options as QuantizeOptions or None, got 'mse'"):
        checkpoint.quantize(model, tmp_path / "q", "mse")
    options = checkpoint.QuantizeOptions(override=lambda name, method: "mse")
    with pytest.raises(DtypeError, match="override must give a Method or None, got 'mse' for 'model"):
        checkpoint.quantize(model, tmp_path / "q", options)
    assert not any(tmp_path.iterdir())


def test_untouched_tensors_keep_every_byte(model, quantized):
    before, after = checkpoint.open(model), checkpoint.open(quantized)
    for name in set(before) - set(after.layers):
        assert before[name].tobytes() == after[name].tobytes()
        assert before[name].dtype == after[name].dtype


def test_tied_embeddings_stay_floats_and_no_head_appears(quantized):
    opened = checkpoint.open(quantized)
    assert opened["model.embed_tokens.weight"].dtype == ml_dtypes.bfloat16
    assert not any("lm_head" in name for name in opened)


def test_quantized_head_is_not_listed_as_left_alone(tmp_path):
    x = weights(shape=(32, 32))
    source = save_plain(tmp_path, **{"model.embed_tokens.weight": x, "lm_head.weight": x, "model.a.weight": x})
    for include, ignored in ((("default",), ["lm_head"]), (("default", "lm_head"), [])):
        options = checkpoint.QuantizeOptions(selection=Selection(include=include))
        checkpoint.quantize(source, tmp_path / "q.safetensors", options, overwrite=True)
        quantization = json.loads((tmp_path / "hf_quant_config.json").read_text())["quantization"]
        assert quantization["exclude_modules"] == ignored
        assert checkpoint.verify(tmp_path / "q.safetensors") == []


def test_all_that_stays_floats_and_may_be_linear_is_listed(tmp_path):
    x, stack = weights(shape=(32, 32)), np.stack([weights(shape=(32, 32))] * 2)
    kept = {
        "vision.patch_embedding.linear.weight": x,
        "model.embed_vision.embedding_projection.weight": x,
        "model.embed_tokens_extend.image_embed.img_projection.0.weight": x,
        "model.layers.0.mlp.experts.gate_up_proj": stack,
        "model.layers.0.moe.input_linear.weight": stack,
        "lm_head.weight": x,
    }
    tables = {"model.embed_tokens.weight": x, "bert.embeddings.word_embeddings.weight": x, "a.norm.weight": x}
    source = save_plain(tmp_path, **kept, **tables, **{"model.layers.0.q_proj.weight": x})
    options = checkpoint.QuantizeOptions(selection=Selection(exclude=("*experts*",)))
    checkpoint.quantize(source, tmp_path / "q.safetensors", options)
    listed = json.loads((tmp_path / "hf_quant_config.json").read_text())["quantization"]["exclude_modules"]
    modules = {name.removesuffix(".weight").removesuffix(".gate_up_proj") for name in kept}
    assert listed == sorted(modules)


def test_a_model_whose_part_is_quantized_already_is_refused(tmp_path):
    folder = tmp_path / "m"
    folder.mkdir()
    save_plain(folder, **{"a.weight": weights()}).rename(folder / "model.safetensors")
    config = {"model_type": "x", "text_config": {"quantization_config": {"quant_method": "compressed-tensors"}}}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="is quantized already .quant_method 'compressed-tensors'"):
        checkpoint.quantize(folder, tmp_path / "q")


def test_result_equals_the_public_function_bit_for_bit(model, quantized):
    plain, opened = checkpoint.open(model), checkpoint.open(quantized)
    assert len(opened.layers) > 10
    joined = joined_modules(name.removesuffix(".weight") for name in opened.layers)
    assert len(joined) > 5
    for name in opened.layers:
        q = opened.load(name)
        direct = fp4rt.quantize(plain[name], float(q.global_scale[0]), layout="linear")
        assert np.array_equal(q.data, direct.data)
        assert np.array_equal(q.scales, direct.scales)
        base = name.removesuffix(".weight")
        together = joined.get(base, (base,))
        automatic = min(float(fp4rt.global_scale(plain[f"{other}.weight"])[0]) for other in together)
        bits = np.array([automatic], np.float32).view(np.int32)
        assert abs(int(bits[0]) - int(q.global_scale.view(np.int32)[0])) <= 1


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("form", ["modelopt", "compressed-tensors"])
def test_layers_that_engines_join_have_one_global_scale(tmp_path, method, form):
    names = ("a.q_proj", "a.k_proj", "a.v_proj", "a.o_proj", "b.experts.0.w1", "b.experts.0.w3", "b.experts.0.w2")
    tensors = {f"{name}.weight": weights(seed=i) * 2.0**-i for i, name in enumerate(names)}
    source, target = save_plain(tmp_path, **tensors), tmp_path / "q.safetensors"
    report = checkpoint.quantize(source, target, checkpoint.QuantizeOptions(form=form, method=Method(method)))
    opened = checkpoint.open(target)
    scales = {name: float(opened.load(name).global_scale[0]) for name in names}
    assert scales["a.q_proj"] == scales["a.k_proj"] == scales["a.v_proj"] < scales["a.o_proj"]
    assert scales["b.experts.0.w1"] == scales["b.experts.0.w3"] < scales["b.experts.0.w2"]
    alone = quantize_matrix(np.asarray(tensors["a.q_proj.weight"]), Method(method))
    assert scales["a.q_proj"] == float(alone.global_scale[0])
    notes = {row.name: row.note for shard in report.shards for row in shard.tensors}
    assert notes["a.k_proj.weight"] == "one global scale with q_proj, v_proj"
    assert notes["a.o_proj.weight"] == ""
    own = Method("four-over-six" if method != "four-over-six" else "amax")
    options = checkpoint.QuantizeOptions(
        form=form, method=Method(method), override=lambda name, usual: own if "k_proj" in name else usual
    )
    checkpoint.quantize(source, tmp_path / "o.safetensors", options, overwrite=True)
    opened = checkpoint.open(tmp_path / "o.safetensors")
    scales = [float(opened.load(name).global_scale[0]) for name in names[:3]]
    assert scales[0] == scales[2] != scales[1]  # quantized in another way


def test_stacks_that_engines_join_have_one_global_scale_an_expert(tmp_path):
    gate, up = (np.stack([weights(seed=i) * 2.0 ** -(i % 3) for i in seeds]) for seeds in ((0, 1), (2, 3)))
    source = save_plain(tmp_path, **{"m.experts.gate_proj": gate, "m.experts.up_proj": up})
    checkpoint.quantize(source, tmp_path / "q.safetensors")
    opened = checkpoint.open(tmp_path / "q.safetensors")
    of_gate, of_up = (np.asarray(opened[f"m.experts.{name}_weight_scale_2"]) for name in ("gate_proj", "up_proj"))
    assert np.array_equal(of_gate, of_up)
    assert of_gate[0] != of_gate[1]


def save_plain(folder, **tensors):
    checkpoint.save(folder / "in.safetensors", tensors)
    return folder / "in.safetensors"


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_nan_and_infinity_are_refused_with_tensor_and_position(value, dtype, tmp_path):
    x = np.ones((40, 32), dtype)
    x[37, 5] = value
    source = save_plain(tmp_path, **{"a.weight": np.ones((2, 16), dtype), "b.weight": x})
    with pytest.raises(CheckpointError, match=rf"'b.weight' holds {float(value)} at \[37, 5\].*--exclude"):
        checkpoint.quantize(source, tmp_path / "out.safetensors")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.safetensors"]


def test_nan_in_a_stack_names_the_expert(tmp_path):
    x = np.ones((3, 16, 32), np.float32)
    x[2, 4, 7] = np.nan
    source = save_plain(tmp_path, **{"experts.up_proj": x})
    with pytest.raises(CheckpointError, match=r"at \[2, 4, 7\]"):
        checkpoint.quantize(source, tmp_path / "out.safetensors")


def test_padded_columns_are_zero_and_the_shape_is_remembered(tmp_path):
    x = np.random.default_rng(0).standard_normal((20, 50), np.float32)
    source = save_plain(tmp_path, **{"a.weight": x})
    for form in ("modelopt", "compressed-tensors", "comfy"):
        target = tmp_path / form / "out.safetensors"
        target.parent.mkdir()
        options = checkpoint.QuantizeOptions(form=form, selection=Selection(pad=True))
        checkpoint.quantize(source, target, options)
        q = checkpoint.load(target, "a")
        assert q.shape == (20, 50)
        assert q.padded_n == 64
        direct = fp4rt.quantize(x, float(q.global_scale[0]), layout="linear", padded_n=64)
        assert np.array_equal(q.data, direct.data)
        assert checkpoint.verify(target) == []
        checkpoint.dequantize(target, target.with_name("back.safetensors"), "fp32")
        assert checkpoint.open(target.with_name("back.safetensors"))["a.weight"].shape == (20, 50)


def test_w4a4_stores_an_activation_scale_and_says_it_is_not_calibrated(model, tmp_path):
    options = checkpoint.QuantizeOptions(activations=True, input_amax=672.0)
    report = checkpoint.quantize(model, tmp_path / "q", options)
    opened = checkpoint.open(tmp_path / "q")
    assert opened["model.layers.0.self_attn.q_proj.input_scale"] == np.float32(0.25)
    assert opened.input_scale("model.layers.0.self_attn.q_proj").tolist() == [4.0]
    assert "not calibrated" in report.notes[0]
    assert json.loads((tmp_path / "q/hf_quant_config.json").read_text())["quantization"]["quant_algo"] == "NVFP4"


def test_a_dry_run_refuses_what_the_run_would(model, quantized, tmp_path):
    single = tmp_path / "model.safetensors"
    checkpoint.save(single, {"a.weight": np.ones((16, 16), np.float32)})
    (tmp_path / "afile").touch()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").touch()
    other = tmp_path / "other"
    other.mkdir()
    checkpoint.quantize(single, other / "first.safetensors")
    (other / "hf_quant_config.json").write_text("{}")
    for source, target, said in (
        (model, tmp_path / "full", r"is not empty \(notes.txt"),
        (model, tmp_path / "afile", "is no folder; name one"),
        (model, tmp_path / "x.safetensors", "shards; name a folder"),
        (model, model, "is the source itself"),
        (single, single, "is the source itself"),
        (single, tmp_path / "none" / "x.safetensors", "none does not exist"),
        (single, other / "first.safetensors", "exists already"),
        (single, other / "second.safetensors", "exists already, describes first.safetensors"),
    ):
        for dry_run in (True, False):
            with pytest.raises(CheckpointError, match=said):
                checkpoint.quantize(source, target, dry_run=dry_run)
    checkpoint.quantize(model, tmp_path / "full", overwrite=True, dry_run=True)
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["notes.txt"]


def test_a_layer_that_engines_join_with_one_that_stays_float_is_noted(model, tmp_path):
    some = checkpoint.QuantizeOptions(selection=checkpoint.Selection(exclude=("*v_proj*",)))
    (note,) = checkpoint.quantize(model, tmp_path / "q", some, dry_run=True).notes
    assert re.fullmatch(
        r"\d+ quantized layers are beside others .* \(as 'model.layers.0.*_proj', without 'v_proj'\)", note
    )
    comfy = checkpoint.QuantizeOptions(selection=some.selection, form="comfy")
    assert checkpoint.quantize(model, tmp_path / "q", comfy, dry_run=True).notes == []
    whole = checkpoint.QuantizeOptions(selection=checkpoint.Selection(exclude=("*self_attn*",)))
    assert checkpoint.quantize(model, tmp_path / "q", whole, dry_run=True).notes == []


def test_quantized_checkpoints_are_not_quantized_again(quantized, tmp_path):
    with pytest.raises(CheckpointError, match="is NVFP4 already"):
        checkpoint.quantize(quantized, tmp_path / "q")


def test_other_quantized_checkpoints_are_refused(tmp_path):
    (tmp_path / "m").mkdir()
    checkpoint.save(tmp_path / "m/model.safetensors", {"a.weight": np.ones((2, 16), np.float32)})
    (tmp_path / "m/config.json").write_text('{"quantization_config": {"quant_method": "gptq"}}')
    with pytest.raises(CheckpointError, match="gptq"):
        checkpoint.quantize(tmp_path / "m", tmp_path / "q")


def test_dry_run_writes_nothing_and_tells_the_same_sizes(model, quantized, tmp_path):
    report = checkpoint.quantize(model, tmp_path / "q", dry_run=True)
    assert not (tmp_path / "q").exists()
    assert report.bytes_after == sum(a.nbytes for a in checkpoint.open(quantized).values())
    assert all(row.sqnr_db is None for row in report.tensors)


def weights(seed=0, shape=(64, 256)):
    return (np.random.default_rng(seed).standard_t(4, shape) * 0.02).astype(np.float32)


def noise(x, q):
    return float(np.square(fp4rt.dequantize(q).astype(np.float64) - x).sum())


def test_amax_method_is_the_public_function():
    x = weights()
    q = quantize_matrix(x, Method("amax"))
    direct = fp4rt.quantize(x, float(q.global_scale[0]), layout="linear")
    assert np.array_equal(q.data, direct.data)
    assert np.array_equal(q.scales, direct.scales)


def blocks_noise(x, q):
    error = np.square(fp4rt.dequantize(q).astype(np.float64) - x)
    return error.reshape(x.shape[0], -1, 16).sum(axis=2)


def test_mse_search_is_never_worse_in_any_block():
    x = weights()
    searched, plain = (quantize_matrix(x, Method(name)) for name in ("mse", "amax"))
    assert searched.global_scale[0] == plain.global_scale[0]
    worse = blocks_noise(x, searched) > blocks_noise(x, plain) * (1 + 1e-6)
    assert not worse.any()
    assert noise(x, searched) < 0.9 * noise(x, plain)


def brute_force(x, encode, candidates):
    """Codes and scales by trying every candidate on every block, in plain NumPy; the first of equal ones wins."""
    blocks = x.reshape(-1, BLOCK)
    v = np.abs(blocks).max(axis=1)
    reciprocal = np.float32(1) / encode
    best_error = np.full(len(blocks), np.inf)
    scales, codes = np.zeros(len(blocks), np.uint8), np.zeros(blocks.shape, np.uint8)
    for factor, offset in candidates:
        t = encode * (v * R6) * np.float32(factor)
        byte = np.clip(reference.nearest_even_code(t, E4M3).astype(int) + offset, 0, E4M3_MAX_BYTE)
        scale = E4M3.values[byte] * reciprocal
        enc = np.where(byte == 0, np.float32(0), np.float32(1) / np.where(byte == 0, np.float32(1), scale))
        trial = reference.nearest_even_code(np.abs(blocks) * enc[:, None], E2M1)
        decoded = (E2M1.values[trial] * scale[:, None]).astype(np.float64)
        error = np.zeros(len(blocks))
        for column in range(BLOCK):  # in the order of the kernel: sums of floats depend on it
            error += np.square(np.abs(blocks[:, column]).astype(np.float64) - decoded[:, column])
        better = error < best_error
        best_error[better], scales[better], codes[better] = error[better], byte[better], trial[better]
    codes[scales == 0] = 0
    signs = np.where(np.signbit(blocks) & (scales != 0)[:, None], NEGATIVE_ZERO_CODE, 0).astype(np.uint8)
    return reference.pack_codes((codes | signs).reshape(x.shape)), scales.reshape(x.shape[0], -1)


@pytest.mark.parametrize("method", sorted(CANDIDATES))
def test_search_finds_what_brute_force_finds(method):
    x = weights(shape=(96, 256))
    x[5, 16:32] = 0
    x[6, :16] = [-0.0] * 15 + [1e-30]
    q = quantize_matrix(x, Method(method))
    data, scales = brute_force(x, q.global_scale[0], CANDIDATES[method])
    assert np.array_equal(q.scales, scales)
    assert np.array_equal(q.data, data)


def test_four_over_six_makes_the_largest_magnitude_a_four_or_a_six():
    x = weights()
    q = quantize_matrix(x, Method("four-over-six"))
    values = np.abs(fp4rt.dequantize(q, "float32")).reshape(64, -1, 16).max(axis=2)
    scale = fp4rt.dequantize(
        fp4rt.QuantizedTensor(np.full_like(q.data, 0x22), q.scales, q.global_scale, q.shape, "linear")
    ).reshape(64, -1, 16)[:, :, 0]
    ratio = np.round(values / scale, 3)
    assert set(np.unique(ratio)) <= {3.0, 4.0, 6.0}  # 3 where rounding the scale went down past 3.5
    assert {4.0, 6.0} <= set(np.unique(ratio))
    assert noise(x, q) < noise(x, quantize_matrix(x, Method("amax")))


def test_four_over_six_normalizes_scales_to_256():
    x = weights()
    q = quantize_matrix(x, Method("four-over-six"))
    assert float(q.global_scale[0]) == pytest.approx(256 * 6 / np.abs(x).max(), rel=1e-6)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("percent", [0.01, 50, 99, 99.99, 100])
def test_percentile_is_exact(dtype, percent):
    x = weights().astype(dtype)
    wanted = np.quantile(np.abs(x.astype(np.float64)), percent / 100, method="inverted_cdf")
    assert percentile(x, percent) == wanted


def test_percentile_clips_and_the_report_counts_it(tmp_path):
    """CASES B28: clipping is never silent."""
    x = weights()
    x[3, 40] = 50.0
    source = save_plain(tmp_path, **{"a.weight": x})
    clipped = checkpoint.QuantizeOptions(method=Method("percentile", 99.0))
    report = checkpoint.quantize(source, tmp_path / "p.safetensors", clipped)
    (row,) = report.tensors
    limit = 2688 / float(checkpoint.load(tmp_path / "p.safetensors", "a").global_scale[0])
    beyond = np.abs(x).reshape(64, -1, 16).max(axis=2) > limit * (1 + 2**-22)
    assert row.clipped_blocks == beyond.sum() > 0
    (row,) = checkpoint.quantize(source, tmp_path / "a.safetensors", overwrite=True).tensors
    assert row.clipped_blocks == 0


def test_zero_weight_stays_zero_with_a_finite_scale(tmp_path):
    """CASES B11 in a checkpoint."""
    source = save_plain(tmp_path, **{"a.weight": np.zeros((4, 32), np.float32)})
    for method in METHODS:
        options = checkpoint.QuantizeOptions(method=Method(method))
        (row,) = checkpoint.quantize(source, tmp_path / "q.safetensors", options, overwrite=True).tensors
        assert row.zero_blocks == row.blocks == 8
        q = checkpoint.load(tmp_path / "q.safetensors", "a")
        assert q.global_scale[0] == 1.0
        assert not q.data.any()


def test_comparison_measures_every_method(tmp_path):
    source = save_plain(tmp_path, **{"a.weight": weights()})
    options = checkpoint.QuantizeOptions(compare=True)
    (row,) = checkpoint.quantize(source, tmp_path / "q.safetensors", options).tensors
    assert set(row.methods) == set(METHODS) - {"amax"}
    assert row.methods["mse"] > row.sqnr_db


@pytest.mark.parametrize("method", METHODS)
def test_every_method_keeps_signs_of_zeros_and_partial_blocks(method):
    x = weights(shape=(5, 40))
    x[0, :3] = [-0.0, 0.0, -0.0]
    q = quantize_matrix(x, Method(method))
    assert q.padded_n == 48
    assert [code & 0xF for code in (q.data[0, 0], q.data[0, 0] >> 4, q.data[0, 1])] == [8, 0, 8]
    assert not q.data[:, 20:].any()


def test_largest_magnitude_reads_everything_and_finds_the_first_bad_value():
    x = weights(shape=(3000, 512))
    assert largest_magnitude(x) == np.abs(x).max()
    x[2999, 511] = -np.inf
    with pytest.raises(NonFinite) as error:
        largest_magnitude(x)
    assert error.value.position == (2999, 511)


OVERRIDES = """
method = "mse"

[[layer]]
match = "*.mlp.*"
method = "four-over-six"

[[layer]]
match = "*.layers.0.mlp.down_proj"
quantize = false

[[layer]]
match = "*.q_proj.weight"
percentile = 99.9
"""


def test_overrides_choose_by_layer_and_the_last_rule_wins(model, tmp_path):
    (tmp_path / "o.toml").write_text(OVERRIDES)
    options = checkpoint.QuantizeOptions(override=read_overrides(tmp_path / "o.toml"))
    report = checkpoint.quantize(model, tmp_path / "q", options)
    rows = {row.name: row for row in report.tensors}
    assert rows["model.layers.0.mlp.up_proj.weight"].method == "four-over-six"
    assert rows["model.layers.0.mlp.down_proj.weight"].note == "left by an override"
    assert rows["model.layers.1.self_attn.q_proj.weight"].method == "percentile 99.9"
    assert rows["model.layers.1.self_attn.k_proj.weight"].method == "mse"


INHERITING = """
[[layer]]
match = "*.self_attn.*"
quantize = false

[[layer]]
match = "*.q_proj"
quantize = true

[[layer]]
match = "*.mlp.*"
method = "percentile"
"""


@pytest.mark.parametrize("top, usual", [("", "mse"), ("method = 'four-over-six'\n", "four-over-six")])
def test_what_a_rule_does_not_say_is_as_for_other_layers(top, usual, model, tmp_path):
    (tmp_path / "o.toml").write_text(top + INHERITING)
    read = read_overrides(tmp_path / "o.toml")
    assert read.takes_percentile
    options = checkpoint.QuantizeOptions(method=Method("mse", 50.0), override=read)
    rows = {row.name: row for row in checkpoint.quantize(model, tmp_path / "q", options).tensors}
    assert rows["model.layers.1.self_attn.q_proj.weight"].method == usual
    assert rows["model.layers.1.self_attn.k_proj.weight"].note == "left by an override"
    assert rows["model.layers.0.mlp.up_proj.weight"].method == "percentile 50"


def test_a_rule_for_tensors_that_are_left_anyway_is_an_error(model, tmp_path):
    (tmp_path / "o.toml").write_text("[[layer]]\nmatch = 'model.embed*'\nmethod = 'mse'")
    options = checkpoint.QuantizeOptions(override=read_overrides(tmp_path / "o.toml"))
    with pytest.raises(
        CheckpointError, match=r"'model\.embed\*' matches only tensors that are left \(.*; include them"
    ):
        checkpoint.quantize(model, tmp_path / "q", options)
    (tmp_path / "o.toml").write_text("[[layer]]\nmatch = 'model.embed*'\nquantize = false")
    options = checkpoint.QuantizeOptions(override=read_overrides(tmp_path / "o.toml"))
    assert checkpoint.quantize(model, tmp_path / "q", options).tensors


@pytest.mark.parametrize(
    "text, message",
    [
        ("method = 'best'", "unknown method 'best'"),
        ("nonsense = 1", "unknown key 'nonsense'"),
        ("'*.mlp.*' = 'mse'", r"known are layer, method, percentile; \[\[layer\]\] with match = \"GLOB\" and method ="),
        ("[[layer]]\nmatch = '*'\nx = 1", "unknown key 'x'; known are match, method, percentile, quantize$"),
        ("[[layer]]\nmethod = 'mse'", "needs match"),
        ("[[layer]]\nmatch = '*'\nquantize = 'no'", "true or false"),
        ("[[layer]]\nmatch = '*'", r"the rule '\*' says nothing"),
        ("[[layer]]\nmatch = '*'\npercentile = 101", "percentile must lie"),
        ("[[layer]]\nmatch = '*'\nmethod = 'mse'\npercentile = 99", "percentile means nothing to method = 'mse'"),
        ("percentile = 99\nmethod = 'amax'", "percentile means nothing to method = 'amax'"),
        ("[[layer]]\nmatch = '*.up'\nquantize = false\nmethod = 'mse'", r"'\*\.up' has quantize = false and a method"),
        ("[[layer]]\nmatch = '*'\nquantize = false\npercentile = 99", "has quantize = false and a method"),
        ("layer = 3", "list of tables"),
        ("x = ", "not valid TOML"),
    ],
)
def test_broken_overrides_name_file_and_reason(text, message, tmp_path):
    (tmp_path / "o.toml").write_text(text)
    with pytest.raises(CheckpointError, match=rf"o\.toml.*{message}"):
        read_overrides(tmp_path / "o.toml")


def test_override_that_matches_nothing_is_an_error(tmp_path):
    (tmp_path / "o.toml").write_text("[[layer]]\nmatch = 'typo.*'\nmethod = 'mse'")
    source = save_plain(tmp_path, **{"a.weight": weights()})
    options = checkpoint.QuantizeOptions(override=read_overrides(tmp_path / "o.toml"))
    with pytest.raises(CheckpointError, match=r"'typo.\*' matches no tensor"):
        checkpoint.quantize(source, tmp_path / "q.safetensors", options)
