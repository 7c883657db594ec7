"""The commands: what they print, what they write, and their exit status."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import fp4rt
from bench.__main__ import BENCHES, SUPPORT
from bench.checkpoint_model import TINY, write_model
from fp4rt import checkpoint
from fp4rt.checkpoint import detect
from fp4rt.checkpoint.folder import read_configuration_file
from fp4rt.checkpoint.overrides import Rule, Wanted, read_overrides
from fp4rt.checkpoint.selection import RULES
from fp4rt.cli import run

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("cli") / "llama", TINY, shards=2)


@pytest.fixture(scope="module")
def quantized(model, tmp_path_factory):
    target = tmp_path_factory.mktemp("cli-q") / "q"
    checkpoint.quantize(model, target)
    return target


def fp4rt_command(*arguments):
    return run([str(argument) for argument in arguments])


def test_quantize_prints_the_report_and_writes_a_checkpoint(model, tmp_path, capsys):
    assert fp4rt_command("quantize", model, tmp_path / "q") == 0
    out = capsys.readouterr().out
    row = next(line for line in out.splitlines() if line.startswith("model.layers.0.self_attn.q_proj.weight"))
    assert re.search(r"64 x 64 +BF16 +8\.19 kB +2\.31 kB +amax +\d\d\.\d\d +0\.\d+ +0/256 +0$", row)
    assert "unchanged: 1 x an embedding (model.embed_tokens.weight)" in out
    assert "unchanged: 1 x a router (model.layers.2.mlp.gate.weight)" in out
    assert "copied files: tokenizer.json" in out
    assert re.search(r"model-00001-of-00002\.safetensors: .*sha256 [0-9a-f]{16}", out)
    assert checkpoint.verify(tmp_path / "q") == []


def test_quantize_as_json_is_one_object_with_every_tensor(model, tmp_path, capsys):
    assert fp4rt_command("quantize", model, tmp_path / "q", "--json", "--compare") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["format"] == "modelopt"
    rows = {row["name"]: row for shard in report["shards"] for row in shard["tensors"]}
    assert set(rows) == set(checkpoint.open(model))
    row = rows["model.layers.0.self_attn.q_proj.weight"]
    assert row["shape"] == [64, 64]
    assert row["bytes_before"] == 8192
    assert row["bytes_after"] == 2048 + 256 + 4
    assert {"sqnr_db", "max_error", "clipped_blocks", "zero_blocks"} <= set(row)
    assert row["methods"]["mse"] > row["sqnr_db"]
    assert all(len(shard["sha256"]) == 64 for shard in report["shards"])


def test_dry_run_writes_nothing(model, tmp_path, capsys):
    assert fp4rt_command("quantize", model, tmp_path / "q", "--dry-run") == 0
    assert "would write" in capsys.readouterr().out
    assert not any(tmp_path.iterdir())


def test_every_file_that_a_run_writes_is_in_its_report(model, quantized, tmp_path, capsys):
    checkpoint.save(tmp_path / "in.safetensors", {"a.weight": np.eye(16, 32, dtype=np.float32)})
    (tmp_path / "one").mkdir()
    for command in (
        ("quantize", model, tmp_path / "a"),
        ("quantize", tmp_path / "in.safetensors", tmp_path / "one" / "out.safetensors"),
        ("convert", quantized, tmp_path / "b", "--to", "compressed-tensors"),
        ("convert", tmp_path / "b", tmp_path / "c", "--to", "modelopt"),
        ("dequantize", tmp_path / "c", tmp_path / "d"),
    ):
        assert fp4rt_command(*command, "--json") == 0
        report = json.loads(capsys.readouterr().out)
        folder = command[2].parent if command[2].suffix else command[2]
        reported = [shard["file"] for shard in report["shards"]] + report["configuration"] + report["copied"]
        assert sorted(reported) == sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
    for dry in ((), ("--dry-run",)):
        assert fp4rt_command("quantize", model, tmp_path / "e", "--overwrite", *dry) == 0
        line = "configuration: model.safetensors.index.json, config.json, hf_quant_config.json"
        assert (line in capsys.readouterr().out.splitlines()) == (not dry)


def test_quantize_one_file_writes_the_configuration_beside_it(tmp_path, capsys):
    checkpoint.save(tmp_path / "in.safetensors", {"a.weight": np.eye(16, 32, dtype=np.float32)})
    assert fp4rt_command("quantize", tmp_path / "in.safetensors", tmp_path / "out.safetensors") == 0
    assert "configuration: hf_quant_config.json" in capsys.readouterr().out.splitlines()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "hf_quant_config.json",
        "in.safetensors",
        "out.safetensors",
    ]
    opened = checkpoint.open(tmp_path / "out.safetensors")
    assert {name: array.dtype.name for name, array in opened.items()} == {
        "a.weight": "uint8",
        "a.weight_scale": "float8_e4m3fn",
        "a.weight_scale_2": "float32",
    }
    assert opened["a.weight_scale_2"].shape == ()


def test_clipped_blocks_are_said_aloud(tmp_path, capsys):
    x = np.full((4, 64), 0.01, np.float32)
    x[1, 3] = 100.0
    checkpoint.save(tmp_path / "in.safetensors", {"a.weight": x})
    options = ("--method", "percentile", "--percentile", "99")
    assert fp4rt_command("quantize", tmp_path / "in.safetensors", tmp_path / "o.safetensors", *options) == 0
    captured = capsys.readouterr()
    assert "1/16" in captured.out
    assert "1 block is clipped" in captured.err


def test_options_of_one_recipe_and_method_reach_it_and_have_their_defaults_without(tmp_path, capsys):
    rng = np.random.default_rng(3)
    source = tmp_path / "in.safetensors"
    checkpoint.save(source, {"a.weight": rng.standard_normal((64, 64), np.float32)})

    def quantize(name, *options):
        assert fp4rt_command("quantize", source, tmp_path / name, "--json", *options) == 0
        report = json.loads(capsys.readouterr().out)
        return report["shards"][0]["tensors"][0], checkpoint.open(tmp_path / name)

    _, default = quantize("a", "--recipe", "w4a4")
    _, given = quantize("b", "--recipe", "w4a4", "--input-amax", "5.25")
    assert default["a.input_scale"] == 1
    assert given["a.input_scale"] == np.float32(5.25 / 2688)
    assert quantize("c", "--method", "percentile")[0]["method"] == "percentile 99.99"
    assert quantize("d", "--method", "percentile", "--percentile", "50")[0]["method"] == "percentile 50"
    compared = [quantize(name, "--compare", *more)[0] for name, more in (("e", ()), ("f", ("--percentile", "50")))]
    assert compared[0]["methods"]["percentile"] != compared[1]["methods"]["percentile"]  # it is one of the others


@pytest.mark.parametrize("to", ["compressed-tensors", "comfy", "bf16"])
def test_convert_and_verify_against_the_source(to, quantized, tmp_path, capsys):
    assert fp4rt_command("convert", quantized, tmp_path / "x", "--to", to) == 0
    assert fp4rt_command("verify", tmp_path / "x") == (1 if to == "bf16" else 0)
    said = capsys.readouterr()
    assert (f"no NVFP4 layers in {tmp_path / 'x'};" in said.err) if to == "bf16" else ("0 errors" in said.out)
    assert fp4rt_command("verify", quantized, tmp_path / "x", "--min-sqnr", "40") == 0
    out = capsys.readouterr().out
    assert "identical" in out


def test_verify_finds_stacked_experts_in_what_conversion_makes_of_them(tmp_path, capsys):
    model = write_model(tmp_path / "model", dataclasses.replace(TINY, stacked=True), shards=2)
    assert fp4rt_command("quantize", model, tmp_path / "mo") == 0
    assert fp4rt_command("convert", tmp_path / "mo", tmp_path / "ct", "--to", "compressed-tensors") == 0
    capsys.readouterr()
    assert fp4rt_command("verify", tmp_path / "mo", tmp_path / "ct") == 0
    assert re.fullmatch(r"\d+ identical\n", capsys.readouterr().out)


def test_dequantize_takes_a_dtype(quantized, tmp_path):
    assert fp4rt_command("dequantize", quantized, tmp_path / "x", "--dtype", "fp32") == 0
    opened = checkpoint.open(tmp_path / "x")
    assert opened["model.layers.0.self_attn.q_proj.weight"].dtype == np.float32


def test_fuse_joins_layers(quantized, tmp_path, capsys):
    options = ("--fuse", "qkv_proj=q_proj,k_proj,v_proj", "--fused-scales", "rescale")
    (tmp_path / "a").mkdir()
    assert fp4rt_command("convert", quantized, tmp_path / "x", "--to", "modelopt", *options) == 0
    assert checkpoint.open(tmp_path / "x").load("model.layers.0.self_attn.qkv_proj").shape == (128, 64)
    out = capsys.readouterr().out
    assert "fused" in out
    assert "note: " not in out
    parts = {f"a.{n}_proj": fp4rt.quantize(np.full((16, 16), i + 1, np.float32)) for i, n in enumerate("qkv")}
    checkpoint.save(tmp_path / "a" / "different.safetensors", parts)
    command = "convert", tmp_path / "a" / "different.safetensors", tmp_path / "y.safetensors", "--to", "modelopt"
    assert fp4rt_command(*command, *options[:2]) == 0
    note = r"^note: \d fused layers? ha\w+ a global scale for each part .* --fused-scales rescale makes them one$"
    assert len(re.findall(note, capsys.readouterr().out, re.MULTILINE)) == 1


def test_verify_fails_for_a_broken_checkpoint(tmp_path, capsys):
    q = fp4rt.quantize(np.ones((1, 16), np.float32), layout="linear")
    q.scales[0, 0] = 0x7F
    checkpoint.save(tmp_path / "x.safetensors", {"w": q})
    assert fp4rt_command("verify", tmp_path / "x.safetensors") == 1
    assert "error: w.weight: 1 block scale is NaN" in capsys.readouterr().out
    assert fp4rt_command("verify", tmp_path / "x.safetensors", "--json") == 1
    assert json.loads(capsys.readouterr().out)["ok"] is False


@pytest.mark.parametrize("byte, word", [(0x7F, "NaN"), (0x80 | 0x38, "negative")])
@pytest.mark.parametrize("command", [("dequantize",), ("convert", "--to", "bf16")])
def test_dequantizing_scales_that_no_quantizer_makes_is_done_and_said(byte, word, command, tmp_path, capsys):
    q = fp4rt.quantize(np.ones((1, 16), np.float32), layout="linear")
    q.scales[0, 0] = byte
    checkpoint.save(tmp_path / "x.safetensors", {"w": q, "v": np.ones(3, np.float32)})
    name, *options = command
    assert fp4rt_command(name, tmp_path / "x.safetensors", tmp_path / "a", *options) == 1
    said = capsys.readouterr()
    assert re.search(rf"^w\.weight .* dequantized +1 block scale is {word}$", said.out, re.MULTILINE)
    assert said.err == "note: 1 weight has block scales that no quantizer makes; `fp4rt verify` says where they are\n"
    assert checkpoint.open(tmp_path / "a")["w.weight"].shape == (1, 16)
    assert fp4rt_command(name, tmp_path / "x.safetensors", tmp_path / "b", *options, "--json") == 1
    rows = json.loads(capsys.readouterr().out)["shards"][0]["tensors"]
    assert [row["wrong_scales"] for row in rows if row["name"] == "w.weight"] == [{word: 1}]


def test_verify_reads_a_checkpoints_configuration_once(quantized, capsys, monkeypatch):
    read = []
    monkeypatch.setattr(
        detect, "read_configuration_file", lambda place, name: read.append(name) or read_configuration_file(place, name)
    )
    assert fp4rt_command("verify", quantized) == 0
    assert sorted(read) == ["config.json", "hf_quant_config.json"]


def test_one_of_a_thing_is_said_in_the_singular(tmp_path, capsys):
    weights = {name: np.full((2, 16), 3, np.float32) for name in ("a.weight", "b.weight")}
    one, two = tmp_path / "one.safetensors", tmp_path / "two.safetensors"
    checkpoint.save(one, {"a.weight": weights["a.weight"]})
    checkpoint.save(two, weights)
    changed = tmp_path / "changed.safetensors"
    checkpoint.save(changed, {name: weight + 1 for name, weight in weights.items()})
    for command, status, text in (
        (("inspect", one), 0, "one.safetensors: 1 tensor, "),
        (("inspect", two), 0, "two.safetensors: 2 tensors, "),
        (("verify", one, changed), 1, "1 differs, 1 only in B"),
        (("verify", two, changed), 0, "2 differ\n"),
        (("quantize", one, tmp_path / "q"), 0, "(modelopt): 1 weight, "),
        (("verify", tmp_path / "q"), 0, "q: 3 tensors, 0 errors, 0 warnings"),
    ):
        assert fp4rt_command(*command) == status
        assert text in capsys.readouterr().out
    assert fp4rt_command("inspect", tmp_path / "q", "--html", tmp_path / "q.html") == 0
    assert "</code>, 1 quantized layer, " in (tmp_path / "q.html").read_text()


def test_verify_two_fails_where_they_are_too_far_apart(model, quantized, capsys):
    assert fp4rt_command("verify", model, quantized) == 0
    assert fp4rt_command("verify", model, quantized, "--min-sqnr", "15") == 0
    assert fp4rt_command("verify", model, quantized, "--min-sqnr", "50") == 1
    capsys.readouterr()
    assert fp4rt_command("verify", model, quantized, "--json") == 0
    rows = json.loads(capsys.readouterr().out)["tensors"]
    assert {row["verdict"] for row in rows} == {"identical", "differs"}


def test_inspect_shows_formats_scales_and_sizes(quantized, capsys):
    assert fp4rt_command("inspect", quantized) == 0
    out = capsys.readouterr().out
    assert "modelopt (said by config.json (quant_method), hf_quant_config.json)" in out
    assert re.search(r"model\.layers\.0\.self_attn\.q_proj\.weight +64 x 64 +2\.31 kB", out)
    assert fp4rt_command("inspect", quantized, "--json") == 0
    assert json.loads(capsys.readouterr().out)["format"] == "modelopt"


def test_inspect_lists_a_plain_model(model, capsys):
    assert fp4rt_command("inspect", model) == 0
    out = capsys.readouterr().out
    assert "plain" in out
    assert re.search(r"model\.embed_tokens\.weight +BF16 +100 x 64", out)


def png_size(path):
    content = path.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(content[16:20], "big"), int.from_bytes(content[20:24], "big")


def test_pictures_are_drawn(model, quantized, tmp_path):
    pytest.importorskip("matplotlib", reason="needs fp4rt[plot]")
    assert fp4rt_command("quantize", model, tmp_path / "q", "--plot", tmp_path / "run.png") == 0
    assert fp4rt_command("inspect", quantized, "--figures", tmp_path / "layers.png") == 0
    assert min(png_size(tmp_path / "run.png") + png_size(tmp_path / "layers.png")) > 300


def test_picture_of_an_impossible_place_is_refused(quantized, tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="needs fp4rt[plot]")
    assert fp4rt_command("inspect", quantized, "--figures", tmp_path / "no" / "x.png") == 1
    assert "no/x.png" in capsys.readouterr().err


def test_html_report_escapes_what_the_file_says(tmp_path):
    q = fp4rt.quantize(np.ones((1, 16), np.float32), layout="linear")
    evil = "<script>alert(1)</script>"
    checkpoint.save(tmp_path / "x.safetensors", {evil: q, f"{evil}2": np.ones(1)}, metadata={evil: evil})
    assert fp4rt_command("inspect", tmp_path / "x.safetensors", "--html", tmp_path / "x.html") == 0
    page = (tmp_path / "x.html").read_text()
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert page.count("<svg") == 2
    assert "http" not in page


@pytest.mark.parametrize("name", ["a$\\frac{$", "b" * 3000, "c\x1b\x00"], ids=["formula", "long", "control"])
def test_pictures_take_any_name(name, tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="needs fp4rt[plot]")
    checkpoint.save(tmp_path / "in.safetensors", {f"{name}.weight": np.ones((2, 16), np.float32)})
    plot = tmp_path / "q" / "run.png"  # in the folder that the run makes
    assert fp4rt_command("quantize", tmp_path / "in.safetensors", tmp_path / "q", "--plot", plot) == 0
    assert fp4rt_command("inspect", tmp_path / "q", "--figures", tmp_path / "layers.png") == 0
    assert min(png_size(plot) + png_size(tmp_path / "layers.png")) > 100
    assert "warning" not in capsys.readouterr().err


def test_a_model_without_quantized_layers_is_not_drawn(model, tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="needs fp4rt[plot]")
    assert fp4rt_command("inspect", model, "--figures", tmp_path / "x.png") == 1
    assert "no NVFP4 layers to draw" in capsys.readouterr().err
    assert not (tmp_path / "x.png").exists()


@pytest.mark.parametrize("redirection", ["| cat", ">&- | cat", ">&- 2>&-"])
@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_any_name_is_printed_whatever_the_terminal_can_show(redirection, encoding, tmp_path):
    weight = fp4rt.quantize(np.ones((2, 16), np.float32), layout="linear")
    checkpoint.save(tmp_path / "in.safetensors", {"\u0441\u043b\u043e\u0439": weight})
    line = f'"{sys.executable}" -m fp4rt inspect in.safetensors {redirection}; exit ${{PIPESTATUS[0]}}'
    environment = {**os.environ, "PYTHONIOENCODING": encoding, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(["bash", "-c", line], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""
    assert ("\\u0441\\u043b\\u043e\\u0439" in ended.stdout) == (redirection == "| cat")


def test_table_does_not_interpret_names_as_markup(tmp_path, capsys):
    checkpoint.save(tmp_path / "in.safetensors", {"[red]a[/].weight": np.ones((1, 16), np.float32)})
    assert fp4rt_command("quantize", tmp_path / "in.safetensors", tmp_path / "o.safetensors") == 0
    assert "[red]a[/].weight" in capsys.readouterr().out


def test_name_cannot_send_control_characters_to_the_terminal(tmp_path, capsys):
    checkpoint.save(tmp_path / "in.safetensors", {"\x1b]0;evil\x07a.weight": np.ones((1, 16), np.float32)})
    assert fp4rt_command("quantize", tmp_path / "in.safetensors", tmp_path / "o.safetensors", "-v") == 0
    assert fp4rt_command("inspect", tmp_path / "o.safetensors", "-v") == 0
    assert fp4rt_command("verify", tmp_path / "in.safetensors", tmp_path / "o.safetensors") == 0
    captured = capsys.readouterr()
    assert "\x1b" not in captured.out + captured.err
    assert "evil" in captured.out


def test_overrides_file_is_read(model, tmp_path, capsys):
    (tmp_path / "o.toml").write_text('[[layer]]\nmatch = "*.q_proj.weight"\nmethod = "mse"\n')
    assert fp4rt_command("quantize", model, tmp_path / "q", "--overrides", tmp_path / "o.toml", "--json") == 0
    shards = json.loads(capsys.readouterr().out)["shards"]
    methods = {row["name"]: row["method"] for shard in shards for row in shard["tensors"]}
    assert methods["model.layers.0.self_attn.q_proj.weight"] == "mse"
    assert methods["model.layers.0.self_attn.k_proj.weight"] == "amax"


def test_doctor_says_what_is_usable_and_why_not(capsys):
    assert fp4rt_command("doctor") == 0
    out = capsys.readouterr().out
    assert re.search(r"^cpu: usable", out, re.MULTILINE)
    assert re.search(r"^cuda: (usable|not usable)", out, re.MULTILINE)
    assert "cache folder:" in out
    assert fp4rt_command("doctor", "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["backends"][0]["name"] == "cpu"
    assert facts["fp4rt"] == fp4rt.__version__
    assert facts.get("CUDA headers", "none needed") == "none needed"  # of any kernel, for any device


def test_doctor_warns_where_nvrtc_is_of_another_cuda_than_cupy(capsys, monkeypatch):
    cupy = pytest.importorskip("cupy", reason="NVRTC comes through CuPy")
    status = importlib.import_module("fp4rt.cuda.status")
    for runtime, nvrtc, warned in ((12090, (12, 8), False), (12090, (13, 0), True), (13020, (12, 9), True)):
        monkeypatch.setattr(cupy.cuda.runtime, "runtimeGetVersion", lambda number=runtime: number)
        monkeypatch.setattr(status, "nvrtc_version", lambda version=nvrtc: version)
        assert fp4rt_command("doctor") == 0
        said = re.search(r"^CUDA warnings: (.*)$", capsys.readouterr().out, re.MULTILINE)[1]
        assert (said != "none") == warned
        if warned:
            assert f"NVRTC {nvrtc[0]}.{nvrtc[1]} compiles and CuPy runs on CUDA {runtime // 1000}" in said
            assert f"pip uninstall cupy-cuda{runtime // 1000}x" in said
            assert f"pip install 'fp4rt[cuda{nvrtc[0]}]'" in said


def test_doctor_tries_the_cache_folder_and_leaves_nothing_in_it(tmp_path, capsys, monkeypatch):
    file = tmp_path / "file"
    file.touch()
    for folder, said in (
        (tmp_path, "yes"),
        (tmp_path / "new" / "cache", "yes"),
        (file, f"no: no file can be made in {file} (Not a directory); "),
        (Path("/proc/new"), "no: no file can be made in /proc "),  # though root has the permission
    ):
        monkeypatch.setenv("FP4RT_CACHE_DIR", str(folder))
        assert fp4rt_command("doctor", "--json") == 0
        facts = json.loads(capsys.readouterr().out)
        assert facts["cache writable"].startswith(said)
        assert "CUDA cache" not in facts  # said once
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_bench_lists_the_scripts_of_the_checkout(capsys):
    assert fp4rt_command("bench") == 0
    names = {line.split()[0] for line in capsys.readouterr().out.splitlines()}
    assert {bench.name for bench in BENCHES} <= names
    assert not names & set(SUPPORT)
    assert fp4rt_command("bench", "nothing") == 2
    assert "no bench called 'nothing'" in capsys.readouterr().err


def test_what_stands_behind_the_name_of_a_bench_is_its_own(capsys, monkeypatch):
    started, done = [], subprocess.CompletedProcess([], 0)
    monkeypatch.setattr(subprocess, "run", lambda line, env: started.append(line[2:]) or done)
    for own in (("--quick", "--no-write"), ("--help",), ("-h",), ("--device", "cuda", "x")):
        for separator in ((), ("--",)):
            assert fp4rt_command("bench", "pool", *separator, *own) == 0
            assert started.pop() == ["bench.pool", *own]
    assert fp4rt_command("bench", "--help") == 0
    assert "is passed on to it" in capsys.readouterr().out
    assert fp4rt_command("bench", "--quick") == 2
    assert started == []


def test_an_installed_package_finds_the_benches_of_the_checkout_one_stands_in(tmp_path, capsys, monkeypatch):
    site = tmp_path / "site-packages"
    monkeypatch.setattr(fp4rt, "__file__", str(site / "fp4rt" / "__init__.py"))
    monkeypatch.chdir(ROOT)
    assert fp4rt_command("bench") == 0
    assert {bench.name for bench in BENCHES} <= {line.split()[0] for line in capsys.readouterr().out.splitlines()}
    started, done = [], subprocess.CompletedProcess([], 0)
    monkeypatch.setattr(subprocess, "run", lambda line, env: started.append(env["PYTHONPATH"]) or done)
    assert fp4rt_command("bench", "gemm") == 0
    assert started[0].split(os.pathsep)[0] == str(ROOT)
    other = tmp_path / "other"
    (other / "bench").mkdir(parents=True)
    (other / "bench" / "__main__.py").touch()
    (other / "bench" / "own.py").touch()
    for project in (None, '[project]\nname = "other"\n'):
        if project:
            (other / "pyproject.toml").write_text(project)
        monkeypatch.chdir(other)
        assert fp4rt_command("bench") == 1
        error = capsys.readouterr().err
        assert f"no benches in {site / 'bench'}" in error
        assert "run this from a checkout of it, or `python -m bench` there" in error


def test_a_bench_takes_paths_from_where_one_stands(tmp_path):
    pytest.importorskip("torch", reason="this bench needs torch")
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "__init__.py").write_text("raise RuntimeError('another package of that name')")
    (tmp_path / "model.txt").touch()
    command = [sys.executable, "-m", "fp4rt", "bench", "checkpoint_convert", "model.txt"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert "model.txt" in done.stderr
    assert "No such file" not in done.stderr
    assert "another package" not in done.stderr


def shell(line, **environment):
    """(status, stderr) of a shell command in which $FP4RT is the command; Python's output is buffered, as usual."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    kept |= {"FP4RT": f"{sys.executable} -m fp4rt", "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {line}"], capture_output=True, text=True, env=kept, timeout=120
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize("command", ["doctor", "--version", "--help", "inspect {model} --json"])
def test_output_that_nobody_takes_ends_with_one_line_at_most(command, model):
    command = command.format(model=model)
    assert shell(f"$FP4RT {command} > /dev/full") == (1, "error: standard output: No space left on device\n")
    status, error = shell(f"$FP4RT {command} | true")
    assert (status in (0, 1), error) == (True, "")  # 0 where all was taken before the reader was gone


