"""The padded pool: blocks by size class, reused in stream order, with tags that know the padding.

Policy:

- Reuse. A freed block goes to the arena of its (device, stream) and serves that stream again at once: stream order
  protects it. Another stream gets it only when memory is short, and then waits for an event behind its last work. So
  the memory of a per-thread stream stays with it when its thread ends, until memory is short, a limit is reached, or
  :meth:`PaddedPool.trim`: many short threads want a limit.
- Fill. ``covered`` zeroes only where the tag says that the pool does; ``zero`` every tagged buffer; ``empty`` nothing;
  ``poison`` sets every buffer to 0xFF. Fills are queued on the allocation's stream. A block whose padding is known to
  be zero is not filled again for the same tag.
- Graphs. While a stream is being captured nothing is queried, waited for or given back; before memory is refused for
  that, the driver is asked whether the capture goes on. A block that a capture used belongs to that graph: the same
  capture may use it again, nobody else, until :meth:`PaddedPool.release_captures`. Replays must be ordered after the
  work that the stream had before its capture, as with every stream-ordered pool.
- Threads. Every method may be called from any thread. One lock guards all of the pool's state; a dying buffer, which
  may die anywhere, only appends its block to a deque, and the next call under the lock takes it from there.
- Streams. No stream is touched but the one that a call names: others may have been destroyed since. Before destroying
  a stream whose work is still queued, call :meth:`PaddedPool.retire_stream`: its handle may come back as another's.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from typing import Any, Literal

from fp4rt.device import CPU, Device
from fp4rt.errors import ShapeError
from fp4rt.pool.arena import SIZE_CLASSES, Arena, check_device, check_integer, size_class
from fp4rt.pool.buffer import Block, Buffer
from fp4rt.pool.stats import PoolStats, readable_bytes
from fp4rt.pool.store import BlockStore
from fp4rt.pool.stream_key import PER_THREAD_STREAM, stream_key
from fp4rt.pool.tag import PaddingTag
from fp4rt.pool.upstream import Upstream, check_upstream

__all__ = ["FILLS", "POISON_BYTE", "Fill", "PaddedPool"]

Fill = Literal["covered", "zero", "empty", "poison"]
FILLS: tuple[Fill, ...] = ("covered", "zero", "empty", "poison")
POISON_BYTE = 0xFF
_pools: weakref.WeakSet[PaddedPool] = weakref.WeakSet()
KNOWLEDGE_SEARCH = 8  # free blocks looked at for one whose padding is known to be zero


class PaddedPool:
    """Memory for codes, scales and workspaces. See the module for the policy.

    Args:
        fill: "covered", "zero", "empty" or "poison".
        upstream: where memory comes from: an object with :class:`fp4rt.pool.Upstream`'s methods, or an allocator that a
            backend knows (CuPy's ``MemoryPool`` and ``MemoryAsyncPool``). It serves its own device kind; other kinds,
            and None, use the default: NumPy on the host, CuPy's default pool on a CUDA device.
        limit: the most bytes to hold, or None.

    Raises:
        ValueError: the fill policy is unknown. DeviceError: ``upstream`` is no allocator.
        DtypeError, ShapeError: the limit is no integer, or negative.
    """

    def __init__(self, fill: Fill = "covered", upstream: Any = None, limit: int | None = None) -> None:
        if not isinstance(fill, str) or fill not in FILLS:
            raise ValueError(f"PaddedPool: unknown fill {fill!r}; use one of {', '.join(map(repr, FILLS))}")
        if limit is not None:
            limit = check_integer("PaddedPool needs limit as an integer or None", limit)
            if limit < 0:
                raise ShapeError(f"PaddedPool: limit must be a number of bytes >= 0 or None, got {limit}")
        check_upstream(upstream)
        self.fill: Fill = fill
        self._zeroes_tagged, self._zeroes_its_own, self._poisons = (fill == f for f in ("zero", "covered", "poison"))
        self._returned: deque[Block] = deque()  # guarded by being a deque
        self._lock = threading.RLock()  # reentrant: a collector may run Python that allocates while it is held
        _pools.add(self)
        # Guarded by _lock from here on.
        self._store = BlockStore(upstream, limit)
        self._arenas = self._store.arenas
        self._latest = self._arena(CPU, 0)  # the arena of the allocation before: mostly the one wanted next
        self._allocations = self._peak = 0
        self._zero_fills = self._bytes_zeroed = self._avoided = self._poison_fills = 0

    @property
    def limit(self) -> int | None:
        """The most bytes to hold, or None."""
        return self._store.limit

    def allocate(self, nbytes: int, device: Device = CPU, stream: int = 0, tag: PaddingTag | None = None) -> Buffer:
        """Memory to use in the order of ``stream``.

        Args:
            nbytes: size; 0 is allowed.
            device: where.
            stream: handle of the stream that the memory is used on; 0 on a host.
            tag: what of it is padding and who writes the padding.

        Returns:
            A buffer, filled as the pool's policy says.

        Raises:
            OutOfMemoryError: upstream has no more, or the limit is reached.
            DtypeError: ``nbytes`` is no integer. ShapeError: it is negative, or the tag's extent is larger.
            DeviceError: ``device`` is no Device.
        """
        if type(nbytes) is not int:
            nbytes = check_integer("PaddedPool.allocate needs nbytes as an integer", nbytes)
        size = SIZE_CLASSES.get(nbytes) or size_class(nbytes)
        zero = tag is not None and (self._zeroes_tagged or (self._zeroes_its_own and tag.pool_writes))
        store = self._store
        with self._lock:  # which no Ctrl-C leaves locked
            if self._returned:
                self._take_back()
            arena = self._latest
            if arena.stream != stream or arena.device != device or stream == PER_THREAD_STREAM:
                arena = self._latest = self._arena(device, stream)
            free = arena.free.get(size)
            capture = 0
            if arena.is_capturing is not None and (arena.is_capturing(stream) or arena.recording):
                capture = arena.capture()
                if capture:
                    free = arena.usable_in_capture(capture, size)
            block = None
            if free:
                block = self._pop_known(free, tag, nbytes) if zero else free.pop()
            if block is None:
                block = store.obtain(nbytes, size, arena, capture)
            block.capture = capture
            self._allocations += 1
            in_use = store.in_use = store.in_use + size
            if in_use > self._peak:
                self._peak = in_use
            if block.events is not None:
                store.wait_for_users(block)
        buffer = Buffer(self, block, nbytes, tag)
        if tag is not None and tag.nbytes > nbytes:
            raise ShapeError(f"PaddedPool.allocate: the tag's extent {tag.physical} is larger than nbytes = {nbytes}")
        if zero:
            self._zero(block, nbytes, tag)
        else:
            block.zero_padding = None
            if self._poisons:
                self._poison(block, nbytes)
        return buffer

    def trim(self, device: Device | None = None) -> int:
        """Gives every free block back to upstream; those kept for graphs stay.

        Waits for the device where a block was used by several streams. Not while a capture is running.

        Args:
            device: only the blocks of this device.

        Returns:
            The number of bytes given back.
        """
        if device is not None:
            check_device("PaddedPool.trim", device)
        with self._lock:
            self._take_back()
            before = self._store.held
            for arena in self._arenas.values():
                if device is None or arena.device == device:
                    self._store.give_up(arena.take_free())
            return before - self._store.held

    def release_captures(self, capture_id: int | None = None) -> int:
        """Makes the blocks that captures used free for everybody. Call it when their graphs are destroyed.

        Args:
            capture_id: one capture's number, or None for all of them.

        Returns:
            The number of bytes made free. Buffers that still live return to the pool as ordinary ones.
        """
        if capture_id is not None:
            capture_id = check_integer("PaddedPool.release_captures needs capture_id as an integer or None", capture_id)
        with self._lock:
            self._take_back()
            return self._store.release_captures(capture_id)

    def retire_stream(self, device: Device, stream: int) -> None:
        """Waits for a stream's work and gives its free blocks back: call it before destroying the stream.

        Args:
            device: the stream's.
            stream: handle; that of the per-thread stream means the calling thread's.
        """
        check_device("PaddedPool.retire_stream", device)
        with self._lock:
            self._take_back()
            self._store.retire(device, stream)

    def stats(self) -> PoolStats:
        """What the pool has done so far."""
        with self._lock:
            self._take_back()
            return PoolStats(
                allocations=self._allocations,
                reuses=self._allocations - self._store.upstream_allocations,
                upstream_allocations=self._store.upstream_allocations,
                moves=self._store.moves,
                bytes_in_use=self._store.in_use,
                bytes_held=self._store.held,
                bytes_captured=self._store.captured_bytes(),
                bytes_peak=self._peak,
                zero_fills=self._zero_fills,
                bytes_zeroed=self._bytes_zeroed,
                zero_fills_avoided=self._avoided,
                poison_fills=self._poison_fills,
            )

    def upstream(self, kind: str) -> Upstream:
        """The upstream that serves a device kind."""
        with self._lock:
            return self._store.upstream(kind)

    def __repr__(self) -> str:
        store = self._store
        return f"PaddedPool({self.fill!r}, in use {readable_bytes(store.in_use)}, held {readable_bytes(store.held)})"

    # Inside: the caller holds _lock, except in _zero, _poison and _record_use.

    def _arena(self, device: Device, stream: int) -> Arena:
        """The arena of a stream, made where it is new."""
        check_device("PaddedPool.allocate", device)
        key = (device, stream_key(stream))
        return self._arenas.get(key) or self._store.add_arena(key, device, stream)

    def _take_back(self) -> None:
        returned, store = self._returned, self._store
        while returned:
            block = returned.popleft()
            store.in_use -= block.size
            block.arena.put(block)

    def _pop_known(self, free: list[Block], tag: PaddingTag | None, nbytes: int) -> Block | None:
        """A free block, one whose padding is known to be zero for this tag if there is one."""
        wanted = (tag, nbytes)
        for i in range(1, min(len(free), KNOWLEDGE_SEARCH) + 1):
            if free[-i].zero_padding == wanted:
                return free.pop(-i)
        return free.pop() if free else None  # a finalizer may have allocated since

    def _record_use(self, block: Block, stream: int) -> None:
        arena = block.arena
        block.zero_padding = None
        if not arena.upstream.has_streams or stream_key(stream) == arena.key:
            return
        with self._lock:
            capture = self._arena(arena.device, stream).capture()
            if capture:
                block.capture = capture
            else:
                block.events = [*(block.events or ()), arena.upstream.record_event(arena.device, stream)]

    def _zero(self, block: Block, nbytes: int, tag: PaddingTag | None) -> None:
        """Zeroes the buffer on its stream, unless its padding is known to be zero."""
        if block.zero_padding == (tag, nbytes) and not block.capture:
            with self._lock:
                self._avoided += 1
            return
        arena = block.arena
        arena.upstream.fill(block.pointer, nbytes, 0, arena.device, arena.stream)
        # A fill that a capture recorded has not run yet; a caller who writes the padding has promised nothing.
        promised = tag is not None and tag.writer != "caller" and not block.capture
        block.zero_padding = (tag, nbytes) if promised else None
        with self._lock:
            self._zero_fills += 1
            self._bytes_zeroed += nbytes

    def _poison(self, block: Block, nbytes: int) -> None:
        arena = block.arena
        arena.upstream.fill(block.pointer, nbytes, POISON_BYTE, arena.device, arena.stream)
        with self._lock:
            self._poison_fills += 1

    def __del__(self) -> None:
        # No buffer lives any more: each holds its pool. Blocks of graphs are given back as well.
        try:  # at interpreter exit modules may be gone, contextlib too, and so may the driver
            self.release_captures()
            self.trim()
        except Exception:
            pass  # nobody is left to tell


def _forget_locks() -> None:
    """In the child of a fork: its one thread holds no lock, and who held one is not there to release it."""
    for pool in _pools:
        pool._lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_locks)
