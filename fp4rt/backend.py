"""The contract between ``api`` and the two backends: what is handed over, and what must come back.

``fp4rt.cpu`` and ``fp4rt.cuda`` are modules with the functions of :class:`Backend`. Their arguments are checked
already: ranks, sizes, dtypes, devices and writability agree, ``layout`` is a ``ScaleLayout``, ``padded_n`` is a
multiple of 16 not below n, dtype names are spelled out ("bfloat16"). A backend trusts them.

Rules for both:

- Results come back in the library of the first array argument (``view.library``), in fresh memory from the current
  pool. ``q.global_scale`` is fresh too: it never aliases what the caller passed.
- With ``out`` nothing is allocated for results; every byte of ``out`` is written, padding included. The return value
  is then ignored: ``api`` hands the caller's own ``out`` back.
- m = 0 returns before any launch; an automatic global scale is then 1.0.
- ``stream`` is an integer handle, resolved from the caller's ``stream=`` and the array's library; 0 on the host.
- All arrays of a :class:`QuantizedViews` are C-contiguous uint8 (fp32 for the global scale), at any alignment.
  Padding in them is never read.

Where fp32's range ends, the steps of ``fp4rt.format`` leave two products open. Both backends settle them alike:
0 * inf (enc overflowed because the global scale is near the largest fp32) gives code 0 with x's sign, and
inf * 0 (enc underflowed because the global scale is below 2^-119) gives +-6. The bits of a NaN result are free.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from fp4rt.layout import ScaleLayout, block_columns

if TYPE_CHECKING:
    from fp4rt.interop import ArrayView
    from fp4rt.prepacked import PrepackedWeight
    from fp4rt.tensor import QuantizedTensor

__all__ = ["Backend", "BackendStatus", "Explanation", "PrepackedViews", "QuantizedViews"]


class QuantizedViews(NamedTuple):
    """A QuantizedTensor seen through array views; as ``out`` it is where the result goes."""

    data: ArrayView  # uint8 (m, padded_n / 2)
    scales: ArrayView  # uint8, layout.shape(m, columns)
    global_scale: ArrayView  # fp32, one element
    shape: tuple[int, int]  # (m, n)
    layout: ScaleLayout
    padded_n: int

    @property
    def columns(self) -> int:
        """Number C of block columns, padding included."""
        return block_columns(self.padded_n)


class PrepackedViews(NamedTuple):
    """What products read of a PrepackedWeight, of the version that this library reads, seen through array views."""

    data: ArrayView  # uint8, the tiles
    global_scale: ArrayView  # fp32, one element
    shape: tuple[int, int]  # (n, k)
    layout: ScaleLayout
    padded_n: int

    @property
    def columns(self) -> int:
        """Number of block columns of the tensor that it was made from."""
        return block_columns(self.padded_n)


class BackendStatus(NamedTuple):
    """What ``fp4rt.backends()`` says of one backend: usable on ``devices``, or why not and what to do."""

    name: str
    usable: bool
    reason: str
    devices: tuple[str, ...] = ()


class Explanation(NamedTuple):
    """How a product is computed: what ``fp4rt.explain()`` says."""

    kernel: str
    tile: str  # the kernel's compile-time choices
    workspace: dict[str, int]  # bytes of temporary memory, by purpose
    why: str


class Backend(Protocol):
    """The functions that ``fp4rt.cpu`` and ``fp4rt.cuda`` offer."""

    def status(self) -> BackendStatus:
        """Whether this backend can run here; never raises."""

    def quantize(
        self,
        x: ArrayView,
        global_scale: ArrayView | float | None,
        layout: ScaleLayout,
        padded_n: int,
        out: QuantizedViews | None,
        stream: int,
    ) -> QuantizedTensor | None:
        """x (m, n) fp16/bf16/fp32, any strides. ``global_scale`` None: computed on the device, without a host sync."""

    def dequantize(self, q: QuantizedViews, dtype: str, out: ArrayView | None, stream: int) -> Any:
        """(m, n) in ``dtype``: "float16", "bfloat16" or "float32". ``out`` is C-contiguous."""

    def relayout(self, q: QuantizedViews, layout: ScaleLayout, out: QuantizedViews | None, stream: int) -> Any:
        """Scale bytes to ``layout``; every scale that belongs to no block of the n columns becomes 0.

        Without ``out`` only scales move: the result is the array of scales, which ``api`` joins with q's own data and
        global scale. With it all three are copied, data bytes as they are.
        """

    def global_scale(self, x: ArrayView, stream: int) -> Any:
        """fp32 (1,): 2688 / amax over the finite values of x."""

    def matmul(
        self,
        a: QuantizedViews | ArrayView,
        b: QuantizedViews | PrepackedViews,
        out_dtype: str,
        alpha: ArrayView | float | None,
        bias: ArrayView | None,
        out: ArrayView | None,
        stream: int,
    ) -> Any:
        """(m, n) in ``out_dtype`` = alpha * a @ b.T + bias, fp32 until the one rounding. ``bias`` is (n,)."""

    def explain(
        self, a: QuantizedViews | ArrayView, b: QuantizedViews | PrepackedViews, measure: bool, stream: int
    ) -> Explanation:
        """How ``matmul(a, b)`` would be computed. ``measure``: time the candidates first and remember the fastest."""

    def prepack(self, b: QuantizedViews, stream: int) -> PrepackedWeight:
        """One-time repack of a weight (n, k)."""

    def unpack(self, weight: PrepackedViews, restored: ArrayView, stream: int) -> QuantizedTensor:
        """The tensor that ``weight`` was made from, padding zero. ``restored``: its records, uint8 (count, 16)."""

    def prepacked_values(self, weight: PrepackedViews, restored: ArrayView, out: ArrayView, stream: int) -> None:
        """The values (n, k) of ``weight`` to ``out``, C-contiguous, as :meth:`dequantize` gives them once unpacked."""
