"""Memory whose padding is known: :class:`PaddedPool`, :class:`Buffer`, :class:`PaddingTag`.

``with fp4rt.use_pool(fp4rt.PaddedPool(fill="poison")) as pool: q = fp4rt.quantize(x)``, then ``pool.stats()``.
"""

from __future__ import annotations

from contextvars import ContextVar
from types import TracebackType

from fp4rt.errors import DtypeError
from fp4rt.pool.buffer import Buffer
from fp4rt.pool.padded import FILLS, POISON_BYTE, Fill, PaddedPool
from fp4rt.pool.stats import PoolStats
from fp4rt.pool.tag import PaddingTag, Writer, data_tag, scale_tag
from fp4rt.pool.upstream import HostUpstream, Upstream, register_upstream

__all__ = [
    "FILLS",
    "POISON_BYTE",
    "Buffer",
    "Fill",
    "HostUpstream",
    "PaddedPool",
    "PaddingTag",
    "PoolStats",
    "Upstream",
    "Writer",
    "current_pool",
    "data_tag",
    "register_upstream",
    "scale_tag",
    "use_pool",
]

_current: ContextVar[PaddedPool] = ContextVar("fp4rt_pool", default=PaddedPool())  # noqa: B039  one pool for everybody
_outer: ContextVar[tuple[PaddedPool, ...]] = ContextVar("fp4rt_outer_pools", default=())


def current_pool() -> PaddedPool:
    """The pool that calls of this thread (or task) allocate from: the innermost ``use_pool``, else one common pool."""
    return _current.get()


class use_pool:
    """``with use_pool(pool):`` every allocation inside comes from ``pool``. New threads start with the common pool.

    Raises:
        DtypeError: ``pool`` is no pool, but the name of a fill policy, say.
    """

    def __init__(self, pool: PaddedPool) -> None:
        if not isinstance(pool, PaddedPool):
            named = isinstance(pool, str) and pool in FILLS
            got, fill = (repr(pool), f"fill={pool!r}") if named else (type(pool).__name__, "")
            raise DtypeError(f"use_pool needs a PaddedPool, got {got}; make one with fp4rt.PaddedPool({fill})")
        self.pool = pool

    def __enter__(self) -> PaddedPool:
        _outer.set((*_outer.get(), _current.get()))
        _current.set(self.pool)
        return self.pool

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        *outer, before = _outer.get()
        _outer.set(tuple(outer))
        _current.set(before)
