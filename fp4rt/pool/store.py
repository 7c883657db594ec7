"""The blocks of a pool, free or not: taken from upstream, moved between streams, given back. No lock of its own."""

from __future__ import annotations

import sys
from typing import Any

from fp4rt.device import Device
from fp4rt.errors import BackendUnavailable, OutOfMemoryError, counted
from fp4rt.pool.arena import Arena
from fp4rt.pool.buffer import Block
from fp4rt.pool.stats import readable_bytes
from fp4rt.pool.stream_key import stream_key
from fp4rt.pool.upstream import Upstream, make_upstream

__all__ = ["BlockStore"]


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
        arena = self.arenas[key] = Arena(self.upstream(device.kind), device, stream)
        return arena

    def obtain(self, nbytes: int, size: int, arena: Arena, capture: int) -> Block:
        """A block that the arena does not have: from upstream, else from another stream, else after making room.

        Raises:
            OutOfMemoryError: none of these helps.
        """
        cause: Exception | None = None
        try:
            if self.limit is None or self.held + size <= self.limit:
                try:
                    return self._new_block(size, arena)
                except MemoryError as error:
                    cause = error
            if not capture:
                try:
                    moved = self._move_from_other_stream(size, arena)
                    if moved is not None:
                        return moved
                    if self._make_room(size, arena):
                        return self._new_block(size, arena)
                except (MemoryError, BackendUnavailable) as error:  # no event while others capture what was not seen
                    cause = error
            raise OutOfMemoryError(self._no_memory_text(nbytes, size, arena, capture)) from cause
        finally:
            del cause  # it holds this frame, and through it the new buffer: a circle that only a collection would end

    def recording(self, device: Device) -> bool:
        """Whether a capture that the pool has seen on the device goes on."""
        return any(arena.still_recording() for arena in self.arenas.values() if arena.device == device)

    def give_up(self, blocks: list[Block]) -> None:
        """Gives free blocks of one device to upstream, after the work that upstream could not order itself."""
        if not blocks:
            return
        upstream, device = blocks[0].arena.upstream, blocks[0].arena.device
        try:
            if any(self._must_wait(block) for block in blocks):
                upstream.synchronize_event(upstream.record_all(device))
        except BaseException:
            for block in blocks:
                block.arena.put(block)
            raise
        for block in blocks:
            self.held -= block.size
            upstream.free(block.handle)

    @staticmethod
    def _must_wait(block: Block) -> bool:
        """Whether upstream would take the block too early: it only knows the stream that it gave the block to."""
        return block.arena is not block.origin or bool(block.events) or block.arena.upstream.must_be_idle(block.handle)

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
        """Waits for a stream and gives its free blocks up."""
        arena = self.arenas.get((device, stream_key(stream)))
        if arena is not None:
            arena.upstream.synchronize_event(arena.upstream.record_event(device, stream))
            self.give_up(arena.take_free())

    @staticmethod
    def wait_for_users(block: Block) -> None:
        """Makes later work of the block's stream wait for the other streams that used it."""
        arena = block.arena
        for event in block.events or ():
            arena.upstream.wait_event(event, arena.device, arena.stream)
        block.events = None

    def _new_block(self, size: int, arena: Arena) -> Block:
        if size > sys.maxsize:  # allocators have many ways to say so
            raise MemoryError(f"{size} bytes are more than an address can count")
        pointer, handle = arena.upstream.alloc(size, arena.device, arena.stream)
        self.held += size
        self.upstream_allocations += 1
        return Block(pointer, size, handle, arena)

    def _move_from_other_stream(self, size: int, arena: Arena) -> Block | None:
        """A free block of another stream of the device; later work of the arena's stream waits for the device's."""
        if not arena.upstream.has_streams or self.recording(arena.device):
            return None
        for other in self.arenas.values():
            free = other.free.get(size)
            if free and other.device == arena.device:
                event = arena.upstream.record_all(arena.device)  # other's own stream may be gone
                arena.upstream.wait_event(event, arena.device, arena.stream)
                if not free:  # a finalizer has allocated since
                    continue
                block = free.pop(0)  # the one freed longest ago
                block.arena, block.events = arena, None
                self.moves += 1
                return block
        return None

    def _make_room(self, size: int, arena: Arena) -> bool:
        """Gives free blocks of the device back: all of them if upstream is short, else until the limit allows it.

        While a graph is being recorded nothing can be waited for, and blocks that would need it stay.
        """
        enough = None if self.limit is None else self.held + size - self.limit
        recording = self.recording(arena.device)
        for other in self.arenas.values():
            if other.device == arena.device and (enough is None or enough > 0):
                taken = other.take_free(enough)
                kept = [block for block in taken if recording and self._must_wait(block)]
                given = [block for block in taken if block not in kept] if kept else taken
                for block in kept:
                    other.put(block)
                self.give_up(given)
                enough = None if enough is None else enough - sum(block.size for block in given)
        return enough is None or enough <= 0

    def _no_memory_text(self, nbytes: int, size: int, arena: Arena, capture: int) -> str:
        limit = "no limit" if self.limit is None else f"limit {readable_bytes(self.limit)}"
        captured = self.captured_bytes()
        kept = f"kept for graphs {readable_bytes(captured)}, " if captured else ""
        text = (
            f"PaddedPool: no {readable_bytes(size)} for a request of {counted(nbytes, 'byte')} on {arena.device}: "
            f"in use {readable_bytes(self.in_use)}, held {readable_bytes(self.held)}, {kept}{limit}. "
        )
        if capture or self.recording(arena.device):
            return text + "A graph is being captured: make the same calls once before it, so that the pool has memory"
        remedies = ["Drop results that are no longer needed", "trim() other pools"]
        if captured:
            remedies.append("release_captures() of destroyed graphs")
        if self.limit is not None:
            remedies.append("raise PaddedPool(limit=...)")
        return text + f"{', '.join(remedies[:-1])} or {remedies[-1]}"
