"""What a run did to each tensor, as plain data that travels between processes and into JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from fp4rt import api
from fp4rt.errors import CheckpointError, counted
from fp4rt.format import E4M3
from fp4rt.tensor import QuantizedTensor

__all__ = ["Histograms", "RunReport", "ShardReport", "TensorReport", "measure"]

ERROR_BINS = 65
ERROR_RANGE = 0.5  # of the tensor's root mean square


@dataclass
class Histograms:
    """Counts for a picture: errors in units of the tensor's root mean square, and block scales by e4m3 code."""

    errors: list[int]
    scales: list[int]


@dataclass
class TensorReport:
    """One tensor: what was done to it and what that cost.

    Attributes:
        name: name of the weight.
        action: "quantized", "converted", "dequantized", "fused", "copied".
        shape: shape of the weight, in elements.
        dtype: dtype tag or format before.
        bytes_before, bytes_after: all its parts together.
        method: how scales were chosen.
        sqnr_db: signal to quantization noise; None where nothing was measured, infinite where nothing was lost.
        max_error: largest absolute error.
        blocks, clipped_blocks, zero_blocks: counts; a clipped block exceeds what its scale can express.
        note: why a tensor was left, or what else to know.
        wrong_scales: block scales of a dequantized layer that no quantizer makes: "NaN" or "negative" -> how many.
        methods: SQNR of the other methods, where a comparison was asked for.
        histograms: counts for a picture, where one was asked for.
    """

    name: str
    action: str
    shape: tuple[int, ...]
    dtype: str
    bytes_before: int
    bytes_after: int
    method: str = ""
    sqnr_db: float | None = None
    max_error: float | None = None
    blocks: int = 0
    clipped_blocks: int = 0
    zero_blocks: int = 0
    note: str = ""
    wrong_scales: dict[str, int] = field(default_factory=dict)
    methods: dict[str, float] = field(default_factory=dict)
    histograms: Histograms | None = None

    def count_wrong(self, masks: Mapping[str, np.ndarray]) -> None:
        """Add what is wrong with the scales of one matrix, and say it in the note."""
        for what, mask in masks.items():
            count = int(np.count_nonzero(mask))
            if count:
                self.wrong_scales[what] = self.wrong_scales.get(what, 0) + count
        counts = self.wrong_scales.items()
        self.note = ", ".join(f"{counted(n, 'block scale is', 'block scales are')} {what}" for what, n in counts)


@dataclass
class ShardReport:
    """One written file."""

    file: str
    nbytes: int
    sha256: str
    tensors: list[TensorReport]
    resumed: bool = False


@dataclass
class RunReport:
    """A whole run.

    Attributes:
        operation: "quantize", "convert" or "dequantize".
        source, target: paths.
        format: format written.
        shards: the files, with checksums.
        configuration: files written beside the shards that describe them: index, config.json, hf_quant_config.json.
        copied, left: files of the folder that went along, and that did not.
        notes: what else the user should know.
        seconds: wall time.
    """

    operation: str
    source: str
    target: str
    format: str
    shards: list[ShardReport] = field(default_factory=list)
    configuration: list[str] = field(default_factory=list)
    copied: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0
    dry_run: bool = False

    @property
    def tensors(self) -> list[TensorReport]:
        """The rows of all shards."""
        return [row for shard in self.shards for row in shard.tensors]

    @property
    def bytes_before(self) -> int:
        """Bytes of all tensors before."""
        return sum(row.bytes_before for row in self.tensors)

    @property
    def bytes_after(self) -> int:
        """Bytes of all tensors after."""
        return sum(row.bytes_after for row in self.tensors)

    def to_json(self) -> dict[str, Any]:
        """Plain objects; numbers that JSON lacks (infinity) become strings."""
        table = asdict(self)
        table["bytes_before"], table["bytes_after"] = self.bytes_before, self.bytes_after
        result: dict[str, Any] = jsonable(table)
        return result


def jsonable(value: Any) -> Any:
    """Replace what strict JSON cannot carry."""
    if isinstance(value, dict):
        return {key: jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def shard_from_json(table: dict[str, Any]) -> ShardReport:
    """The inverse of ``asdict`` on a :class:`ShardReport`, for the record of a finished shard.

    Raises:
        CheckpointError: the record is not one.
    """
    try:
        rows = []
        for row in table["tensors"]:
            row = dict(row, shape=tuple(row["shape"]))
            for key in ("sqnr_db", "max_error"):
                row[key] = None if row[key] is None else float(row[key])
            row["methods"] = {name: float(value) for name, value in row["methods"].items()}
            if row["histograms"] is not None:
                row["histograms"] = Histograms(**row["histograms"])
            rows.append(TensorReport(**row))
        return ShardReport(table["file"], table["nbytes"], table["sha256"], rows)
    except (KeyError, TypeError, ValueError, AttributeError):
        raise CheckpointError("the record of a finished shard is broken; remove the output and start again") from None


class Measurement:
    """Error of a weight, accumulated over its matrices."""

    def __init__(self, histograms: bool = False) -> None:
        self.signal = self.noise = self.max_error = 0.0
        self.blocks = self.clipped = self.zero = 0
        self.errors = np.zeros(ERROR_BINS, np.int64) if histograms else None
        self.scales = np.zeros(E4M3.magnitude_count, np.int64)

    def add(self, x: np.ndarray, q: QuantizedTensor) -> None:
        """Take a matrix and its quantized form with linear scales."""
        error = api.quantization_error(x, q)
        self.signal += error.signal_power
        self.noise += error.noise_power
        self.max_error = max(self.max_error, error.max_abs_error)
        self.blocks += error.blocks
        self.clipped += error.clipped_blocks
        self.zero += error.zero_blocks
        if self.errors is not None:
            self.scales += error.scale_counts[: self.scales.size]
            self.errors += error_histogram(x, q)

    @property
    def sqnr_db(self) -> float:
        """10 log10(signal / noise)."""
        if self.noise == 0:
            return math.inf
        return 10 * math.log10(self.signal / self.noise) if self.signal else -math.inf

    def fill(self, row: TensorReport) -> None:
        """Write the measurement into a row."""
        row.sqnr_db, row.max_error = self.sqnr_db, self.max_error
        row.blocks, row.clipped_blocks, row.zero_blocks = self.blocks, self.clipped, self.zero
        if self.errors is not None:
            row.histograms = Histograms(self.errors.tolist(), self.scales.tolist())


def measure(x: np.ndarray, q: QuantizedTensor, histograms: bool = False) -> Measurement:
    """The measurement of one matrix."""
    measurement = Measurement(histograms)
    measurement.add(x, q)
    return measurement


def error_histogram(x: np.ndarray, q: QuantizedTensor) -> np.ndarray:
    """Errors in units of the root mean square of x, in ERROR_BINS bins over +-ERROR_RANGE; the outer ones are open."""
    values = x.astype(np.float32)
    rms = math.sqrt(float(np.square(values, dtype=np.float64).mean())) or 1.0
    errors = (api.dequantize(q) - values) / np.float32(rms)
    bins = np.clip((errors / ERROR_RANGE + 1) * (ERROR_BINS / 2), 0, ERROR_BINS - 1).astype(np.int64)
    return np.bincount(bins.reshape(-1), minlength=ERROR_BINS)