def test_an_interrupt_before_a_command_has_begun_ends_with_130(tmp_path):
    (tmp_path / "typer.py").write_text("raise KeyboardInterrupt")
    assert shell("$FP4RT doctor", PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}") == (130, "")


def test_doctor_says_what_is_broken_about_an_installation(tmp_path):
    (tmp_path / "cupy").mkdir()
    (tmp_path / "cupy" / "__init__.py").write_text("raise ValueError('numpy.dtype size changed')")
    path = f"{tmp_path}{os.pathsep}{ROOT}"
    status, error = shell(f"$FP4RT doctor --json > {tmp_path}/facts", PYTHONPATH=path, FP4RT_NUM_THREADS="many")
    assert (status, error) == (1, ""), "no backend is usable"
    facts = json.loads((tmp_path / "facts").read_text())
    assert "numpy.dtype size changed" in facts["backends"][1]["reason"]
    assert facts["threads"].startswith("FP4RT_NUM_THREADS must be a positive integer, got 'many'")
    status, error = shell("$FP4RT compile", PYTHONPATH=path)
    assert status == 1
    assert error.startswith("error: compiling CUDA kernels needs CuPy and NVRTC: numpy.dtype size changed")


def test_compile_fails_where_nothing_can_be_kept(tmp_path, monkeypatch, capsys):
    pytest.importorskip("cupy", reason="NVRTC comes through CuPy")
    finish = importlib.import_module("fp4rt.cuda.gemm.matmul").FINISH
    monkeypatch.setattr("fp4rt.cuda.kernel_set.kernels_for", lambda target: (finish,))
    (tmp_path / "file").touch()
    for folder, status in ((tmp_path / "file", 1), (tmp_path / "new", 0)):
        monkeypatch.setenv("FP4RT_CACHE_DIR", str(folder))
        assert fp4rt_command("compile", "--arch", "sm_90a") == status
    assert "error: " in capsys.readouterr().err


