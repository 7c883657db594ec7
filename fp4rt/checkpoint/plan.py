"""From a source and a wish to a list of shard jobs: everything is decided, and refused, before a byte is written.

A shard of the source becomes the shard of the same name of the target; the parts of a quantized layer go to where its
codes were. So any number of workers gives the same files.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fp4rt.checkpoint import configs
from fp4rt.checkpoint.catalog import StoredLayer
from fp4rt.checkpoint.configs import Outcome
from fp4rt.checkpoint.detect import Configuration
from fp4rt.checkpoint.formats import FORMATS, MODELOPT, Format
from fp4rt.checkpoint.header import printable
from fp4rt.checkpoint.operations import Copy, Quantize, target_metadata
from fp4rt.checkpoint.store import Store
from fp4rt.errors import CheckpointError
from fp4rt.layout import get_layout

__all__ = [
    "SCALAR_SHAPES",
    "Plan",
    "ShardJob",
    "check_orientation",
    "format_named",
    "layer_bytes",
    "make_jobs",
    "operation_bytes",
    "scale_layout",
]

# A scale of one element, as files spell it.
SCALAR_SHAPES = ((), (1,), (1, 1))


@dataclass(frozen=True)
class ShardJob:
    """One file to write; plain data, so that any worker can do it.

    Attributes:
        source: path of the source checkpoint.
        file: name of the file to write.
        operations: what to write into it, in order.
        metadata: its ``__metadata__``.
    """

    source: str
    file: str
    operations: tuple[Any, ...]
    metadata: dict[str, str]

    @property
    def nbytes(self) -> int:
        """Bytes that will be read."""
        return sum(operation_bytes(operation) for operation in self.operations)


@dataclass
class Plan:
    """All jobs of a run and the configuration that goes with their result."""

    operation: str
    store: Store
    configuration: Configuration
    outcome: Outcome
    jobs: list[ShardJob]
    float_dtype: str | None = None
    notes: list[str] = field(default_factory=list)


def operation_bytes(operation: Any) -> int:
    """Bytes of the source that an operation reads."""
    if isinstance(operation, Copy):
        return operation.spec.nbytes
    return operation.source.nbytes if isinstance(operation, Quantize) else operation.nbytes


def make_jobs(store: Store, operations: dict[str, Any], outcome: Outcome) -> list[ShardJob]:
    """The operations by the file that holds their first tensor; every name of the result must be one."""
    seen: set[str] = set()
    for operation in operations.values():
        for spec in operation.specs():
            if spec.name in seen:
                raise CheckpointError(f"{store.path}: two tensors of the result would be called {printable(spec.name)}")
            seen.add(spec.name)
    jobs = []
    for file, tensors in store.files.items():
        own = tuple(operations[name] for name in tensors if name in operations)
        if not own:  # its tensors became part of layers whose codes lie elsewhere
            continue
        standalone = len(store.files) == 1
        metadata = configs.file_metadata(
            tensors.metadata,
            outcome,
            target_metadata(target for operation in own for target in operation.targets()),
            standalone,
        )
        jobs.append(ShardJob(str(store.path), file, own, metadata))
    return jobs


def format_named(name: str) -> Format:
    """The format called ``name``.

    Raises:
        CheckpointError: there is none.
    """
    form = FORMATS.get(name)
    if form is None:
        raise CheckpointError(f"unknown format {name!r}; use one of {', '.join(FORMATS)}")
    return form


def scale_layout(form: Format, layout: str | None) -> str:
    """The layout to write: the format's own, or for modelopt any."""
    if layout is None:
        return form.layout
    name = get_layout(layout).name
    if name != form.layout and form.name != MODELOPT.name:
        raise CheckpointError(f"{form.name} stores scales as {form.layout}; {name} is possible with modelopt only")
    return name


def check_orientation(what: str, form: Format, layout: str, transposed: bool) -> None:
    """Refuse a stack stored as (e, k, n) where scales are tiled: their shape would not tell that it lies so.

    Raises:
        CheckpointError: it is one; the message begins with ``what``.
    """
    if transposed and get_layout(layout).tiled:
        has_no = form.name if layout == form.layout else layout
        raise CheckpointError(
            f"{what} is stored as (experts, k, n), which has no {has_no} form; modelopt keeps it, with linear scales"
        )


def layer_bytes(store: Store, layer: StoredLayer) -> int:
    """Bytes of all tensors of a layer."""
    return sum(store.entry(name).nbytes for name in layer.tensors)
