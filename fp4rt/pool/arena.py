"""The free blocks of one stream of one device, by size class."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from fp4rt.device import Device
from fp4rt.errors import DeviceError, DtypeError, ShapeError
from fp4rt.pool.buffer import Block
from fp4rt.pool.stream_key import stream_key
from fp4rt.pool.upstream import Upstream

__all__ = ["DEFAULT_STREAMS", "SIZE_CLASSES", "Arena", "check_device", "check_integer", "size_class"]

DEFAULT_STREAMS = (0, 1)  # the null handle and cudaStreamLegacy: one stream, which cannot be captured
SMALLEST_CLASS = 512  # bytes; also CuPy's and PyTorch's unit, and more than any vector load or tensor-core tile needs
SIZE_CLASSES: dict[int, int] = {}  # what size_class has answered: a look-up costs a quarter of the calculation
REMEMBERED_CLASSES = 4096
CLASS_BITS = 3  # classes between one power of two and the next: 2**3, so at most 1/8 of a block is unused


def check_device(function: str, device: Any) -> None:
    """Refuse what is no :class:`fp4rt.device.Device`, such as its name.

    Raises:
        DeviceError: it is none.
    """
    if not isinstance(device, Device):
        raise DeviceError(f"{function} needs device as a fp4rt.device.Device, such as Device('cpu', 0), got {device!r}")


def check_integer(what: str, value: Any) -> int:
    """A number of bytes as an int; ``what`` opens the error, e.g. "PaddedPool needs limit as an integer".

    Raises:
        DtypeError: it is no integer, or a truth value.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise DtypeError(f"{what}, got {value!r}")
    return number


def size_class(nbytes: int) -> int:
    """Smallest block size that holds ``nbytes``: multiples of 512 up to 8 KiB, then eight sizes per power of two.

    9,000 bytes: 2^13 < 9,000 <= 2^14, the step is 2^13 / 8 = 1,024, the class 9,216.
    """
    if nbytes < 0:
        raise ShapeError(f"PaddedPool.allocate needs nbytes >= 0, got {nbytes}")
    last = max(nbytes, SMALLEST_CLASS) - 1
    shift = max(last.bit_length() - 1 - CLASS_BITS, SMALLEST_CLASS.bit_length() - 1)
    size = ((last >> shift) + 1) << shift
    if len(SIZE_CLASSES) < REMEMBERED_CLASSES:
        SIZE_CLASSES[nbytes] = size
    return size


class Arena:
    """Free blocks whose last work is in the order of one stream; any of them may be used on that stream at once."""

    __slots__ = ("_goes_on", "captured", "device", "free", "is_capturing", "key", "recording", "stream", "upstream")

    def __init__(self, upstream: Upstream, device: Device, stream: int) -> None:
        self.upstream = upstream
        self.device = device
        self.stream = stream
        self.key = stream_key(stream)
        self.free: dict[int, list[Block]] = {}
        self.captured: dict[tuple[int, int], list[Block]] = {}  # (capture, size) -> blocks that a graph uses
        self.recording = 0  # the capture that the stream was recording when it was last asked; it may have ended
        self._goes_on: Callable[[], bool] | None = None  # whether that capture still does
        can_capture = upstream.has_streams and stream not in DEFAULT_STREAMS
        self.is_capturing = upstream.is_capturing if can_capture else None

    def capture(self) -> int:
        """The capture that the stream is recording now, or 0."""
        capture = 0
        if self.is_capturing is not None and self.is_capturing(self.stream):
            capture = self.upstream.capture_id(self.device, self.stream)
        if capture != self.recording:
            self._goes_on = self.upstream.watch_capture(self.device, self.stream) if capture else None
            self.recording = capture
        return capture

    def still_recording(self) -> bool:
        """Whether the capture that the stream was recording goes on; the stream itself may be destroyed by now."""
        if self._goes_on is not None and not self._goes_on():
            self._goes_on, self.recording = None, 0
        return self.recording != 0

    def put(self, block: Block) -> None:
        """Takes a block back."""
        if block.capture:
            self.captured.setdefault((block.capture, block.size), []).append(block)
            return
        try:
            self.free[block.size].append(block)
        except KeyError:
            self.free[block.size] = [block]

    def usable_in_capture(self, capture: int, size: int) -> list[Block] | None:
        """The list to pop a block from while the stream records a graph, or None.

        First what the same capture has freed; else an ordinary block, if no other stream has used it: waiting for an
        event from outside would end the capture.
        """
        own = self.captured.get((capture, size))
        if own:
            return own
        free = self.free.get(size)
        return free if free and free[-1].events is None else None

    def take_free(self, enough: int | None = None) -> list[Block]:
        """Takes free blocks out, the largest first, until they have ``enough`` bytes; all of them where it is None."""
        taken: list[Block] = []
        for size in sorted(self.free, reverse=True):
            blocks = self.free[size]
            while blocks and (enough is None or enough > 0):
                taken.append(blocks.pop())
                enough = None if enough is None else enough - size
        return taken
