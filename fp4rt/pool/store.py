"""The blocks of a pool, free or not: taken from upstream, moved between streams, given back. No lock of its own."""

from __future__ import annotations

from typing import Any

from fp4rt.device import Device
from fp4rt.errors import OutOfMemoryError
from fp4rt.pool.arena import Arena
from fp4rt.pool.buffer import Block
from fp4rt.pool.stats import readable_bytes
from fp4rt.pool.upstream import Upstream, make_upstream

__all__ = ["PER_THREAD_STREAM", "BlockStore"]

PER_THREAD_STREAM = 2  # the handle cudaStreamPerThread: one number, another stream in each thread


class BlockStore:
    """Arenas by (device, stream), their upstreams, and how much is held. The pool calls it under its lock."""

    def __init__(self, given_upstream: Any, limit: int | None) -> None:
        self.arenas: dict[Any, Arena] = {}
        self.limit = limit
        self.held = 0
        self.in_use = 0
        self.upstream_allocations = 0
        self.moves = 0
        self._given_upstream = given_upstream
        self._upstreams: dict[str, Upstream] = {}

    def upstream(self, kind: str) -> Upstream:
        """The upstream that serves a device kind."""
        found = self._upstreams.get(kind)
        if found is None:
            found = self._upstreams[kind] = make_upstream(kind, self._given_upstream)
        return found

    def add_arena(self, key: Any, device: Device, stream: int) -> Arena:
        """The arena of a stream seen for the first time."""
        upstream = self.upstream(device.kind)
        shareable = upstream.has_streams and stream != PER_THREAD_STREAM
        arena = self.arenas[key] = Arena(upstream, device, stream, shareable)
        return arena

    def obtain(self, nbytes: int, size: int, arena: Arena, capture: int) -> Block:
        """A block that the arena does not have: from upstream, else from another stream, else after making room.

        Raises:
            OutOfMemoryError: none of these helps.
        """
        cause: MemoryError | None = None
        try:
            if self.limit is None or self.held + size <= self.limit:
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
        finally:
            del cause  # it holds this frame, and through it the new buffer: a circle that only a collection would end

    def give_up(self, block: Block) -> None:
        """Gives a free block to upstream, in an order that upstream can know."""
        arena = block.arena
        if arena is not block.origin and not arena.retired:  # upstream knows the first stream, the last work is here
            arena.upstream.synchronize_event(arena.upstream.record_event(arena.device, arena.stream))
        for event in block.events or ():
            arena.upstream.synchronize_event(event)
        self.held -= block.size
        arena.upstream.free(block.handle)

    def give_up_free(self, arena: Arena) -> None:
        """Gives all free blocks of an arena to upstream; those kept for graphs stay."""
        for block in arena.blocks():
            self.give_up(block)
        arena.free.clear()

    def captured_bytes(self) -> int:
        """Bytes kept for graphs."""
        return sum(b.size for arena in self.arenas.values() for blocks in arena.captured.values() for b in blocks)

    def release_captures(self, capture_id: int | None) -> int:
        """Makes the returned blocks of one capture, or of all, ordinary free blocks; how many bytes."""
        freed = 0
        for arena in self.arenas.values():
            for key in [k for k in arena.captured if capture_id is None or k[0] == capture_id]:
                for block in arena.captured.pop(key):
                    block.capture = 0
                    arena.put(block)
                    freed += block.size
        return freed

    def retire(self, device: Device, stream: int) -> None:
        """Waits for a stream, gives its free blocks up and forgets its handle. Buffers in use give theirs up later."""
        arena = self.arenas.pop((device, stream), None)
        if arena is None:
            return
        if arena.upstream.has_streams:
            arena.upstream.synchronize_event(arena.upstream.record_event(device, stream))
        arena.retired, arena.shareable = True, False
        self.give_up_free(arena)
        if arena.captured:  # for release_captures to find
            self.arenas[(device, stream, arena)] = arena

    @staticmethod
    def wait_for_users(block: Block) -> None:
        """Makes later work of the block's stream wait for the other streams that used it."""
        arena = block.arena
        for event in block.events or ():
            arena.upstream.wait_event(event, arena.device, arena.stream)
        block.events = None

    def _new_block(self, size: int, arena: Arena) -> Block:
        pointer, handle = arena.upstream.alloc(size, arena.device, arena.stream)
        self.held += size
        self.upstream_allocations += 1
        return Block(pointer, size, handle, arena)

    def _move_from_other_stream(self, size: int, arena: Arena) -> Block | None:
        """A free block of another stream of the device; later work of the arena's stream waits for that stream."""
        for other in self.arenas.values():
            free = other.free.get(size)
            if not free or other is arena or other.device != arena.device or not other.shareable:
                continue
            if not arena.shareable or other.capturing():
                continue
            block = free.pop(0)  # the one freed longest ago
            self.wait_for_users(block)
            event = other.upstream.record_event(other.device, other.stream)
            arena.upstream.wait_event(event, arena.device, arena.stream)
            block.arena = arena
            self.moves += 1
            return block
        return None

    def _make_room(self, size: int, device: Device) -> bool:
        """Gives free blocks of the device back: all of them if upstream is short, else until the limit allows it."""
        target = None if self.limit is None else self.limit - size
        for arena in self.arenas.values():
            if arena.device != device or arena.capturing():
                continue
            for block in arena.blocks():
                arena.free[block.size].remove(block)
                self.give_up(block)
                if target is not None and self.held <= target:
                    return True
        return target is None or self.held <= target

    def _no_memory_text(self, nbytes: int, size: int, arena: Arena, capture: int) -> str:
        limit = "no limit" if self.limit is None else f"limit {readable_bytes(self.limit)}"
        text = (
            f"PaddedPool: no {readable_bytes(size)} for a request of {nbytes} bytes on {arena.device}: "
            f"in use {readable_bytes(self.in_use)}, held {readable_bytes(self.held)}, {limit}. "
        )
        if capture:
            return text + "A graph capture is running: make the same calls once before it, so that the pool has memory"
        return text + "Drop results that are no longer needed, trim() other pools, or raise PaddedPool(limit=...)"