def test_a_page_of_a_checkpoint_with_any_name_can_be_written(quantized, tmp_path):
    link = tmp_path / os.fsdecode(b"o\xff")
    link.symlink_to(quantized)
    assert fp4rt_command("inspect", link, "--html", tmp_path / "page.html") == 0
    assert "<title>o\\udcff</title>" in (tmp_path / "page.html").read_text()


def test_what_a_coverage_script_prints_is_no_part_of_the_json(tmp_path, capsys):
    script = tmp_path / "checks.py"
    script.write_text("print('hello')\ndef cover_a():\n    print('inside')\n    return 1\n")
    assert fp4rt_command("coverage", script, "--json") == 1
    said = capsys.readouterr()
    assert set(json.loads(said.out)) == {"error", "status"}
    assert "inside" in said.err


def test_a_loss_of_everything_is_no_decibel(tmp_path, capsys):
    weight = np.random.default_rng(0).standard_normal((32, 64)).astype(np.float16)
    for name, factor in (("a", 1), ("b", 0)):
        save_file({"a.weight": weight * np.float16(factor)}, tmp_path / f"{name}.safetensors")
    assert fp4rt_command("verify", tmp_path / "a.safetensors", tmp_path / "b.safetensors", "--min-sqnr", "10") == 1
    assert "a.weight: 0.00 dB is below --min-sqnr 10" in capsys.readouterr().err


