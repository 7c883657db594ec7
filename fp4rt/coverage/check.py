"""Which bytes of its outputs a callable never writes.

The callable runs twice, over outputs that hold 0xA5 first and 0x5A then. The patterns differ in every bit, so a byte
that kept the first pattern in the first run and the second in the second was written in neither, whatever values the
callable writes. A byte that differs between the runs in another way was made of what the memory held. The same holds of
the guard bands around the outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from fp4rt import interop
from fp4rt.coverage.allocations import WatchedAllocation, WatchingPool
from fp4rt.coverage.memory import GUARD_BYTES, GuardedTwin, InPlace, OutputMemory
from fp4rt.coverage.verdict import CoverageError, Finding, OutputVerdict, Place, Verdict
from fp4rt.errors import DtypeError, ShapeError, counted
from fp4rt.pool import PaddingTag, data_tag, scale_tag, use_pool
from fp4rt.tensor import QuantizedTensor

__all__ = ["PATTERNS", "Output", "check", "check_allocations", "check_partition"]

PATTERNS = (0xA5, 0x5A)


@dataclass(frozen=True)
class Output:
    """An array that a callable is to write, with the promise about its padding.

    ``array`` is any writable array: NumPy, torch, CuPy, DLPack.
    """

    array: Any
    tag: PaddingTag | None = None
    name: str = ""


def check(
    run: Callable[..., Any],
    outputs: Any = None,
    *,
    tag: PaddingTag | None = None,
    guard: int = GUARD_BYTES,
    in_place: bool = False,
) -> Verdict:
    """Run a callable over poisoned outputs and report what it does not write.

    Args:
        run: called twice. With ``outputs`` an array, an :class:`Output` or a ``QuantizedTensor`` it gets one argument,
            with a sequence one each, with a mapping keyword arguments. What it returns is ignored.
        outputs: arrays like those to write. The callable gets twins of them, in memory between guard bands. None: the
            callable takes no argument, and all that it allocates from the current pool is watched instead.
        tag: the tag of a single array.
        guard: bytes of a guard band.
        in_place: hand over the arrays themselves, for a callable that has them already; then there are no guard bands.

    Returns:
        The verdict; true where every promise holds.

    Raises:
        DtypeError, ShapeError: an output cannot be written, or the arguments do not go together.
    """
    _check_callable("check needs run", run)
    if outputs is None:
        return check_allocations(run, guard=guard)
    named, call = _arrange(run, outputs, tag)
    memories = [_memory(name, output, guard, in_place) for name, output in named.items()]
    arrays = [memory.array for memory in memories]
    reads = []
    for pattern in PATTERNS:
        for memory in memories:
            memory.poison(pattern)
        call(arrays)
        reads.append([memory.read() for memory in memories])
    verdicts = [
        _judge(name, output.tag, memory, first, second)
        for (name, output), memory, first, second in zip(named.items(), memories, *reads, strict=True)
    ]
    return Verdict(tuple(verdicts))


def check_allocations(run: Callable[[], Any], *, guard: int = GUARD_BYTES) -> Verdict:
    """Run a callable twice and check every tagged buffer that it takes from the current pool.

    Untagged buffers (workspaces) may stay unwritten; writes outside of them are found all the same.

    Raises:
        CoverageError: the callable allocates nothing, or something else in the second run.
    """
    watched: list[list[WatchedAllocation]] = []
    reads = []
    for pattern in PATTERNS:
        pool = WatchingPool(pattern, guard)
        with use_pool(pool):
            result = run()  # kept: its arrays may hold buffers that a finalizer would write
            watched.append(pool.allocations)
            reads.append([allocation.read() for allocation in pool.allocations])
        del result
    sizes = [[(a.nbytes, a.tag) for a in run_allocations] for run_allocations in watched]
    if sizes[0] != sizes[1]:
        raise CoverageError(f"the callable allocates differently in two runs: {sizes[0]} and then {sizes[1]}")
    if not sizes[0]:
        raise CoverageError("the callable allocates nothing from the current pool; pass the outputs that it writes")
    verdicts = []
    for number, (allocation, first, second) in enumerate(zip(watched[0], *reads, strict=True)):
        layout = allocation.tag.layout if allocation.tag is not None else "workspace"
        verdict = _judge(f"allocation {number} ({layout})", allocation.tag, allocation, first, second)
        verdicts.append(verdict if allocation.tag is not None else _only_outside(verdict))
    return Verdict(tuple(verdicts))


def check_partition(
    writers: Mapping[str, Callable[[Any], Any]],
    output: Any,
    *,
    tag: PaddingTag | None = None,
    guard: int = GUARD_BYTES,
) -> Verdict:
    """Check that several writers of one buffer share it without gaps and overlaps, e.g. decode rows, then prefill rows.

    Args:
        writers: name -> callable that gets the array. Each runs alone.
        output: an array like the one to write, or an :class:`Output`.
        tag: the array's tag.
        guard: bytes of a guard band.

    Returns:
        The verdict over all writers together: ``missed`` are the gaps; ``between`` names gaps and overlaps.

    Raises:
        DtypeError, ShapeError: the output cannot be written, is several arrays, or has no writer.
    """
    if not isinstance(writers, Mapping):
        got = type(writers).__name__
        raise DtypeError(f"coverage: check_partition needs writers as a mapping from names to callables, got {got}")
    for writer, run in writers.items():
        _check_callable(f"check_partition needs writer {writer!r}", run)
    (name, spec), *others = _arrange(lambda _: None, output, tag)[0].items()
    if others:
        raise ShapeError(f"coverage: check_partition takes one array, got {', '.join([name, *(n for n, _ in others)])}")
    if not writers:
        raise ShapeError("coverage: check_partition needs at least one writer")
    written: dict[str, np.ndarray] = {}
    between: list[str] = []
    outputs: list[OutputVerdict] = []
    for writer, run in writers.items():
        memory = _memory(name, spec, guard, False)
        reads = []
        for pattern in PATTERNS:
            memory.poison(pattern)
            run(memory.array)
            reads.append(memory.read())
        written[writer] = ~_untouched(reads[0][0], reads[1][0])
        outputs.append(_judge(f"{name} by {writer}", spec.tag, memory, reads[0], reads[1], partial=True))
    total, row_bytes = memory.nbytes, memory.row_bytes
    gaps = ~np.logical_or.reduce(list(written.values()))
    nothing = Finding(0, 0, None)
    joint = OutputVerdict(name, total, spec.tag, _finding(gaps, spec.tag, row_bytes), nothing, nothing, (0, None), True)
    if not joint.ok:
        between.append(f"gap: no writer of {', '.join(writers)} writes {joint.missed.describe()}")
    for a, b in combinations(writers, 2):
        overlap = written[a] & written[b]
        if overlap.any():
            between.append(f"overlap: {a} and {b} both write {_finding(overlap, spec.tag, row_bytes).describe()}")
    return Verdict((joint, *outputs), tuple(between))


def _check_callable(needs: str, run: Any) -> None:
    if not callable(run):
        raise DtypeError(f"coverage: {needs} as a callable, got {type(run).__name__}")


def _arrange(
    run: Callable[..., Any], outputs: Any, tag: PaddingTag | None
) -> tuple[dict[str, Output], Callable[[list[Any]], Any]]:
    """Named outputs, and how to call ``run`` with the twins of their arrays."""
    if tag is not None and isinstance(outputs, (QuantizedTensor, Mapping)):
        raise ShapeError(
            "coverage: tag is that of a single array; a QuantizedTensor knows its own, and each of several arrays is "
            "given one as Output(array, tag)"
        )
    if isinstance(outputs, QuantizedTensor):
        q = outputs
        return _quantized_outputs(q), lambda arrays: run(
            QuantizedTensor(arrays[0], arrays[1], arrays[2], q.shape, q.layout, q.padded_n)
        )
    if isinstance(outputs, Mapping):
        named = {str(name): _output(value) for name, value in outputs.items()}
        return named, lambda arrays: run(**dict(zip(named, arrays, strict=True)))
    many: Iterable[Any] = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
    listed = [_output(value, tag) for value in many]
    names = [output.name or (f"output {i}" if len(listed) > 1 else "output") for i, output in enumerate(listed)]
    if len(set(names)) < len(names):
        raise ShapeError(f"coverage: two outputs have one name: {', '.join(names)}")
    return dict(zip(names, listed, strict=True)), lambda arrays: run(*arrays)


def _output(value: Any, tag: PaddingTag | None = None) -> Output:
    return value if isinstance(value, Output) else Output(value, tag)


def _quantized_outputs(q: QuantizedTensor) -> dict[str, Output]:
    m, n = q.shape
    return {
        "data": Output(q.data, data_tag(m, n, q.padded_n)),
        "scales": Output(q.scales, scale_tag(q.layout, m, n, q.padded_n)),
        "global_scale": Output(q.global_scale),
    }


def _memory(name: str, output: Output, guard: int, in_place: bool) -> OutputMemory:
    view = interop.view(output.array, name)
    if guard < 0:
        raise ShapeError(f"coverage: guard is a number of bytes, got {guard}")
    if output.tag is not None and output.tag.nbytes != view.nbytes:
        raise ShapeError(
            f"coverage: {name} has {counted(view.nbytes, 'byte')}, its tag's extent {output.tag.physical} has "
            f"{output.tag.nbytes}"
        )
    return InPlace(view) if in_place else GuardedTwin(view, guard)


def _untouched(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Where both runs left their pattern."""
    untouched: np.ndarray = (first == PATTERNS[0]) & (second == PATTERNS[1])
    return untouched


