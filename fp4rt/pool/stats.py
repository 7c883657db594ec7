"""What a pool has done, and how it says sizes."""

from __future__ import annotations

from dataclasses import asdict, dataclass

__all__ = ["PoolStats", "readable_bytes"]


def readable_bytes(nbytes: int) -> str:
    """A size for people: "12 B", "3.5 KiB", "1.25 GiB"."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = min(max(nbytes.bit_length() - 1, 0) // 10, len(units) - 1)
    return f"{nbytes / (1 << 10 * power):.4g} {units[power]}"


@dataclass(frozen=True)
class PoolStats:
    """Counts since the pool was made. Bytes are those of whole blocks, i.e. rounded up to size classes."""

    allocations: int
    reuses: int  # allocations that needed nothing of upstream
    upstream_allocations: int
    moves: int  # blocks handed to another stream behind an event
    bytes_in_use: int
    bytes_held: int  # taken from upstream and not given back: in use, free or kept for a graph
    bytes_captured: int  # kept for graphs, see PaddedPool.release_captures
    bytes_peak: int  # the most that was in use at once
    zero_fills: int
    bytes_zeroed: int
    zero_fills_avoided: int  # that the policy asked for, of blocks whose padding was known to be zero
    poison_fills: int

    def as_dict(self) -> dict[str, int]:
        """The counts by name."""
        return asdict(self)

    def __getitem__(self, name: str) -> int:
        return self.as_dict()[name]
