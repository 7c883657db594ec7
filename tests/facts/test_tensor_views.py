"""A QuantizedTensor remembers how its arrays lie, and notices when they no longer do."""

from __future__ import annotations

import numpy as np
import pytest

import fp4rt
from fp4rt.errors import ShapeError


def test_torch_memory_is_looked_at_once_until_it_moves():
    torch = pytest.importorskip("torch")
    q = fp4rt.quantize(torch.full((4, 32), 6.0), 1.0, layout="linear")
    first = q.views()
    assert q.views() is first
    q.data.set_(torch.zeros_like(q.data))
    assert q.views() is not first
    assert q.views().data.pointer == q.data.data_ptr()
    assert fp4rt.dequantize(q).abs().max() == 0


def test_an_array_that_became_read_only_is_refused_as_out():
    x = np.full((4, 32), 6, np.float32)
    q = fp4rt.quantize(x, 1.0)
    fp4rt.quantize(x, 1.0, out=q)
    q.scales.flags.writeable = False
    with pytest.raises(ShapeError, match="read-only"):
        fp4rt.quantize(x, 1.0, out=q)
