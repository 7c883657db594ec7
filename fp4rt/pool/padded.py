"""The padded pool: blocks by size class, reused in stream order, with tags that know the padding.

Policy:

- Reuse. A freed block goes to the arena of its (device, stream) and serves that stream again at once: stream order
  protects it. Another stream gets it only when memory is short, and then waits for an event of the first stream.
- Fill. ``covered`` zeroes only where the tag says that the pool does; ``zero`` every tagged buffer; ``empty`` nothing;
  ``poison`` sets every buffer to 0xFF. Fills are queued on the allocation's stream. A block whose padding is known to
  be zero is not filled again for the same tag.
- Graphs. While a stream is being captured nothing is queried, waited for or given back. A block that a capture used
  belongs to that graph: the same capture may use it again, nobody else, until :meth:`PaddedPool.release_captures`.
  Replays must be ordered after the work that the stream had before its capture, as with every stream-ordered pool.
- Threads. Every method may be called from any thread. One lock guards all of the pool's state; a dying buffer, which
  may die anywhere, only appends its block to a deque, and the next call under the lock takes it from there.
- Streams. A stream must outlive the buffers allocated on it; before destroying one, :meth:`PaddedPool.retire_stream`.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any, Literal

from fp4rt.device import CPU, Device
from fp4rt.errors import OutOfMemoryError, ShapeError
from fp4rt.pool.arena import Arena, size_class
from fp4rt.pool.buffer import Block, Buffer
from fp4rt.pool.stats import PoolStats, readable_bytes
from fp4rt.pool.tag import PaddingTag
from fp4rt.pool.upstream import Upstream, make_upstream

__all__ = ["FILLS", "POISON_BYTE", "Fill", "PaddedPool"]

Fill = Literal["covered", "zero", "empty", "poison"]
FILLS = ("covered", "zero", "empty", "poison")
POISON_BYTE = 0xFF
PER_THREAD_STREAM = 2  # the handle cudaStreamPerThread: one number, another stream in each thread
KNOWLEDGE_SEARCH = 8  # free blocks looked at for one whose padding is known to be zero


class PaddedPool:
    """Memory for codes, scales and workspaces. See the module for the policy.

    Args:
        fill: "covered", "zero", "empty" or "poison".
        upstream: where memory comes from: an object with :class:`fp4rt.pool.Upstream`'s methods, or an allocator that a
            backend knows (CuPy's ``MemoryPool`` and ``MemoryAsyncPool``). It serves its own device kind; other kinds, and
            None, use the default: NumPy on the host, CuPy's default pool on a CUDA device.
        limit: the most bytes to hold, or None.

    Raises:
        ValueError: the fill policy is unknown.
    """

    def __init__(self, fill: Fill = "covered", upstream: Any = None, limit: int | None = None) -> None:
        if fill not in FILLS:
            raise ValueError(f"PaddedPool: unknown fill {fill!r}; use one of {', '.join(map(repr, FILLS))}")
        if limit is not None and limit < 0:
            raise ShapeError(f"PaddedPool: limit must be a number of bytes >= 0 or None, got {limit}")
        self.fill: Fill = fill
        self.limit = limit
        self._given_upstream = upstream
        self._returned: deque[Block] = deque()  # guarded by being a deque
        self._lock = threading.RLock()  # reentrant: a collector may run Python that allocates while it is held
        # Guarded by _lock from here on.
        self._arenas: dict[Any, Arena] = {}
        self._upstreams: dict[str, Upstream] = {}
        self._allocations = self._reuses = self._upstream_allocations = self._moves = 0
        self._in_use = self._held = self._peak = 0
        self._zero_fills = self._bytes_zeroed = self._avoided = self._poison_fills = 0
        self._threads = threading.local()  # tokens for PER_THREAD_STREAM
        self._plain = fill in ("covered", "empty")  # nothing to fill unless a tag says that the pool does

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
            ShapeError: ``nbytes`` is negative, or the tag's extent is larger.
        """
        size = size_class(nbytes)
        key = (device, stream) if stream != PER_THREAD_STREAM else self._per_thread_key(device)
        with self._lock:
            if self._returned:
                self._take_back()
            arena = self._arenas.get(key)
            if arena is None:
                arena = self._make_arena(key, device, stream)
            capture_id = arena.capture_id
            if capture_id is None:
                capture = 0
                free = arena.free.get(size)
            else:
                capture = capture_id(device, stream)
                free = arena.free.get(size) if not capture else arena.captured.get((capture, size)) or arena.free.get(size)
            block = None
            if free:
                block = free.pop() if self._plain or tag is None else self._pop_known(free, tag, nbytes)
                self._reuses += 1
            else:
                block = self._obtain(nbytes, size, arena, capture)
            block.capture = capture
            self._allocations += 1
            in_use = self._in_use = self._in_use + size
            if in_use > self._peak:
                self._peak = in_use
            if block.events is not None:
                self._wait_for_users(block)
        buffer = Buffer(self, block, nbytes, tag)
        if tag is not None or not self._plain or nbytes < 0:
            self._prepare(buffer, block)
        return buffer

    def trim(self, device: Device | None = None) -> int:
        """Gives every free block back to upstream; those kept for graphs stay.

        Waits for streams that took blocks over from others. Not while a capture is running.

        Args:
            device: only the blocks of this device.

        Returns:
            The number of bytes given back.
        """
        with self._lock:
            self._take_back()
            before = self._held
            for arena in self._arenas.values():
                if device is None or arena.device == device:
                    for block in arena.blocks():
                        self._give_up(block)
                    arena.free.clear()
            return before - self._held

    def release_captures(self, capture_id: int | None = None) -> int:
        """Makes the blocks that captures used free for everybody. Call it when their graphs are destroyed.

        Args:
            capture_id: one capture's number, or None for all of them.

        Returns:
            The number of bytes made free. Buffers that still live return to the pool as ordinary ones.
        """
        freed = 0
        with self._lock:
            self._take_back()
            for arena in self._arenas.values():
                for key in [k for k in arena.captured if capture_id is None or k[0] == capture_id]:
                    for block in arena.captured.pop(key):
                        block.capture = 0
                        arena.put(block)
                        freed += block.size
        return freed

    def retire_stream(self, device: Device, stream: int) -> None:
        """Waits for a stream's work and gives its free blocks back to upstream. Call it before destroying the stream."""
        with self._lock:
            self._take_back()
            arena = self._arenas.pop((device, stream), None)
            if arena is None:
                return
            if arena.upstream.has_streams:
                arena.upstream.synchronize_event(arena.upstream.record_event(device, stream))
            for block in arena.blocks():
                self._give_up(block)
            arena.free.clear()
            if arena.captured:  # graphs still use these; keep them findable for release_captures
                self._arenas[(device, stream, "retired", id(arena))] = arena

    def stats(self) -> PoolStats:
        """What the pool has done so far."""
        with self._lock:
            self._take_back()
            captured = sum(b.size for a in self._arenas.values() for blocks in a.captured.values() for b in blocks)
            return PoolStats(
                allocations=self._allocations,
                reuses=self._reuses,
                upstream_allocations=self._upstream_allocations,
                moves=self._moves,
                bytes_in_use=self._in_use,
                bytes_held=self._held,
                bytes_captured=captured,
                bytes_peak=self._peak,
                zero_fills=self._zero_fills,
                bytes_zeroed=self._bytes_zeroed,
                zero_fills_avoided=self._avoided,
                poison_fills=self._poison_fills,
            )

    def upstream(self, kind: str) -> Upstream:
        """The upstream that serves a device kind."""
        with self._lock:
            found = self._upstreams.get(kind)
            if found is None:
                found = self._upstreams[kind] = make_upstream(kind, self._given_upstream)
            return found

    def __repr__(self) -> str:
        return f"PaddedPool(fill={self.fill!r}, in use {readable_bytes(self._in_use)}, held {readable_bytes(self._held)})"

    # Inside: the caller holds _lock, except in _prepare, _record_use and _per_thread_key.

    def _per_thread_key(self, device: Device) -> Any:
        token = getattr(self._threads, "token", None)
        if token is None:
            token = self._threads.token = object()  # never equal to another thread's, unlike a thread's number
        return (device, PER_THREAD_STREAM, token)

    def _make_arena(self, key: Any, device: Device, stream: int) -> Arena:
        upstream = self.upstream(device.kind)
        shareable = upstream.has_streams and stream != PER_THREAD_STREAM
        arena = self._arenas[key] = Arena(upstream, device, stream, shareable)
        return arena

    def _take_back(self) -> None:
        returned = self._returned
        while returned:
            block = returned.popleft()
            self._in_use -= block.size
            block.arena.put(block)

    def _pop_known(self, free: list[Block], tag: PaddingTag, nbytes: int) -> Block:
        """A free block, one whose padding is known to be zero for this tag if there is one."""
        wanted = (tag, nbytes)
        for i in range(1, min(len(free), KNOWLEDGE_SEARCH) + 1):
            if free[-i].zero_padding == wanted:
                return free.pop(-i)
        return free.pop()

    def _wait_for_users(self, block: Block) -> None:
        arena = block.arena
        for event in block.events or ():
            arena.upstream.wait_event(event, arena.device, arena.stream)
        block.events = None

    def _record_use(self, block: Block, stream: int) -> None:
        arena = block.arena
        if not arena.upstream.has_streams or stream == arena.stream:
            return
        capture = arena.upstream.capture_id(arena.device, stream)
        with self._lock:
            if capture:
                block.capture = capture
            else:
                block.events = [*(block.events or ()), arena.upstream.record_event(arena.device, stream)]

    def _prepare(self, buffer: Buffer, block: Block) -> None:
        """Checks the tag and fills as the policy says, on the buffer's stream."""
        tag, nbytes, arena = buffer.tag, buffer.nbytes, block.arena
        if nbytes < 0:
            raise ShapeError(f"PaddedPool.allocate needs nbytes >= 0, got {nbytes}")
        if tag is not None and tag.nbytes > nbytes:
            raise ShapeError(f"PaddedPool.allocate: the tag's extent {tag.physical} is larger than nbytes = {nbytes}")
        if self.fill == "poison":
            block.zero_padding = None
            arena.upstream.fill(block.pointer, nbytes, POISON_BYTE, arena.device, arena.stream)
            with self._lock:
                self._poison_fills += 1
            return
        known = (tag, nbytes)
        zero = self.fill == "zero" or (self.fill == "covered" and tag is not None and tag.writer == "pool")
        if tag is None or not zero or (self.fill == "covered" and not tag.has_padding):
            block.zero_padding = None
        elif block.zero_padding == known and not block.capture:
            with self._lock:
                self._avoided += 1
        else:
            arena.upstream.fill(block.pointer, nbytes, 0, arena.device, arena.stream)
            # A fill that a capture recorded has not run yet; a caller who writes the padding promises nothing.
            keeps = not block.capture and tag.writer != "caller"
            block.zero_padding = (tag, nbytes) if keeps else None
            with self._lock:
                self._zero_fills += 1
                self._bytes_zeroed += nbytes

    def _obtain(self, nbytes: int, size: int, arena: Arena, capture: int) -> Block:
        """A block that the arena does not have: from upstream, else from another stream, else after a trim."""
        fits = self.limit is None or self._held + size <= self.limit
        cause: MemoryError | None = None
        if fits:
            try:
                return self._new_block(size, arena)
            except MemoryError as error:
                cause = error
        if not capture:
            moved = self._move_from_other_stream(size, arena)
            if moved is not None:
                return moved
            if self._make_room(size, arena.device):
                try:
                    return self._new_block(size, arena)
                except MemoryError as error:
                    cause = error
        raise OutOfMemoryError(self._no_memory_text(nbytes, size, arena, capture)) from cause

    def _new_block(self, size: int, arena: Arena) -> Block:
        pointer, handle = arena.upstream.alloc(size, arena.device, arena.stream)
        self._held += size
        self._upstream_allocations += 1
        return Block(pointer, size, handle, arena)

    def _move_from_other_stream(self, size: int, arena: Arena) -> Block | None:
        """A free block of another stream of the device; later work of the arena's stream waits for that stream."""
        for other in self._arenas.values():
            free = other.free.get(size)
            if not free or other is arena or other.device != arena.device or not other.shareable:
                continue
            if other.upstream.capture_id(other.device, other.stream):
                continue
            block = free.pop(0)  # the one freed longest ago
            self._wait_for_users(block)
            event = other.upstream.record_event(other.device, other.stream)
            arena.upstream.wait_event(event, arena.device, arena.stream)
            block.arena = arena
            self._moves += 1
            self._reuses += 1
            return block
        return None

    def _make_room(self, size: int, device: Device) -> bool:
        """Gives free blocks of the device back, all of them if upstream is short, else until the limit allows it."""
        target = None if self.limit is None else self.limit - size
        for arena in self._arenas.values():
            if arena.device != device or self._capturing(arena):
                continue
            for block in arena.blocks():
                arena.free[block.size].remove(block)
                self._give_up(block)
                if target is not None and self._held <= target:
                    return True
        return target is None or self._held <= target

    @staticmethod
    def _capturing(arena: Arena) -> bool:
        return arena.capture_id is not None and arena.shareable and bool(arena.capture_id(arena.device, arena.stream))

    def _give_up(self, block: Block) -> None:
        """Gives a free block to upstream, in an order that upstream can know."""
        arena = block.arena
        if arena is not block.origin:  # upstream orders it by its first stream, the last work was on another
            arena.upstream.synchronize_event(arena.upstream.record_event(arena.device, arena.stream))
        for event in block.events or ():
            arena.upstream.synchronize_event(event)
        self._held -= block.size
        arena.upstream.free(block.handle)

    def _no_memory_text(self, nbytes: int, size: int, arena: Arena, capture: int) -> str:
        limit = "no limit" if self.limit is None else f"limit {readable_bytes(self.limit)}"
        text = (
            f"PaddedPool: no {readable_bytes(size)} for a request of {nbytes} bytes on {arena.device}: "
            f"in use {readable_bytes(self._in_use)}, held {readable_bytes(self._held)}, {limit}. "
        )
        if capture:
            return text + "A graph capture is running: run the same calls once before it, so that the pool has the memory"
        return text + "Drop results that are no longer needed, call trim() on other pools, or raise PaddedPool(limit=...)"

    def __del__(self) -> None:
        # No buffer lives any more: each holds its pool. Blocks of graphs are given back as well.
        try:
            self.release_captures()
            self.trim()
        except Exception:  # at interpreter exit the driver may be gone already; there is nobody left to tell
            pass
