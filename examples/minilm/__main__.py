"""Quantizes all-MiniLM-L6-v2 with the fp4rt command, runs sentences through it, and says what quantization cost.

python -m examples.minilm [--work out/minilm] [--sentences FILE] [--limit N] [--device auto|cpu|gpu]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

import fp4rt
from examples.minilm import compare, report
from examples.minilm.encoder import Array, Encoder, EncoderConfig, Linear, linear_names
from examples.minilm.linears import VARIANTS, fp32_linear
from examples.minilm.model import WEIGHTS, MissingModel, load_weights, model_folder, read_json, tokenize
from fp4rt.errors import Fp4rtError

SENTENCES = Path(__file__).with_name("sentences.txt")
REPEATS = 5  # of each timed run; the median counts
ORIGINAL = "fp32"
MINIMUM_WIDTH = 100  # of the tables, also where the output is not a terminal


@dataclass(frozen=True)
class Place:
    """Where the forward pass runs: an array module, and how an array comes back to the host."""

    name: str
    xp: Any
    to_host: Callable[[Array], np.ndarray]


def choose_place(wanted: str) -> tuple[Place, str]:
    """The place to run, and the reason in words.

    Raises:
        BackendUnavailable: a GPU was asked for and none is usable.
    """
    cuda = fp4rt.backends()["cuda"]
    if wanted == "cpu" or (wanted == "auto" and not cuda.usable):
        return Place("CPU", np, np.asarray), "as asked" if wanted == "cpu" else cuda.reason
    if not cuda.usable:
        raise fp4rt.errors.BackendUnavailable(f"--device gpu: {cuda.reason}")
    import cupy

    return Place("GPU", cupy, cupy.asnumpy), cuda.reason or "a CUDA device is usable"


def quantize_file(source: Path, target: Path, plot: Path) -> float:
    """Run ``fp4rt quantize`` as a user would; returns its seconds.

    Raises:
        CalledProcessError: the command failed; it has said why.
    """
    command = ["quantize", str(source), str(target), "--plot", str(plot), "--overwrite"]
    print("$ fp4rt", *command, flush=True)
    started = time.perf_counter()
    subprocess.run([sys.executable, "-m", "fp4rt", *command], check=True)
    return time.perf_counter() - started


def load_quantized(path: Path, names: Sequence[str], xp: Any) -> dict[str, fp4rt.QuantizedTensor]:
    """The quantized weights of the linear layers, moved to where ``xp``'s arrays live."""
    with fp4rt.checkpoint.open(path) as checkpoint:
        return {name: _moved(checkpoint.load(name), xp) for name in names}


def _moved(q: fp4rt.QuantizedTensor, xp: Any) -> fp4rt.QuantizedTensor:
    data, scales, global_scale = (xp.array(part) for part in (q.data, q.scales, q.global_scale))
    return fp4rt.QuantizedTensor(data, scales, global_scale, q.shape, q.layout, q.padded_n)


def timed_encode(encoder: Encoder, ids: Array, mask: Array, place: Place) -> tuple[np.ndarray, float]:
    """Embeddings on the host, and the median seconds of a run, after one that compiles what needs compiling."""
    embeddings = place.to_host(encoder.encode(ids, mask))
    seconds = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        place.to_host(encoder.encode(ids, mask))
        seconds.append(time.perf_counter() - started)
    return embeddings, statistics.median(seconds)


def compare_layers(
    originals: Mapping[str, Linear],
    variants: Mapping[str, Mapping[str, Linear]],
    inputs: Mapping[str, Array],
    weights: Mapping[str, np.ndarray],
    quantized: Mapping[str, fp4rt.QuantizedTensor],
    place: Place,
) -> list[report.LayerRow]:
    """Every layer alone, on the inputs that the original model gives it."""
    rows = []
    for name, linear in originals.items():
        weight = weights[f"{name}.weight"]
        wanted = place.to_host(linear(inputs[name]))
        output_db = {
            variant: compare.sqnr_db(wanted, place.to_host(layers[name](inputs[name])))
            for variant, layers in variants.items()
        }
        restored = place.to_host(quantized[name].dequantize("float32"))
        rows.append(report.LayerRow(name, weight.shape, compare.sqnr_db(weight, restored), output_db))
    return rows


