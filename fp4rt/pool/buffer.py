"""A block of memory that a pool holds, and the reference to it that a user holds."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike

from fp4rt.device import Device
from fp4rt.errors import DeviceError, DtypeError, ShapeError, counted
from fp4rt.pool.tag import PaddingTag
from fp4rt.pool.upstream import host_array

if TYPE_CHECKING:
    from fp4rt.pool.arena import Arena
    from fp4rt.pool.padded import PaddedPool

__all__ = ["Block", "Buffer"]


class Block:
    """One piece of upstream memory. Changed only by the pool, under its lock, except where a comment says so."""

    __slots__ = (
        "arena",
        "capture",
        "events",
        "handle",
        "origin",
        "pointer",
        "size",
        "zero_padding",
    )

    def __init__(self, pointer: int, size: int, handle: Any, arena: Arena) -> None:
        self.pointer = pointer
        self.size = size
        self.handle = handle
        self.arena = arena  # the stream whose order protects the block's next use
        self.origin = arena  # the stream that upstream knows it by
        self.capture = 0  # the graph capture that it belongs to
        # Events of other streams that used it: set by Buffer.used_on, waited for at the next use.
        self.events: list[Any] | None = None
        # (tag, nbytes) whose padding is zero in this memory, or None. Dropped, by one store, whenever an address goes
        # out to somebody who has not promised to keep the padding.
        self.zero_padding: tuple[PaddingTag | None, int] | None = None


class Buffer:
    """Memory of a pool. It returns to the pool when the last reference to the buffer dies.

    Arrays made of it must hold a reference to it: then a block is never reused while any view of it lives, exported
    over DLPack or not. Nobody closes a buffer by hand, so nobody can close it too early.
    """

    __slots__ = ("__weakref__", "_block", "_pool", "nbytes", "tag")

    nbytes: int
    tag: PaddingTag | None

    def __init__(self, pool: PaddedPool, block: Block, nbytes: int, tag: PaddingTag | None) -> None:
        self._block = block
        self._pool = pool
        self.nbytes = nbytes
        self.tag = tag

    def __del__(self) -> None:
        # Runs wherever the last reference dies: in any thread, in the garbage collector, inside the pool's own lock.
        # So it takes no lock: a deque's append is atomic, with the interpreter lock and without it.
        pool = getattr(self, "_pool", None)  # none where Ctrl-C came first
        if pool is not None:
            pool._returned.append(self._block)

    def __reduce__(self) -> Any:
        raise TypeError("a pool's Buffer is a reference to memory and cannot be copied; copy an array made of it")

    @property
    def device(self) -> Device:
        """Where the memory is."""
        return self._block.arena.device

    @property
    def stream(self) -> int:
        """Handle of the stream in whose order the memory may be used."""
        return self._block.arena.stream

    @property
    def pointer(self) -> int:
        """Address, for any use. Whoever asks may write the padding, so the pool forgets that it was zero."""
        block = self._block
        block.zero_padding = None
        return block.pointer

    @property
    def contract_pointer(self) -> int:
        """Address, for a kernel that keeps the tag's promise and hands the address to nobody.

        The pool goes on knowing that the padding is zero. Only for memory that is never given to the user.
        """
        return self._block.pointer

    def used_on(self, stream: int) -> None:
        """Tells the pool that work on another stream, queued up to now, uses the memory.

        The memory's next user waits for that work. Needed only where the other stream's work is not ordered before
        later work of :attr:`stream` in another way.
        """
        self._pool._record_use(self._block, stream)

    def numpy(self, shape: tuple[int, ...], dtype: DTypeLike = np.uint8) -> np.ndarray:
        """Array over host memory; the buffer lives as long as the array and its views.

        Args:
            shape: extent in elements; it must fit.
            dtype: any NumPy dtype but those that hold Python objects; those of ml_dtypes included.

        Raises:
            DeviceError: the memory is not on the host.
            ShapeError: the array would be larger than the buffer. DtypeError: its elements are Python objects.
        """
        if self.device.kind != "cpu":
            raise DeviceError(f"Buffer.numpy needs host memory, got a buffer on {self.device}; copy it first")
        dtype = np.dtype(dtype)
        if dtype.hasobject:
            raise DtypeError(f"Buffer.numpy needs a dtype of plain memory, got {dtype}, which holds references")
        needed = math.prod(shape) * dtype.itemsize
        if needed > self.nbytes:
            size = counted(needed, "byte")
            raise ShapeError(f"Buffer.numpy: {shape} of {dtype} needs {size}, the buffer has {self.nbytes}")
        return host_array(self.pointer, shape, dtype, self)

    def __repr__(self) -> str:
        place = f"at {self._block.pointer:#x} on {self.device}, stream {self.stream:#x}"
        return f"Buffer({counted(self.nbytes, 'byte')} {place}, {self.tag})"
