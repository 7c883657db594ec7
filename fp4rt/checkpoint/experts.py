"""A stack of experts and the modules that it is where each expert lies apart: one an expert, gate_up cut into two."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fp4rt.checkpoint.formats import LayerName

__all__ = ["GATE_UP", "ExpertPart", "apart"]

GATE_UP = "gate_up_proj"


@dataclass(frozen=True)
class ExpertPart:
    """One module: rows ``first`` to ``end`` of expert ``expert`` of a stack."""

    name: LayerName
    expert: int
    first: int
    end: int


def apart(name: LayerName, experts: int, rows: int) -> Iterator[ExpertPart]:
    """The modules of a stack, in its order; gate_up is cut in the middle of its rows.

    Args:
        name: of the stack.
        experts: how many it has.
        rows: of one expert; even for gate_up.
    """
    parent, _, leaf = name.base.rpartition(".")
    halves = {leaf: (0, rows)}
    if leaf == GATE_UP:
        halves = {"gate_proj": (0, rows // 2), "up_proj": (rows // 2, rows)}
    for expert in range(experts):
        for half, (first, end) in halves.items():
            yield ExpertPart(LayerName(f"{parent}.{expert}.{half}".lstrip(".")), expert, first, end)
