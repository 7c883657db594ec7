"""What a coverage check found, for programs and for people."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from fp4rt.errors import counted
from fp4rt.pool import PaddingTag

__all__ = ["CoverageError", "Finding", "OutputVerdict", "Place", "Verdict"]


class CoverageError(AssertionError):
    """A kernel does not write what it says it writes."""


@dataclass(frozen=True)
class Place:
    """One byte of an output: its offset in row-major order, and where the layout puts it.

    ``column`` counts bytes of a row: block columns of scales, bytes of packed data.
    """

    offset: int
    row: int
    column: int
    padding: bool

    def __str__(self) -> str:
        part = "in the padding" if self.padding else "in the valid part"
        return f"byte {self.offset} = (row {self.row}, column {self.column}), {part}"


@dataclass(frozen=True)
class Finding:
    """One kind of fault: how many bytes, and the first of them."""

    count: int
    in_padding: int
    first: Place | None

    @property
    def in_valid_part(self) -> int:
        """Bytes that are not padding."""
        return self.count - self.in_padding

    def describe(self) -> str:
        """The counts by part and the first place."""
        parts = f"{self.in_padding} in the padding, {self.in_valid_part} in the valid part"
        return f"{counted(self.count, 'byte')} ({parts}), first {self.first}"


@dataclass(frozen=True)
class OutputVerdict:
    """What was found in one output.

    Attributes:
        name: the output.
        nbytes: its size.
        tag: its padding tag, or None: then every byte is the writer's.
        missed: bytes that the callable never wrote.
        dependent: bytes whose value depends on what the memory held before, or differs between two runs.
        padding_set: padding bytes that were written, but not with zero.
        outside: how many bytes outside of the array were written, and the first's offset from its first byte.
        guarded: whether there were guard bands, so that ``outside`` means something.
        partial: one of several writers; what it leaves to the others is no fault.
    """

    name: str
    nbytes: int
    tag: PaddingTag | None
    missed: Finding
    dependent: Finding
    padding_set: Finding
    outside: tuple[int, int | None]
    guarded: bool
    partial: bool = False

    @property
    def faults(self) -> tuple[str, ...]:
        """What breaks the tag's promise, as sentences."""
        writer = self.tag.writer if self.tag is not None else "kernel"
        found = []
        if not self.partial and (self.missed.in_valid_part or (writer == "kernel" and self.missed.count)):
            found.append(f"never written: {self.missed.describe()}")
        if self.dependent.count:
            found.append(f"depends on what the memory held: {self.dependent.describe()}")
        if self.padding_set.count:
            found.append(f"padding written with something else than zero: {self.padding_set.describe()}")
        if self.outside[0]:
            count = counted(self.outside[0], "byte")
            found.append(f"written outside of the array: {count}, first at offset {self.outside[1]:+d}")
        return tuple(found)

    @property
    def ok(self) -> bool:
        """Whether nothing breaks the tag's promise."""
        return not self.faults

    def __str__(self) -> str:
        faults = self.faults
        head = f"{self.name}, {counted(self.nbytes, 'byte')}: "
        note = "" if self.guarded else " [no guard bands: writes outside are not seen]"
        if not faults and self.partial:
            return f"{head}writes {self.nbytes - self.missed.count} of them{note}"
        if not faults:
            kept = self.missed.count
            rest = ""
            if kept and self.tag is not None:
                rest = f"; {counted(kept, 'padding byte')} left to the {self.tag.writer}"
            return f"{head}covered{rest}{note}"
        broken = f"\n    breaks {describe_tag(self.tag)}" if self.tag is not None else ""
        return head + "".join(f"\n    {fault}" for fault in faults) + broken + note


def describe_tag(tag: PaddingTag) -> str:
    """A tag as a promise."""
    return f"the tag {tag.layout}, valid {tag.valid} of {tag.physical}, padding written by the {tag.writer}"


@dataclass(frozen=True)
class Verdict:
    """What a check found in all outputs. True where everything is covered."""

    outputs: tuple[OutputVerdict, ...]
    between: tuple[str, ...] = ()  # faults between the writers of a partition: gaps and overlaps

    @property
    def ok(self) -> bool:
        """Whether there is no fault."""
        return not self.between and all(output.ok for output in self.outputs)

    def __bool__(self) -> bool:
        return self.ok

    def __getitem__(self, name: str) -> OutputVerdict:
        for output in self.outputs:
            if output.name == name:
                return output
        raise KeyError(f"no output {name!r}; there are {', '.join(o.name for o in self.outputs)}")

    @property
    def missed(self) -> int:
        """Bytes never written, over all outputs."""
        return sum(output.missed.count for output in self.outputs)

    def raise_if_broken(self) -> Verdict:
        """The verdict itself, where nothing is wrong.

        Raises:
            CoverageError: something is; the message is the whole report.
        """
        if not self.ok:
            raise CoverageError(str(self))
        return self

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        outputs = [{**asdict(output), "ok": output.ok, "faults": list(output.faults)} for output in self.outputs]
        return {"ok": self.ok, "outputs": outputs, "between": list(self.between)}

    def __str__(self) -> str:
        lines: Iterable[str] = (*self.between, *map(str, self.outputs))
        return "coverage " + ("holds" if self.ok else "is BROKEN") + "".join(f"\n  {line}" for line in lines)