Read = tuple[np.ndarray, np.ndarray]
Judged = OutputMemory | WatchedAllocation  # what was poisoned and read


def _judge(
    name: str, tag: PaddingTag | None, memory: Judged, first: Read, second: Read, partial: bool = False
) -> OutputVerdict:
    """The verdict on one output from what two runs left in it."""
    missed = _untouched(first[0], second[0])
    dependent = (first[0] != second[0]) & ~missed
    padding_set = ~missed & ~dependent & (first[0] != 0)
    padding_set &= tag.padding_mask() if tag is not None else False
    hits = np.flatnonzero((first[1] != PATTERNS[0]) | (second[1] != PATTERNS[1]))
    return OutputVerdict(
        name,
        first[0].size,
        tag,
        missed=_finding(missed, tag, memory.row_bytes),
        dependent=_finding(dependent, tag, memory.row_bytes),
        padding_set=_finding(padding_set, tag, memory.row_bytes),
        outside=(len(hits), memory.place_outside(int(hits[0])) if len(hits) else None),
        guarded=memory.guarded,
        partial=partial,
    )


def _finding(mask: np.ndarray, tag: PaddingTag | None, row_bytes: int) -> Finding:
    """Counts and first place of the marked bytes."""
    offsets = np.flatnonzero(mask)
    if not len(offsets):
        return Finding(0, 0, None)
    first = int(offsets[0])
    if tag is None:
        return Finding(len(offsets), 0, Place(first, *divmod(first, row_bytes), padding=False))
    row, column = tag.coordinates(first)
    place = Place(first, int(row), int(column), bool(tag.is_padding(first)))
    return Finding(len(offsets), int(tag.is_padding(offsets).sum()), place)


def _only_outside(verdict: OutputVerdict) -> OutputVerdict:
    """A workspace's verdict: what is inside is its kernel's own business."""
    nothing = Finding(0, 0, None)
    return OutputVerdict(
        verdict.name, verdict.nbytes, None, nothing, nothing, nothing, verdict.outside, verdict.guarded
    )
