"""How a product would be computed, in words; and, if asked, the measuring of how it is computed best."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fp4rt.backend import Explanation, PrepackedViews, QuantizedViews
from fp4rt.cuda.gemm.autotune import tune
from fp4rt.cuda.gemm.matmul import Weight, forget_plans, launch, make_plan, plan_of, problem_of
from fp4rt.cuda.results import new_memory

if TYPE_CHECKING:
    from fp4rt.cuda.gemm.selection import Choice
    from fp4rt.interop import ArrayView

__all__ = ["explain"]

_MEASURED_OUT = "bfloat16"  # what most products give
_FLUSHED_BYTES = 256 << 20  # more than any L2 holds: every measured run begins with weights in device memory


def explain(
    a: QuantizedViews | ArrayView, b: QuantizedViews | PrepackedViews, measure: bool, stream: int
) -> Explanation:
    """See :class:`fp4rt.backend.Backend`."""
    if 0 in (a.shape[0], b.shape[0]):
        return Explanation("none", "", {}, f"m = {a.shape[0]}, n = {b.shape[0]}: nothing is launched")
    weight = Weight(b)
    problem = problem_of(a, weight)
    if measure:
        tune(problem, _Stopwatch(a, weight, problem, stream))
        forget_plans()
    plan = plan_of(a, weight)
    choice = plan.choice
    return Explanation(choice.kernel, str(choice.tile or ""), dict(plan.workspace), choice.why)


class _Stopwatch:
    """Microseconds of one product with a choice, weights out of L2. Waits for the device: not while capturing."""

    def __init__(self, a: Any, weight: Any, problem: Any, stream: int) -> None:
        import cupy

        self._runtime = cupy.cuda.runtime
        self._event = lambda: cupy.cuda.Event()
        self._a, self._weight, self._problem, self._stream = a, weight, problem, stream
        self._device = weight.tiles.device
        self._out = new_memory((problem.m, problem.n), _MEASURED_OUT, self._device, stream)
        self._flushed = new_memory((_FLUSHED_BYTES,), "uint8", self._device, stream)

    def __call__(self, choice: Choice) -> float:
        plan = make_plan(self._a, self._weight, self._problem, choice)
        begin, end = self._event(), self._event()
        self._runtime.memsetAsync(self._flushed.pointer, 0, _FLUSHED_BYTES, self._stream)
        self._runtime.eventRecord(begin.ptr, self._stream)
        launch(plan, self._a, self._weight, _MEASURED_OUT, None, None, self._out.pointer, self._stream)
        self._runtime.eventRecord(end.ptr, self._stream)
        end.synchronize()
        return 1e3 * float(self._runtime.eventElapsedTime(begin.ptr, end.ptr))
