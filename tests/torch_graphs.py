"""Capturing a torch graph, as the GPU tests do it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def captured(step: Callable[[], Any]) -> tuple[Any, Any]:
    """(graph, what ``step`` returned in it); before, it runs once, so that kernels and memory are there."""
    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()
    return graph, result