def test_version_and_help(capsys):
    assert fp4rt_command("--version") == 0
    assert capsys.readouterr().out == f"fp4rt {fp4rt.__version__}\n"
    for command in ("quantize", "dequantize", "convert", "inspect", "verify", "doctor", "compile", "bench"):
        assert fp4rt_command(command, "--help") == 0
        assert "Usage: fp4rt" in capsys.readouterr().out


def test_an_interrupt_ends_with_130_as_the_help_says(quantized, capsys, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("fp4rt.cli.look.check", interrupt)
    assert fp4rt_command("verify", quantized) == 130
    assert capsys.readouterr().err.startswith("error: interrupted")
    assert fp4rt_command("--help") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Exit status: 0 done, 1 bad input or a check that fails, 2 wrong usage, 130 interrupted." in text


def test_help_of_convert_says_what_is_rounded_again(capsys):
    assert fp4rt_command("convert", "--help") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "block scale is kept, but --fused-scales rescale rounds block scales again." in text


def test_help_of_inspect_says_what_its_columns_count(capsys):
    assert fp4rt_command("inspect", "--help") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "zero blocks are those with a block scale of 0, saturated ones those with the largest that there is" in text


def test_help_of_quantize_explains_what_is_taken(capsys):
    assert fp4rt_command("quantize", "--help") == 0
    assert " ".join(RULES.split()) in " ".join(capsys.readouterr().out.split())


def test_help_of_quantize_shows_overrides_that_work(model, tmp_path, capsys):
    assert fp4rt_command("quantize", "--help") == 0
    _, found, example = capsys.readouterr().out.partition("[[layer]]\n")
    (tmp_path / "o.toml").write_text(found + example)
    assert read_overrides(tmp_path / "o.toml").rules == (Rule("*.mlp.*", Wanted("mse")),)
    assert fp4rt_command("quantize", model, tmp_path / "q", "--overrides", tmp_path / "o.toml", "--dry-run") == 0


def test_usage_errors_have_status_two(capsys):
    for arguments in (("nothing",), ("quantize",), ("quantize", "a", "b", "--jobs", "0"), ("convert", "a", "b")):
        assert fp4rt_command(*arguments) == 2
        assert "Error" in capsys.readouterr().err


def test_module_runs_as_a_command(quantized):
    done = subprocess.run(
        [sys.executable, "-m", "fp4rt", "verify", str(quantized)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "0 errors" in done.stdout


def test_commands_are_not_imported_by_the_package():
    code = "import sys, fp4rt, fp4rt.checkpoint; assert not {'typer', 'rich', 'matplotlib', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_looking_at_a_file_needs_no_compiler(quantized):
    code = "import sys; from fp4rt.cli import run; run(['verify', sys.argv[1]]); assert 'numba' not in sys.modules"
    subprocess.run([sys.executable, "-c", code, str(quantized)], cwd=ROOT, check=True)


def test_two_single_files_in_one_folder_keep_the_configuration_of_each(tmp_path, capsys):
    weights = {"a.weight": np.ones((32, 32), np.float32), "b.weight": np.ones((32, 32), np.float32)}
    source, one, two = (tmp_path / f"{name}.safetensors" for name in ("source", "one", "two"))
    checkpoint.save(source, weights)
    assert fp4rt_command("quantize", source, one) == 0
    kept = (tmp_path / "hf_quant_config.json").read_bytes()
    for options in ((), ("--overwrite",)):
        assert fp4rt_command("quantize", source, two, "--exclude", "a.weight", *options) == 1
        assert "describes one.safetensors" in capsys.readouterr().err
    assert not two.exists()
    assert (tmp_path / "hf_quant_config.json").read_bytes() == kept
    assert fp4rt_command("quantize", source, two) == 0
    assert fp4rt_command("verify", one, two) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        ["hf_quant_config.json", "one.safetensors", "source.safetensors", "two.safetensors"]
    )


@pytest.mark.parametrize(
    "command, status, message",
    [
        (("inspect", "missing.safetensors"), 1, "missing.safetensors: no such file or folder"),
        (("verify", "missing.safetensors"), 1, "missing.safetensors: no such file or folder"),
        (("quantize", "missing.safetensors", "out"), 1, "missing.safetensors: no such file or folder"),
        (("dequantize", "missing.safetensors", "out"), 1, "missing.safetensors: no such file or folder"),
        (("convert", "missing.safetensors", "out", "--to", "comfy"), 1, "missing.safetensors: no such file or folder"),
        (("convert", "in", "out", "--to", "gguf"), 2, "unknown format 'gguf'"),
        (("compile", "--arch", "sm_7"), 2, "sm_7"),
        (("verify", "plain.safetensors"), 1, "no NVFP4 layers in plain.safetensors"),
        (("compile", "--arch", "90"), 2, "'90' is no CUDA architecture"),
        (("coverage", "missing.py"), 1, "missing.py: No such file or directory"),
        (("quantize",), 2, "Missing argument"),
        (("inspect", "in", "--unheard-of"), 2, "--unheard-of"),
        (("inspect", ""), 2, "the path is empty"),
        (("doctor", "surplus"), 2, "surplus"),
        ((), 2, "--json"),
    ],
)
def test_an_error_in_json_is_one_object_and_the_line_on_stderr_stays(
    command, status, message, capsys, tmp_path, monkeypatch
):
    if command[:1] == ("compile",):
        pytest.importorskip("cupy", reason="NVRTC comes through CuPy")
    monkeypatch.chdir(tmp_path)
    checkpoint.save("plain.safetensors", {"a.weight": np.ones((2, 16), np.float32)})
    assert fp4rt_command(*command, "--json") == status
    out, err = capsys.readouterr()
    answer = json.loads(out)
    assert sorted(answer) == ["error", "status"]
    assert answer["status"] == status
    assert message in answer["error"]
    assert message in err
    assert fp4rt_command(*command[:1], "--", "--json") != 0  # a path of that name asks for nothing
    assert capsys.readouterr().out == ""
