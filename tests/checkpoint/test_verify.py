"""``verify`` finds every broken invariant, ``compare`` and ``inspect`` tell the truth, ``open`` loads one layer."""

from __future__ import annotations

import json
import math
import re
import shutil

import ml_dtypes
import numpy as np
import pytest

import fp4rt
from fp4rt import checkpoint
from fp4rt.checkpoint.inspect import inspect
from fp4rt.checkpoint.store import Store
from fp4rt.errors import CheckpointError, DtypeError
from fp4rt.format import BLOCK
from fp4rt.layout import get_layout


def matrix(files, scale_bytes=b"\x38" * 8, data=None, rows=4, columns=32, layout=None, **extra):
    """A modelopt matrix of 4 x 32 with scales as given."""
    suffix, shape = ("", [rows, columns // 16])
    if layout is not None:
        suffix, shape = f"_{layout}", list(get_layout(layout).shape(rows, columns // 16))
    return {
        "w.weight": ("U8", [rows, columns // 2], data if data is not None else b"\x22" * (rows * columns // 2)),
        f"w.weight_scale{suffix}": ("F8_E4M3", shape, scale_bytes),
        "w.weight_scale_2": ("F32", [], files.f32(1.0)),
        **extra,
    }


def findings(files, tmp_path, tensors, metadata=None):
    return checkpoint.verify(files.make(tmp_path / "x.safetensors", tensors, metadata), "modelopt")


def test_sound_checkpoint_has_no_findings(quantized, files, tmp_path):
    assert checkpoint.verify(quantized) == []
    assert findings(files, tmp_path, matrix(files)) == []


@pytest.mark.parametrize("byte, word", [(0x7F, "NaN"), (0xFF, "NaN"), (0xB8, "negative"), (0x80, "negative")])
def test_nan_and_negative_scales_are_found_with_their_place(byte, word, files, tmp_path):
    scales = bytearray(b"\x38" * 8)
    scales[5] = scales[7] = byte
    found = findings(files, tmp_path, matrix(files, bytes(scales)))
    (finding,) = [finding for finding in found if word in finding.message]
    assert finding.severity == "error"
    assert finding.tensor == "w.weight"
    assert finding.message == f"2 block scales are {word}, first 0x{byte:02X} at row 2, block 1"


def test_dequantizing_counts_nan_and_negative_scales_in_the_report(files, tmp_path):
    stack = {
        "e.up_proj": ("U8", [2, 4, 8], b"\x22" * 64),
        "e.up_proj_weight_scale": ("F8_E4M3", [2, 4, 1], b"\x38\x7f\x38\x38\xb8\x7f\x38\x38"),
        "e.up_proj_weight_scale_2": ("F32", [2], files.f32(1.0, 1.0)),
    }
    path = files.make(tmp_path / "x.safetensors", {**matrix(files), **stack})
    for run in (checkpoint.dequantize, lambda *a, **k: checkpoint.convert(*a, "fp32", **k)):
        report = run(path, tmp_path / "y.safetensors", format="modelopt", overwrite=True)
        assert {row.name: (row.wrong_scales, row.note) for row in report.tensors} == {
            "w.weight": ({}, ""),
            "e.up_proj": ({"NaN": 2, "negative": 1}, "2 block scales are NaN, 1 block scale is negative"),
        }
    values = checkpoint.open(tmp_path / "y.safetensors")["e.up_proj"]
    assert np.isnan(values[:, 1]).all()
    assert values[1, 0].tolist() == [-1.0] * 16


@pytest.mark.parametrize("layout", ["128x4", "8x4"])
def test_nonzero_padding_of_tiled_scales_is_found(layout, files, tmp_path):
    known = get_layout(layout)
    scales = known.pack(np.full((4, 2), 0x38, np.uint8)).reshape(-1)
    assert findings(files, tmp_path, matrix(files, scales.tobytes(), layout=layout)) == []
    padding = np.flatnonzero(known.padding_mask(4, 2).reshape(-1))
    scales[padding[[0, -1]]] = 0x7F
    found = findings(files, tmp_path, matrix(files, scales.tobytes(), layout=layout))
    assert [finding.message for finding in found] == [f"2 padding bytes of {layout} scales are not zero"]


def test_codes_and_scales_behind_the_columns_are_found(files, tmp_path):
    metadata = {"fp4rt.shapes": json.dumps({"w.weight": [4, 17]})}
    clean = np.full((4, 16), 0x22, np.uint8)
    clean[:, 8], clean[:, 9:] = 0x02, 0
    assert findings(files, tmp_path, matrix(files, data=clean.tobytes()), metadata) == []
    odd = clean.copy()
    odd[2, 8] = 0x12
    (finding,) = findings(files, tmp_path, matrix(files, data=odd.tobytes()), metadata)
    assert finding.message == "codes behind column 17 are not zero"
    metadata = {"fp4rt.shapes": json.dumps({"w.weight": [4, 32]})}
    assert findings(files, tmp_path, matrix(files), metadata) == []


@pytest.mark.parametrize("shape", [[4, 0], [4, 33], [5, 32], [0, 32], [4], [4, 32, 1]])
def test_logical_shape_that_does_not_fit_is_refused(shape, files, tmp_path):
    metadata = {"fp4rt.shapes": json.dumps({"w.weight": shape})}
    with pytest.raises(CheckpointError, match=r"fp4rt\.shapes says 'w\.weight'"):
        findings(files, tmp_path, matrix(files), metadata)


@pytest.mark.parametrize("text", ["{", "[]", '{"a": 3}', '{"a": [1.5]}', '{"a": [true]}'])
def test_broken_metadata_is_refused(text, files, tmp_path):
    with pytest.raises(CheckpointError, match=r"fp4rt\.shapes in the metadata"):
        findings(files, tmp_path, matrix(files), {"fp4rt.shapes": text})


def test_rows_that_only_comfy_stores_must_be_zero(tmp_path):
    x = np.random.default_rng(0).standard_normal((20, 64), np.float32)
    checkpoint.save(tmp_path / "x.safetensors", {"w": fp4rt.quantize(x, layout="linear")}, format="comfy")
    raw = bytearray((tmp_path / "x.safetensors").read_bytes())
    start = int.from_bytes(raw[:8], "little") + 8 + 31 * 32
    raw[start] = 1
    (tmp_path / "x.safetensors").write_bytes(raw)
    (finding,) = checkpoint.verify(tmp_path / "x.safetensors")
    assert finding.message == "codes of rows behind row 20 are not zero"


def test_stray_codes_under_a_zero_scale_are_a_warning(files, tmp_path):
    (finding,) = findings(files, tmp_path, matrix(files, b"\x00" + b"\x38" * 7))
    assert (finding.severity, finding.message) == ("warning", "1 block of scale 0 has codes that are not 0")


def test_layer_that_the_configuration_excludes_is_found(files, tmp_path):
    files.make(tmp_path / "model.safetensors", matrix(files))
    table = {"quantization": {"quant_algo": "NVFP4", "exclude_modules": ["w*"]}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(table))
    (finding,) = checkpoint.verify(tmp_path)
    assert finding.message == "is quantized, but the configuration excludes it by 'w*'"


@pytest.mark.parametrize(("entry", "found"), [("re:.*w", True), ("re:w$", True), ("re:x", False), ("re:(", False)])
def test_regular_expressions_exclude_as_in_compressed_tensors(entry, found, files, tmp_path):
    files.make(tmp_path / "model.safetensors", files.compressed_tensors())
    quantization = {"quant_method": "compressed-tensors", "ignore": [entry]}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    messages = [finding.message for finding in checkpoint.verify(tmp_path)]
    assert messages == [f"is quantized, but the configuration excludes it by {entry!r}"] * found


@pytest.mark.parametrize("form", ["modelopt", "compressed-tensors", "comfy"])
def test_joined_layers_with_different_global_scales_are_a_warning(form, tmp_path):
    x = np.random.default_rng(0).standard_normal((32, 64), np.float32)
    parts = {f"a.{n}_proj": fp4rt.quantize(x * i, layout="linear") for n, i in (("q", 1), ("k", 1), ("v", 2), ("o", 3))}
    checkpoint.save(tmp_path / "x.safetensors", parts, format=form)
    found = [(finding.severity, finding.tensor) for finding in checkpoint.verify(tmp_path / "x.safetensors")]
    assert found == ([] if form == "comfy" else [("warning", "a.v_proj.weight")])


HALF = {
    "modelopt": {
        "hf_quant_config.json": {
            "quantization": {"quant_algo": "NVFP4", "exclude_modules": ["*.v_proj", "c.self_attn"]}
        }
    },
    "compressed-tensors": {
        "config.json": {
            "quantization_config": {
                "quant_method": "compressed-tensors",
                "format": "nvfp4-pack-quantized",
                "config_groups": {"group_0": {"targets": ["Linear"]}},
                "ignore": ["re:.*v_proj", "c.self_attn.o_proj"],
            }
        }
    },
}


@pytest.mark.parametrize("form", ["modelopt", "compressed-tensors", "comfy"])
def test_layers_beside_which_others_stay_floats_are_a_warning_where_engines_join_them(form, tmp_path):
    x = np.random.default_rng(0).standard_normal((32, 64), np.float32)
    q = fp4rt.quantize(x, layout="linear")
    tensors = {"a.q_proj": q, "a.k_proj": q, "a.v_proj.weight": x, "a.o_proj.weight": x, "b.k_proj.weight": x}
    checkpoint.save(tmp_path / "x.safetensors", tensors, format=form)
    found = [(finding.severity, finding.tensor) for finding in checkpoint.verify(tmp_path / "x.safetensors")]
    assert found == ([] if form == "comfy" else [("warning", f"a.{n}_proj.weight") for n in "kq"])


@pytest.mark.parametrize("form", HALF)
def test_floats_that_the_configuration_takes_for_quantized_are_a_warning(form, tmp_path):
    x = np.random.default_rng(0).standard_normal((32, 64), np.float32)
    tensors = {"a.o_proj": fp4rt.quantize(x, layout="linear"), "a.v_proj.weight": x, "b.x_proj.weight": x}
    tensors |= {"embed_tokens.weight": x, "b.norm.weight": x[0], "b.x_proj.bias": x[0], "b.gate.weight": x}
    tensors |= {"c.self_attn.o_proj.weight": x}
    (tmp_path / "full").mkdir()
    checkpoint.save(tmp_path / "full" / "x.safetensors", tensors, format=form)
    with checkpoint.open(tmp_path / "full" / "x.safetensors") as files:  # plain tensors say nothing of themselves
        checkpoint.save(tmp_path / "model.safetensors", dict(files.items()))
    for name, content in HALF[form].items():
        (tmp_path / name).write_text(json.dumps(content))
    found = [(finding.tensor, finding.message) for finding in checkpoint.verify(tmp_path)]
    assert found == [("b.x_proj.weight", "is not quantized, but the configuration does not exclude it")]
    (tmp_path / "config.json").unlink(missing_ok=True)  # its layers may be named in another way
    mixed = {"quantization": {"quant_algo": "MIXED_PRECISION", "exclude_modules": []}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(mixed))
    if form == "modelopt":
        assert checkpoint.verify(tmp_path) == []


@pytest.mark.parametrize("size, said", [(5, "5"), ("9", "'9'"), (True, "True"), ([], "[]"), (math.nan, "nan")])
def test_a_size_in_the_index_that_is_not_the_tensors_is_a_warning(size, said, quantized, tmp_path):
    shutil.copytree(quantized, tmp_path / "q")
    index = tmp_path / "q" / "model.safetensors.index.json"
    table = json.loads(index.read_text())
    true = table["metadata"]["total_size"]
    index.write_text(json.dumps({**table, "metadata": {"total_size": size}}))
    (finding,) = checkpoint.verify(tmp_path / "q")
    assert (finding.severity, finding.tensor) == ("warning", "model.safetensors.index.json")
    assert finding.message == f"metadata.total_size is {said}; the tensors have {true} bytes"
    for metadata in ({"total_size": true}, {"total_size": float(true)}, {}, None, {"total_size": None}):
        index.write_text(json.dumps({**table, "metadata": metadata}))
        assert checkpoint.verify(tmp_path / "q") == []


def test_comparison_across_formats_finds_identical_layers(quantized, tmp_path):
    checkpoint.convert(quantized, tmp_path / "comfy", "comfy")
    rows = checkpoint.compare(quantized, tmp_path / "comfy")
    assert {row.verdict for row in rows} == {"identical"}
    assert len(rows) == len(checkpoint.open(quantized).layers) + sum(
        not name.endswith(("_scale", "_scale_2")) and name not in checkpoint.open(quantized).layers
        for name in checkpoint.open(quantized)
    )


def test_comparison_with_the_original_gives_the_error_of_quantization(model, quantized):
    rows = {row.name: row for row in checkpoint.compare(model, quantized)}
    plain, opened = checkpoint.open(model), checkpoint.open(quantized)
    for name in opened.layers:
        x = plain[name].astype(np.float64)
        error = fp4rt.dequantize(opened.load(name)).astype(np.float64) - x
        assert rows[name].verdict == "differs"
        assert rows[name].max_error == np.abs(error).max()
        wanted = 10 * math.log10(np.square(x).sum() / np.square(error).sum())
        assert rows[name].sqnr_db == pytest.approx(wanted, abs=1e-9)
    assert rows["model.norm.weight"].verdict == "identical"


def test_comparison_names_what_only_one_side_has(tmp_path):
    checkpoint.save(tmp_path / "a.safetensors", {"x": np.ones(4, np.float32), "y": np.ones(4), "s": np.ones((2, 2))})
    checkpoint.save(tmp_path / "b.safetensors", {"x": np.ones(4, np.float64), "z": np.ones(4), "s": np.ones((4, 1))})
    rows = {row.name: row for row in checkpoint.compare(tmp_path / "a.safetensors", tmp_path / "b.safetensors")}
    assert {name: row.verdict for name, row in rows.items()} == {
        "x": "same values",
        "y": "only in A",
        "s": "other shape",
        "z": "only in B",
    }
    assert [name for name, row in rows.items() if not row.matches] == ["y", "s", "z"]


@pytest.mark.parametrize("inputs", [None, 0.5, 0.25])
def test_layers_with_other_activation_scales_are_not_identical(inputs, files, tmp_path):
    def layer(scale):
        extra = {} if scale is None else {"w.input_scale": ("F32", [], files.f32(scale))}
        return files.make(tmp_path / f"{scale}.safetensors", matrix(files, **extra))

    (row,) = checkpoint.compare(layer(inputs), layer(0.5))
    assert row.verdict == ("identical" if inputs == 0.5 else "same values")


@pytest.mark.parametrize("scales", [[0.5], [0.5, 0.5], [0.5, 0.25]])
def test_one_scale_for_a_stack_is_one_for_each_expert(scales, files, tmp_path):
    def stack(scales):
        tensors = {
            "e.down_proj": ("U8", [2, 1, 8], files.codes * 2),
            "e.down_proj_weight_scale": ("F8_E4M3", [2, 1, 1], b"\x40\x40"),
            "e.down_proj_weight_scale_2": ("F32", [len(scales)], files.f32(*scales)),
        }
        return files.make(tmp_path / f"{len(scales)}.safetensors", tensors)

    (row,) = checkpoint.compare(stack([0.5]), stack(scales))
    assert row.verdict == ("identical" if set(scales) == {0.5} else "differs")


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_in_one_checkpoint_alone_is_no_small_error(bad, tmp_path):
    x = np.random.default_rng(0).standard_normal((4, 16), np.float32)
    broken = x.copy()
    broken[0, 3] = bad
    stored = {"x": x, "broken": broken, "wide": broken.astype(np.float64), "off": broken + np.float32(0.5)}
    for name, array in stored.items():
        checkpoint.save(tmp_path / f"{name}.safetensors", {"w": array})

    def against(a, b):
        (row,) = checkpoint.compare(tmp_path / f"{a}.safetensors", tmp_path / f"{b}.safetensors")
        return row

    for a, b in (("x", "broken"), ("broken", "x"), ("x", "wide")):
        assert against(a, b) == checkpoint.Difference("w", "differs", math.inf, -math.inf)
    assert against("broken", "wide") == checkpoint.Difference("w", "same values", 0.0, math.inf)
    row = against("broken", "off")
    numbers = np.delete(broken.astype(np.float64), 3)
    error = np.delete(stored["off"].astype(np.float64), 3) - numbers
    assert row.max_error == np.abs(error).max()
    assert row.sqnr_db == pytest.approx(10 * math.log10(np.square(numbers).sum() / np.square(error).sum()))


def test_a_layer_with_a_nan_scale_is_no_small_error_away(files, tmp_path):
    sound = files.make(tmp_path / "a.safetensors", matrix(files))
    broken = files.make(tmp_path / "b.safetensors", matrix(files, b"\x38" * 7 + b"\x7f"))
    for a, b in ((sound, broken), (broken, sound)):
        assert checkpoint.compare(a, b) == [checkpoint.Difference("w.weight", "differs", math.inf, -math.inf)]


def test_inspection_counts_what_is_there(quantized):
    found = inspect(Store(quantized), codes=True)
    opened = checkpoint.open(quantized)
    assert found.format == "modelopt"
    assert found.evidence == ["config.json (quant_method)", "hf_quant_config.json"]
    assert sum(nbytes for _, nbytes in found.dtypes.values()) == sum(array.nbytes for array in opened.values())
    for layer in found.layers:
        q = opened.load(layer.name)
        assert layer.shape == q.shape
        assert layer.blocks == q.shape[0] * q.shape[1] // BLOCK == sum(layer.scale_counts)
        codes = np.stack([q.data & 0xF, q.data >> 4]).reshape(-1)
        assert layer.code_counts == np.bincount(codes, minlength=16).tolist()
        assert layer.zero_blocks == np.count_nonzero(q.scales == 0)
        assert layer.saturated_blocks == np.count_nonzero(q.scales == 0x7E)
    json.dumps(found.to_json(), allow_nan=False)


def test_one_layer_is_loaded_in_three_lines_and_multiplied(quantized, model):
    opened = checkpoint.open(quantized)
    weight = opened.load("model.layers.0.self_attn.q_proj")
    x = np.random.default_rng(0).standard_normal((3, 64)).astype(ml_dtypes.bfloat16)
    y = fp4rt.matmul(x, weight, out_dtype="float32")
    wanted = x.astype(np.float64) @ fp4rt.dequantize(weight).astype(np.float64).T
    assert np.allclose(y, wanted, atol=64 * 2**-24 * np.abs(wanted).max() * 64)


def test_loaded_arrays_are_views_of_the_file(quantized):
    opened = checkpoint.open(quantized)
    q = opened.load("model.layers.0.self_attn.q_proj")
    raw = opened["model.layers.0.self_attn.q_proj.weight"]
    assert q.data.__array_interface__["data"][0] == raw.__array_interface__["data"][0]
    assert not q.data.flags.writeable


def test_layers_are_found_by_module_and_by_weight_and_others_are_refused(quantized):
    opened = checkpoint.open(quantized)
    name = "model.layers.0.self_attn.q_proj"
    assert np.array_equal(opened.load(name).data, opened.load(f"{name}.weight").data)
    with pytest.raises(CheckpointError, match="it is not quantized"):
        opened.load("model.norm")
    with pytest.raises(CheckpointError, match=r"it is not in it; \.layers lists those that are$"):
        opened.load("nothing")
    with pytest.raises(CheckpointError, match=r"it is not in it; there is 'model\.layers\.0\.self_attn\.q_proj'$"):
        opened.load("model.layers.0.self_attn.q_prj")
    with pytest.raises(KeyError):
        opened["model.nothing"]
    with pytest.raises(CheckpointError, match="is one matrix"):
        opened.load(name, expert=0)


def test_checkpoint_is_a_mapping_of_stored_tensors(quantized):
    with checkpoint.open(quantized) as opened:
        assert len(opened) == len(list(opened)) == len(dict(opened))
        assert "model.norm.weight" in opened
        assert opened["model.norm.weight"].dtype == ml_dtypes.bfloat16
        assert "modelopt" in repr(opened)


def test_a_checkpoint_of_one_layer_says_so_in_the_singular(tmp_path):
    q = fp4rt.quantize(np.ones((1, 2, 16), np.float32)[0], layout="linear")
    checkpoint.save(tmp_path / "x.safetensors", {"w": q})
    assert repr(checkpoint.open(tmp_path / "x.safetensors")).endswith("modelopt, 1 quantized layer, 3 tensors)")


def test_a_stack_of_one_expert_says_so_in_the_singular(files, tmp_path):
    stack = {
        "e.weight": ("U8", [1, 4, 8], bytes(32)),
        "e.weight_scale": ("F8_E4M3", [1, 4, 1], b"\x38" * 4),
        "e.weight_scale_2": ("F32", [1], files.f32(1.0)),
    }
    opened = checkpoint.open(files.make(tmp_path / "x.safetensors", stack), "modelopt")
    with pytest.raises(CheckpointError, match="is a stack of 1 expert; pass expert=0"):
        opened.load("e", expert=1)
    stack["e.weight_scale_2"] = ("F32", [2], files.f32(1.0, 1.0))
    with pytest.raises(CheckpointError, match="a stack of 1 expert needs one scale"):
        checkpoint.open(files.make(tmp_path / "x.safetensors", stack), "modelopt")


def test_a_fused_matrix_of_one_row_says_so_in_the_singular(files, tmp_path):
    tensors = {**matrix(files, b"\x38" * 2, rows=1), "w.weight_scale_2": ("F32", [2], files.f32(1.0, 1.0))}
    with pytest.raises(CheckpointError, match="which has 1 row and 2 global scales"):
        findings(files, tmp_path, tensors, {"fp4rt.fused_rows": json.dumps({"w.weight": [1, 1]})})


@pytest.mark.parametrize("form", ["modelopt", "compressed-tensors", "comfy"])
@pytest.mark.parametrize("layout", ["linear", "128x4", "8x4"])
def test_saved_tensors_come_back_whatever_layout_they_were_in(form, layout, tmp_path):
    x = np.random.default_rng(1).standard_normal((40, 80), np.float32)
    q = fp4rt.quantize(x, layout=layout, padded_n=96)
    table = {"a.weight": q, "b": x.astype(ml_dtypes.bfloat16), "c": np.arange(3)}
    checkpoint.save(tmp_path / "x.safetensors", table, format=form, metadata={"note": "kept"})
    opened = checkpoint.open(tmp_path / "x.safetensors")
    loaded = opened.load("a", layout=layout)
    assert loaded.shape == (40, 80)
    assert loaded.padded_n == 96
    assert np.array_equal(loaded.data, q.data)
    assert np.array_equal(loaded.scales, q.scales)
    assert opened.metadata["note"] == "kept"
    assert np.array_equal(opened["b"], table["b"])
    assert opened["c"].tolist() == [0, 1, 2]
    assert checkpoint.verify(tmp_path / "x.safetensors") == []


def test_torch_tensors_are_saved_bit_for_bit(tmp_path):
    torch = pytest.importorskip("torch", reason="needs torch")
    x = torch.randn(4, 32).to(torch.bfloat16)
    q = fp4rt.quantize(x, layout="linear")
    checkpoint.save(tmp_path / "x.safetensors", {"w": q, "x": x.t(), "s": x.to(torch.float8_e4m3fn)})
    opened = checkpoint.open(tmp_path / "x.safetensors")
    assert np.array_equal(opened.load("w").data, q.data.numpy())
    assert np.array_equal(opened["x"].view(np.int16), x.t().contiguous().view(torch.int16).numpy())
    assert opened["s"].dtype == ml_dtypes.float8_e4m3fn


def test_arrays_of_foreign_byte_order_keep_their_values(tmp_path):
    x = np.array([[1, 2, 3], [4, 5, 6]])
    table = {dtype: x.astype(dtype) for dtype in (">f2", ">f4", ">f8", ">i2", ">i4", ">i8", ">u4", ">c8")}
    checkpoint.save(tmp_path / "x.safetensors", {**table, "turned": table[">i4"].T})
    opened = checkpoint.open(tmp_path / "x.safetensors")
    for dtype, array in table.items():
        assert opened[dtype].dtype == np.dtype(dtype).newbyteorder("<")
        assert np.array_equal(opened[dtype], array)
    assert np.array_equal(opened["turned"], x.T)


def test_save_refuses_to_lose_a_mask(tmp_path):
    masked = np.ma.masked_array(np.arange(3, dtype=np.float32), [False, True, False])
    with pytest.raises(DtypeError, match=r"x is a masked array and its mask would be lost; pass x\.filled"):
        checkpoint.save(tmp_path / "x.safetensors", {"x": masked})
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("name", [1, None, b"x", "\ud800", "x\udcff"])
@pytest.mark.parametrize("quantized", [False, True])
def test_save_refuses_a_name_that_no_header_holds(quantized, name, tmp_path):
    x = np.ones((1, 16), np.float32)
    with pytest.raises(CheckpointError, match=re.escape(f"name must be a string of UTF-8, got {name!a}")):
        checkpoint.save(tmp_path / "x.safetensors", {name: fp4rt.quantize(x, layout="linear") if quantized else x})
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    "metadata, said",
    [
        ({"a": 1}, "'a': 1"),
        ({"a": None}, "'a': None"),
        ({1: "a"}, "1: 'a'"),
        ({"a": "\ud800"}, "'a': '\\ud800'"),
        ({"\ud800": "a"}, "'\\ud800': 'a'"),
        ("abc", "'abc'"),
        ([], "[]"),
    ],
)
def test_save_refuses_metadata_that_no_header_holds(metadata, said, tmp_path):
    with pytest.raises(CheckpointError, match=re.escape(f"must map strings to strings of UTF-8, got {said}")):
        checkpoint.save(tmp_path / "x.safetensors", {"x": np.ones(3)}, metadata=metadata)
    assert not any(tmp_path.iterdir())


def test_numbers_without_a_shape_and_nan_scales_of_activations_are_compared(files, tmp_path):
    for name, value in (("a", 1.0), ("b", 2.0)):
        checkpoint.save(tmp_path / f"{name}.safetensors", {"logit_scale": np.array(value, np.float32)})
    (row,) = checkpoint.compare(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert (row.verdict, row.max_error, row.sqnr_db) == ("differs", 1.0, 0.0)
    nan = {"w.input_scale": ("F32", [], np.float32(np.nan).tobytes())}
    path = files.make(tmp_path / "c.safetensors", matrix(files, **nan))
    assert [row.verdict for row in checkpoint.compare(path, path)] == ["identical"]


def test_metadata_of_an_opened_file_can_be_saved_again_and_its_own_keys_are_written_anew(tmp_path):
    q = fp4rt.quantize(np.ones((4, 17), np.float32), padded_n=32)
    checkpoint.save(tmp_path / "a.safetensors", {"w": q}, format="comfy", metadata={"note": "a", "fp4rt.shapes": "{}"})
    first = checkpoint.open(tmp_path / "a.safetensors")
    assert first.metadata["note"] == "a"
    assert json.loads(first.metadata["fp4rt.shapes"]) == {"w.weight": [4, 17]}
    checkpoint.save(tmp_path / "b.safetensors", {"w": first.load("w")}, format="comfy", metadata=first.metadata)
    assert (tmp_path / "b.safetensors").read_bytes() == (tmp_path / "a.safetensors").read_bytes()


def test_save_refuses_the_name_of_the_metadata(tmp_path):
    with pytest.raises(CheckpointError, match="no tensor can be called '__metadata__', the header's own key"):
        checkpoint.save(tmp_path / "x.safetensors", {"__metadata__": np.ones(3)})
    assert not any(tmp_path.iterdir())


def test_save_refuses_what_it_would_replace(tmp_path):
    table = {"w": fp4rt.quantize(np.ones((1, 16), np.float32), layout="linear")}
    checkpoint.save(tmp_path / "x.safetensors", table)
    with pytest.raises(CheckpointError, match="exists already"):
        checkpoint.save(tmp_path / "x.safetensors", table)
    with pytest.raises(DtypeError, match="save needs overwrite as a bool, got 'no'"):
        checkpoint.save(tmp_path / "x.safetensors", table, overwrite="no")
    checkpoint.save(tmp_path / "y.safetensors", table, format="comfy")
    checkpoint.save(tmp_path / "x.safetensors", table, overwrite=True)


def test_a_second_file_in_a_folder_does_not_take_the_first_one_s_configuration(tmp_path):
    q = fp4rt.quantize(np.ones((2, 16), np.float32), layout="linear")
    first, second = tmp_path / "x.safetensors", tmp_path / "y.safetensors"
    checkpoint.save(tmp_path / "source.safetensors", {"w.weight": np.ones((2, 16), np.float32)})
    checkpoint.save(first, {"w": q})
    beside = tmp_path / "hf_quant_config.json"
    kept = beside.read_bytes()
    for overwrite in (False, True):
        with pytest.raises(CheckpointError, match=r"describes x.safetensors.*write y.safetensors to a folder of its"):
            checkpoint.save(second, {"w": q, "head.weight": np.ones((2, 16), np.float32)}, overwrite=overwrite)
    assert not second.exists()
    assert beside.read_bytes() == kept
    checkpoint.save(second, {"w": q})  # the same configuration fits both
    assert beside.read_bytes() == kept
    second.unlink()
    checkpoint.save(first, {"w": q, "head.weight": np.ones((2, 16), np.float32)}, overwrite=True)  # it is its own
    assert beside.read_bytes() != kept


@pytest.mark.parametrize(
    "others, said",
    [
        ({"a": b""}, r"describes x\.safetensors,"),
        ({"a": b"no safetensors file"}, r"describes x\.safetensors,"),
        ({"x": b"harmed"}, r"may describe x\.safetensors \(not readable as a checkpoint\),"),
        ({"x": b""}, r"hf_quant_config\.json: exists already; name another file"),
    ],
    ids=["empty", "broken", "only a broken one", "only an empty one"],
)
def test_a_configuration_is_said_to_describe_a_file_in_its_format(others, said, tmp_path):
    q = fp4rt.quantize(np.ones((2, 16), np.float32), layout="linear")
    checkpoint.save(tmp_path / "x.safetensors", {"w": q})
    for name, content in others.items():
        (tmp_path / f"{name}.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=said):
        checkpoint.save(tmp_path / "y.safetensors", {"w": q, "head.weight": np.ones((2, 16), np.float32)})


def test_a_configuration_may_describe_several_files_and_few_are_named(tmp_path):
    q = fp4rt.quantize(np.ones((2, 16), np.float32), layout="linear")
    for number in range(5):
        checkpoint.save(tmp_path / f"x{number}.safetensors", {"w": q})
    wanted = "describes " + ", ".join(f"x{number}.safetensors" for number in range(4)) + ", ..., and would"
    with pytest.raises(CheckpointError, match=wanted):
        checkpoint.save(tmp_path / "y.safetensors", {"w": q, "head.weight": np.ones((2, 16), np.float32)})


def test_save_refuses_names_and_dtypes_that_do_not_exist(tmp_path):
    q = fp4rt.quantize(np.ones((1, 16), np.float32), layout="linear")
    with pytest.raises(CheckpointError, match="two tensors would be called 'w.weight'"):
        checkpoint.save(tmp_path / "x.safetensors", {"w": q, "w.weight": np.ones(3)})
    with pytest.raises(DtypeError, match="complex128"):
        checkpoint.save(tmp_path / "x.safetensors", {"w": np.ones(3, np.complex128)})
    with pytest.raises(CheckpointError, match="unknown format"):
        checkpoint.save(tmp_path / "x.safetensors", {"w": q}, format="gguf")
    with pytest.raises(CheckpointError, match="ends in"):
        checkpoint.save(tmp_path / "x.bin", {"w": q})
    assert not any(tmp_path.iterdir())


def test_what_is_no_name_of_a_layer_and_no_folder_is_refused(quantized, tmp_path):
    with (
        checkpoint.open(quantized) as files,
        pytest.raises(DtypeError, match="needs a layer's name as a string, got None"),
    ):
        files.load(None)
    with pytest.raises(CheckpointError, match="nowhere does not exist"):
        checkpoint.save(tmp_path / "nowhere" / "x.safetensors", {"a": np.zeros(2, np.float32)})
    with pytest.raises(CheckpointError, match="a tensor needs a name"):
        checkpoint.save(tmp_path / "x.safetensors", {"": np.zeros(2, np.float32)})
    with pytest.raises(CheckpointError, match="/dev/null: is neither a file nor a folder"):
        checkpoint.open("/dev/null")
