"""The examples for the frameworks run as they stand and show what they say."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest


def run(name: str) -> dict[str, Any]:
    """What the example's ``main`` returns."""
    result: dict[str, Any] = importlib.import_module(f"examples.{name}").main()
    return result


def test_the_readme_links_every_example() -> None:
    root = Path(__file__).parent.parent.parent
    readme = (root / "README.md").read_text(encoding="utf-8")
    paths = sorted((root / "examples").glob("*.py"))
    names = [path.stem for path in paths]
    assert names == ["cupy_graph", "engine_ops", "finetune_lora", "jax_jit", "pytorch_linear"]
    assert all(f"[`python -m examples.{name}`](examples/{name}.py)" in readme for name in names)
    assert all(f"python -m examples.{path.stem}\n" in path.read_text(encoding="utf-8") for path in paths)


def test_pytorch_linear(capsys: pytest.CaptureFixture[str]) -> None:
    torch = pytest.importorskip("torch")
    shown = run("pytorch_linear")
    assert shown["similarity"] > 0.99
    assert shown["same"]
    if shown["device"] == "cpu":  # there the compiled graph runs the same operators one by one
        assert torch.equal(shown["compiled"], shown["eager"])
    assert "4 layers on" in capsys.readouterr().out


def test_finetune_lora() -> None:
    pytest.importorskip("torch")
    shown = run("finetune_lora")
    assert shown["losses"][-1] < 0.5 * shown["losses"][0]
    assert shown["same"]


def test_jax_jit() -> None:
    pytest.importorskip("jax")
    shown = run("jax_jit")
    assert shown["similarity"] > 0.97
    assert shown["same"]


def test_cupy_graph() -> None:
    shown = run("cupy_graph")
    assert shown["y"].shape == (16, 256)
    assert shown["replayed"] in (None, True)


def test_engine_ops() -> None:
    pytest.importorskip("torch")
    shown = run("engine_ops")
    assert min(shown["similarity"]) > 0.97
    assert tuple(shown["small"].shape) == (24, 16)
