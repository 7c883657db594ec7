"""Where memory lives: a device kind and an index."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["CPU", "Device"]


class Device(NamedTuple):
    """``kind`` is "cpu" or "cuda"; ``index`` counts the devices of that kind."""

    kind: str
    index: int = 0  # type: ignore[assignment]  # tuple.index is of no use here

    def __str__(self) -> str:
        return self.kind if self.kind == "cpu" else f"{self.kind}:{self.index}"


CPU = Device("cpu", 0)
