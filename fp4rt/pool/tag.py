"""What of a buffer is padding, and who writes it."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from fp4rt.errors import DtypeError, LayoutError, ShapeError
from fp4rt.format import BLOCK, CODES_PER_BYTE
from fp4rt.layout import block_columns, ceil_div, data_shape, get_layout

__all__ = ["PaddingTag", "Writer", "data_tag", "scale_tag"]

Writer = Literal["kernel", "pool", "caller"]
WRITERS = ("kernel", "pool", "caller")


def _extent(name: str, value: Any) -> tuple[int, int]:
    """(rows, columns), or a DtypeError."""
    try:
        rows, columns = map(operator.index, value)
    except (TypeError, ValueError):
        raise DtypeError(f"padding tag needs {name} as (rows, columns), got {value!r}") from None
    return rows, columns


@dataclass(frozen=True)
class PaddingTag:
    """The padding of a two-dimensional byte buffer, and the claim about who writes it.

    Attributes:
        valid: (rows, columns) of bytes that carry values.
        physical: (rows, columns) of bytes that exist; what is not valid is padding.
        layout: where (row, column) lies: "linear" (row-major; packed data too), "128x4" or "8x4".
        writer: who brings the padding to zero. "kernel": the kernel that fills the buffer writes every byte of it.
            "pool": the kernel leaves the padding alone, and the pool zeroes it. "caller": whoever allocates.
    """

    valid: tuple[int, int]
    physical: tuple[int, int]
    layout: str = "linear"
    writer: Writer = "kernel"
    nbytes: int = field(init=False, compare=False)  # physical size
    pool_writes: bool = field(init=False, compare=False)  # whether there is padding, and the pool's to zero

    def __post_init__(self) -> None:
        layout = get_layout(self.layout)
        for name in ("valid", "physical"):
            object.__setattr__(self, name, _extent(name, getattr(self, name)))
        if self.writer not in WRITERS:
            raise LayoutError(f"padding tag: unknown writer {self.writer!r}; use one of {', '.join(WRITERS)}")
        if any(v < 0 or v > p for v, p in zip(self.valid, self.physical, strict=True)):
            raise ShapeError(
                f"padding tag needs 0 <= valid <= physical, got valid = {self.valid}, physical = {self.physical}"
            )
        if layout.shape(*self.physical) != tuple(self.physical):
            raise ShapeError(
                f"padding tag: physical extent {self.physical} is no whole number of {layout.name} tiles; "
                f"pass physical={layout.shape(*self.physical)}"
            )
        object.__setattr__(self, "nbytes", self.physical[0] * self.physical[1])
        object.__setattr__(self, "pool_writes", self.writer == "pool" and self.has_padding)

    @property
    def has_padding(self) -> bool:
        """Whether any byte is padding."""
        return self.valid != self.physical

    def coordinates(self, offset: Any) -> tuple[Any, Any]:
        """(row, column) of a byte offset; takes integers or integer arrays."""
        return get_layout(self.layout).coordinates(offset, self.physical[1])

    def is_padding(self, offset: Any) -> Any:
        """Whether the byte at ``offset`` is padding; takes integers or integer arrays."""
        row, column = self.coordinates(offset)
        return (row >= self.valid[0]) | (column >= self.valid[1])

    def padding_mask(self) -> np.ndarray:
        """bool, one a byte of the physical extent, in memory order: True where a byte is padding."""
        mask: np.ndarray = self.is_padding(np.arange(self.nbytes, dtype=np.int64))
        return mask


@lru_cache(maxsize=1024)  # a tag costs as much as an allocation; calls of one shape share theirs
def scale_tag(layout: str, m: int, n: int, padded_n: int, writer: Writer = "kernel") -> PaddingTag:
    """The tag of the scales of an (m, n) matrix with ``padded_n`` columns in memory."""
    physical = get_layout(layout).shape(m, block_columns(padded_n))
    return PaddingTag((m, ceil_div(n, BLOCK)), physical, layout, writer)


@lru_cache(maxsize=1024)
def data_tag(m: int, n: int, padded_n: int, writer: Writer = "kernel") -> PaddingTag:
    """The tag of the packed codes of an (m, n) matrix with ``padded_n`` columns in memory."""
    return PaddingTag((m, ceil_div(n, CODES_PER_BYTE)), data_shape(m, padded_n), "linear", writer)