def run(work: Path, sentences: Sequence[str], device: str, console: Console) -> dict[str, Any]:
    """The whole demo; returns what it printed, for the record."""
    folder = model_folder()
    place, reason = choose_place(device)
    console.print(f"fp4rt {fp4rt.__version__}, running on the {place.name} ({reason})")
    work.mkdir(parents=True, exist_ok=True)
    target = work / "minilm-nvfp4.safetensors"
    quantize_seconds = quantize_file(folder / WEIGHTS, target, work / "weights.png")

    config = EncoderConfig.from_json(read_json(folder / "config.json"))
    weights = load_weights(folder)
    names = linear_names(config)
    arrays = {name: place.xp.asarray(array) for name, array in weights.items()}
    quantized = load_quantized(target, names, place.xp)
    ids, mask = (place.xp.asarray(part) for part in tokenize(folder, sentences))

    originals = {name: fp32_linear(arrays[f"{name}.weight"], arrays[f"{name}.bias"]) for name in names}
    variants = {
        variant: {name: make(quantized[name], arrays[f"{name}.bias"]) for name in names}
        for variant, make in VARIANTS.items()
    }
    recorder = compare.Recorder(originals)
    Encoder(place.xp, config, arrays, recorder.linears).encode(ids, mask)
    layers = compare_layers(originals, variants, recorder.inputs, weights, quantized, place)

    original, seconds = timed_encode(Encoder(place.xp, config, arrays, originals), ids, mask, place)
    fp32_bytes = sum(weights[f"{name}.weight"].nbytes for name in names)
    fp4_bytes = sum(quantized[name].nbytes for name in names)
    rows = [report.VariantRow(ORIGINAL, fp32_bytes, seconds, None)]
    similarities = {ORIGINAL: original @ original.T}
    for variant, linears in variants.items():
        embeddings, seconds = timed_encode(Encoder(place.xp, config, arrays, linears), ids, mask, place)
        rows.append(report.VariantRow(variant, fp4_bytes, seconds, compare.agreement(original, embeddings)))
        similarities[variant] = embeddings @ embeddings.T

    report.print_layers(console, layers, list(VARIANTS))
    report.print_variants(console, rows)
    before, after = (folder / WEIGHTS).stat().st_size, target.stat().st_size
    console.print(f"file: {before / 1e6:.1f} MB -> {after / 1e6:.1f} MB (the word embeddings stay fp32)")
    console.print(f"fp4rt quantize: {quantize_seconds:.1f} s, start of the program and pictures included")
    console.print(f"{len(sentences)} sentences, {int(mask.sum())} tokens; times are medians of {REPEATS} runs")
    report.draw(work / "embeddings.png", similarities, layers)
    summary = {
        "place": place.name,
        "file_bytes": [before, after],
        "quantize_seconds": quantize_seconds,
        "layers": [asdict(row) for row in layers],
        "variants": [asdict(row) for row in rows],
    }
    (work / "report.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    console.print(
        f"pictures and figures: {work}/weights.png, {work}/embeddings.png, {work}/report.json", soft_wrap=True
    )
    return summary


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line: 0, or 1 with one line that says what is missing."""
    parser = argparse.ArgumentParser(prog="python -m examples.minilm", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--work", type=Path, default=Path("out/minilm"), help="folder for the quantized file and the report"
    )
    parser.add_argument("--sentences", type=Path, default=SENTENCES, help="text file, one sentence a line")
    parser.add_argument("--limit", type=int, help="use only the first N sentences")
    parser.add_argument("--device", choices=("auto", "cpu", "gpu"), default="auto")
    options = parser.parse_args(arguments)
    try:
        lines = options.sentences.read_text(encoding="utf-8").splitlines()
        sentences = [line.strip() for line in lines if line.strip()][: options.limit]
        if len(sentences) < 2:
            parser.error(f"need at least 2 sentences to compare, got {len(sentences)} from {options.sentences}")
        run(options.work, sentences, options.device, Console(width=max(Console().width, MINIMUM_WIDTH), markup=False))
    except (MissingModel, Fp4rtError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        return error.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
