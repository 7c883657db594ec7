"""A pool that poisons and guards every buffer, and keeps them all for a look afterwards."""

from __future__ import annotations

from collections import deque

import numpy as np

from fp4rt.device import CPU, Device
from fp4rt.pool import Buffer, PaddedPool, PaddingTag
from fp4rt.pool.buffer import Block

__all__ = ["WatchedAllocation", "WatchingPool"]


class WatchedAllocation:
    """One buffer that was handed out, and the memory around it."""

    guarded = True

    def __init__(self, pool: WatchingPool, around: Buffer, nbytes: int, tag: PaddingTag | None) -> None:
        self.nbytes = self.row_bytes = nbytes
        self.tag = tag
        self._guard = pool.guard
        self._around = around
        self._upstream = pool.upstream(around.device.kind)

    def read(self) -> tuple[np.ndarray, np.ndarray]:
        """(bytes of the buffer, bytes outside of it), after all work of the device."""
        memory = self._upstream.read(self._around.pointer, self._around.nbytes, self._around.device)
        inside = slice(self._guard, self._guard + self.nbytes)
        outside = np.concatenate([memory[: inside.start], memory[inside.stop :]])
        if self.tag is not None:  # a buffer may be longer than what its tag speaks of
            inside = slice(inside.start, inside.start + self.tag.nbytes)
        return memory[inside], outside

    def place_outside(self, index: int) -> int:
        """Offset of a byte outside, from the buffer's first byte."""
        return index - self._guard if index < self._guard else index - self._guard + self.nbytes


class WatchingPool(PaddedPool):
    """Never hands out the same memory twice; fills it, and a guard band on either side, with one pattern."""

    def __init__(self, pattern: int, guard: int) -> None:
        super().__init__("empty")
        self.guard = guard
        self.allocations: list[WatchedAllocation] = []
        self._pattern = pattern
        self._memory = PaddedPool("empty")
        self._returned: deque[Block] = deque(maxlen=0)  # the watched buffers' blocks are parts of others: forgotten

    def allocate(self, nbytes: int, device: Device = CPU, stream: int = 0, tag: PaddingTag | None = None) -> Buffer:
        """See :meth:`PaddedPool.allocate`."""
        around = self._memory.allocate(nbytes + 2 * self.guard, device, stream)
        self.upstream(device.kind).fill(around.pointer, around.nbytes, self._pattern, device, stream)
        self.allocations.append(WatchedAllocation(self, around, nbytes, tag))
        part = Block(around.pointer + self.guard, nbytes, None, around._block.arena)
        return Buffer(self, part, nbytes, tag)
