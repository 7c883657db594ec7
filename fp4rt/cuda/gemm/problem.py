"""What decides how a product is computed: sizes, kinds, alignments and the device's measures. No address, no GPU."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from fp4rt.backend import QuantizedViews
from fp4rt.cuda.gemm.portable import Alignment, alignment_of
from fp4rt.cuda.gemm.tensor_map import POINTER_ALIGNMENT
from fp4rt.cuda.kernel import device_attribute, device_target
from fp4rt.cuda.strides import byte_strides, check_alignment

if TYPE_CHECKING:
    from fp4rt.interop import ArrayView

__all__ = ["DeviceMeasures", "Problem", "activation_alignment", "can_bulk_load", "device_measures", "weight_alignment"]

HALF_BYTES = 2
# cudaDeviceAttr values
_MULTIPROCESSORS, _SHARED_BYTES_OF_MULTIPROCESSOR, _SHARED_BYTES_OF_BLOCK = 16, 81, 97


class DeviceMeasures(NamedTuple):
    """What selection knows of a device."""

    arch: int  # 90 of sm_90a
    specific: bool  # whether kernels are compiled for the ``a`` target
    multiprocessors: int
    shared_bytes: int  # the most that a block may have
    shared_bytes_of_multiprocessor: int


@cache
def device_measures(device: int) -> DeviceMeasures:
    """Of a device that is there."""
    target = device_target(device)
    return DeviceMeasures(
        target.number,
        target.specific,
        device_attribute(_MULTIPROCESSORS, device),
        device_attribute(_SHARED_BYTES_OF_BLOCK, device),
        device_attribute(_SHARED_BYTES_OF_MULTIPROCESSOR, device),
    )


class Problem(NamedTuple):
    """One product D (m, n) = A (m, k) @ B (n, k)^T."""

    device: DeviceMeasures
    m: int
    n: int
    k: int
    a_kind: str  # "float16", "bfloat16" or "nvfp4"
    b_kind: str  # "nvfp4" or "prepacked"
    align: Alignment
    bulk: bool = True  # whether the copy engine can fetch A's rows; so for NVFP4, whose bf16 copy is ours


def activation_alignment(a: ArrayView | QuantizedViews) -> tuple[int, int]:
    """(bytes that addresses of A's elements or codes are multiples of, the same of its scales), as kernels use them.

    Raises:
        ShapeError: elements of two bytes at odd addresses.
    """
    if isinstance(a, QuantizedViews):
        return _codes_alignment(a), _scales_alignment(a)
    check_alignment(a)
    row, column = byte_strides(a)
    plain = column == HALF_BYTES
    return (alignment_of(a.pointer | abs(row), (16, HALF_BYTES)) if plain else HALF_BYTES), 1


def can_bulk_load(a: ArrayView) -> bool:
    """Whether A can lie behind a tensor map: dense rows, the address and the pitch multiples of 16."""
    row, column = byte_strides(a)
    m, k = a.shape
    apart = m == 1 or row >= k * HALF_BYTES  # rows that overlap or repeat are no matrix to it
    return column == HALF_BYTES and apart and (a.pointer | row) % POINTER_ALIGNMENT == 0


def weight_alignment(b: QuantizedViews) -> tuple[int, int]:
    """The same of B's codes and scales."""
    return _codes_alignment(b), _scales_alignment(b)


def _codes_alignment(q: QuantizedViews) -> int:
    return alignment_of(q.data.pointer | q.padded_n // 2, (16, 8, 1))


def _scales_alignment(q: QuantizedViews) -> int:
    row = 4 if q.layout.tiled else q.columns  # four block columns of a row are neighbours; rows follow each other
    return alignment_of(q.scales.pointer | row, (4, 1))
