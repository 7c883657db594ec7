"""``PrepackedWeight`` and the prepacked layout: weights in the order in which the matrix kernels' registers want them.

A weight (n, k) is cut into tiles of 16 rows x 256 columns; n and k are padded to whole tiles with codes and scales
that contribute 0. A tile takes 2304 bytes (0.5625 byte a weight) and tiles lie column group by column group, so that
blocks that work on neighbouring rows read neighbouring memory at the same time::

    data[k / 256][n / 16][2304]      2304 = 4 chunks of 64 columns x 32 lanes x 16 bytes of codes, then 256 of scales

Codes. In a chunk, lane ``4 * g + t`` owns 16 bytes = 4 words; word ``j`` is one operand fragment of the tensor cores'
16 x 16 tile: rows ``g + 8 * rr``, columns ``16 * j + 8 * kk + 2 * t + h`` (rr, kk, h in {0, 1}). The codes ``s eem``
(sign, two exponent bits, mantissa) with ``q = rr + 2 * kk`` lie in half-word h::

    bit 16h +     15    14    13    12    11..9   8..6    5..3    2..0
                  s 0   s 2   s 3   s 1   eem 3   eem 0   eem 1   eem 2      of the code with this q

bf16 has its lowest exponent bits and its first mantissa bit at 8 ... 6, fp16 at 11 ... 9, both the sign at 15. In this
order few instructions bring the codes there (``kernels_src/mma/prepacked_fragments.cuh``): two of four lie as bf16
wants them or a shift away, and one selection of bits does for the two others.

Scales. A non-negative e4m3 byte is kept as e5m3 with bias 22, in which all its values are normal numbers: the four
scales of a row and a chunk make one word, two of them (j = 0, 2) at bits 11:4 and 27:20, the others (j = 1, 3) there
after a rotation by 8. At bits 14:7 the byte is the fp16 number scale * 2^7; as it lies, with the bits 0x7000 set, the
bf16 number scale * 2^119. Word (row g + 8 * rr, chunk 2 * pr + cc) lies at byte
2048 + 128 * pr + 16 * g + 8 * cc + 4 * rr. NaN (0x7F) is 0xFC, a NaN in bf16 and in fp16 alike; scale 0 is byte 0 with
codes 0.

What the arithmetic cannot see is kept aside, so that unpacking gives back every byte: a block with scale 0 but codes
that are not, or with the scale's sign bit set (its codes then carry the sign), leaves a record in ``restored``::

    u32 row    u32 block column << 8 | scale byte    8 bytes of codes        sorted by row, then column

Columns k ... of a partial last block, and padding, are not kept: they come back as zeros.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fp4rt import interop
from fp4rt.backend import PrepackedViews
from fp4rt.errors import LayoutError, ShapeError
from fp4rt.format import BLOCK, CODES_PER_BYTE, E4M3, E4M3_NAN_BYTE
from fp4rt.layout import ceil_div, get_layout
from fp4rt.tensor_checks import check_bytes, check_matrix_shape, check_one_float, check_padded_n, check_parts

if TYPE_CHECKING:
    from fp4rt.tensor import QuantizedTensor

__all__ = [
    "CHUNK_COLUMNS",
    "CODE_BITS",
    "E4M3_OF_E5M3",
    "PREPACKED_VERSION",
    "RECORD_BYTES",
    "SIGN_BITS",
    "TILE_BYTES",
    "TILE_CODE_BYTES",
    "TILE_COLUMNS",
    "TILE_ROWS",
    "PrepackedWeight",
    "check_packable",
    "check_version",
    "pack",
    "tiles_shape",
    "unpack",
]

PREPACKED_VERSION = 2  # of everything in this docstring
TILE_ROWS = 16
TILE_COLUMNS = 256
CHUNK_COLUMNS = 64
TILE_CODE_BYTES = TILE_ROWS * TILE_COLUMNS // CODES_PER_BYTE
TILE_BYTES = TILE_CODE_BYTES + TILE_ROWS * TILE_COLUMNS // BLOCK
RECORD_BYTES = 16
MOST_ROWS, MOST_COLUMNS = 1 << 32, BLOCK << 24  # that a record can name

CODE_BITS = (6, 3, 0, 9)  # the lowest bit of a code's eem in its half-word, by fragment register q
SIGN_BITS = (15, 12, 14, 13)  # and its sign

SIGN_BIT = 0x80  # of a scale byte
SIGN_BITS_OF_CODES = 0x88  # of the two codes in a byte
E5M3_BIAS = 22
E5M3_NAN = 0xFC

_BLOCK_BYTES = BLOCK // CODES_PER_BYTE
_SLAB_BYTES = 1 << 22  # of codes: packing a large weight needs some 30 MB beside it
_RECORD = np.dtype([("row", "<u4"), ("column_and_scale", "<u4"), ("codes", "u1", (_BLOCK_BYTES,))])


class PrepackedWeight:
    """A weight (n, k) repacked for :func:`fp4rt.matmul`, frozen; made by :func:`fp4rt.prepack`.

    Attributes:
        data: uint8 (ceil(k / 256), ceil(n / 16), 2304), the tiles.
        restored: uint8 (count, 16), records of the blocks that unpacking takes from here; nearly always empty.
        global_scale: fp32 (1,), the encode scale of the tensor it was made from.
        shape: (n, k).
        layout, padded_n: of the tensor it was made from, which :meth:`unpack` gives back.
        version: of the layout; :data:`PREPACKED_VERSION`.
    """

    __slots__ = (
        "__weakref__",
        "_unchecked",
        "_views",
        "data",
        "global_scale",
        "layout",
        "padded_n",
        "restored",
        "shape",
        "version",
    )

    data: Any
    restored: Any
    global_scale: Any
    shape: tuple[int, int]
    layout: str
    padded_n: int
    version: int
    _unchecked: bool  # as in QuantizedTensor
    _views: PrepackedViews | None  # what views() gave last

    def __init__(
        self,
        data: Any,
        restored: Any,
        global_scale: Any,
        shape: tuple[int, int],
        layout: str,
        padded_n: int,
        version: int = PREPACKED_VERSION,
    ) -> None:
        """Wrap arrays that exist already; a weight of another version is kept, and refused where it is used.

        Raises:
            ShapeError: sizes do not agree, or an array is not C-contiguous.
            DtypeError: an array has another dtype.
            LayoutError: the layout is unknown.
            DeviceError: the arrays live on different devices.
        """
        if version == PREPACKED_VERSION:
            shape, padded_n = _checked(data, restored, global_scale, shape, padded_n)
            layout = get_layout(layout).name
        self._keep(data, restored, global_scale, shape, layout, padded_n, version)

    @classmethod
    def trusted(cls, *parts: Any) -> PrepackedWeight:
        """The same without any check, from the same arguments: for a backend that made the arrays itself."""
        self = object.__new__(cls)
        self._keep(*parts)
        return self

    @classmethod
    def unchecked(cls, *parts: Any) -> PrepackedWeight:
        """:meth:`trusted`, but looked at where it is used: for JAX, which puts anything into a pytree."""
        self = cls.trusted(*parts)
        _set(self, "_unchecked", True)
        return self

    def _keep(self, *parts: Any) -> None:
        for name, part in zip(_PARTS, (*parts, PREPACKED_VERSION), strict=False):  # the last where no version is given
            _set(self, name, part)
        _set(self, "_views", None)
        _set(self, "_unchecked", False)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"PrepackedWeight is frozen; prepack again instead of setting {name!r}")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"PrepackedWeight is frozen; {name!r} cannot be deleted")

    def __reduce__(self) -> tuple[Any, ...]:
        make = PrepackedWeight.unchecked if self._unchecked else PrepackedWeight
        return make, tuple(getattr(self, name) for name in _PARTS)

    def __repr__(self) -> str:
        return f"PrepackedWeight(shape={self.shape}, version={self.version}, {interop.library_name(self.data)})"

    @property
    def nbytes(self) -> int:
        """Bytes of tiles, records and global scale.

        Raises:
            ShapeError, DtypeError: the arrays are not those of such a weight, but of several, say.
        """
        if self._unchecked and self.version == PREPACKED_VERSION:
            self.check_parts()
        k_groups, row_tiles, tile = tiles_shape(*self.shape)
        return k_groups * row_tiles * tile + int(self.restored.shape[0]) * RECORD_BYTES + 4

    def views(self, stream: Any = None) -> PrepackedViews:
        """The arrays as products take them; the same object again as long as nothing about them has changed.

        Raises:
            LayoutError: the weight is of another version.
            ShapeError, DtypeError: the arrays are not those of such a weight, but of several, say.
        """
        known = self._views
        if known is not None and interop.unchanged(known[:2], stream):
            return known
        check_version(self)
        views = PrepackedViews(
            interop.view(self.data, "b", stream),
            interop.view(self.global_scale, "b.global_scale", stream),
            self.shape,
            get_layout(self.layout),
            self.padded_n,
        )
        if self._unchecked:
            self.check_parts((views.data, self.restored, views.global_scale))
        _set(self, "_views", views if interop.lasting(views[:2]) else None)
        return views

    def check_parts(self, parts: tuple[Any, Any, Any] | None = None) -> None:
        """Refuse arrays that are not those of one weight of this shape, of the version that this library reads.

        Args:
            parts: the weight's own arrays where None, of which tracers may take the place; or views of them.

        Raises:
            ShapeError, DtypeError: as said.
        """
        parts = parts or (self.data, self.restored, self.global_scale)
        records = (*getattr(parts[1], "shape", ())[:1], RECORD_BYTES)  # as many as there are
        wanted = (tiles_shape(*self.shape), "uint8"), (records, "uint8"), ((1,), "float32")
        check_parts(self, zip(_PARTS[:3], parts, wanted, strict=True))

    @property
    def remembered_library(self) -> str | None:
        """The library of the arrays that products read, where :meth:`views` has them still; else None."""
        views = self._views
        return None if views is None else views.data.library

    def unpack(self, *, stream: Any = None) -> QuantizedTensor:
        """The tensor it was made from, byte for byte; padding comes back as zeros."""
        from fp4rt import api  # methods are spellings of the public functions

        return api.unpack(self, stream=stream)


_set = object.__setattr__
_PARTS = ("data", "restored", "global_scale", "shape", "layout", "padded_n", "version")


def _checked(data: Any, restored: Any, global_scale: Any, shape: Any, padded_n: Any) -> tuple[tuple[int, int], int]:
    """``shape`` and ``padded_n`` as integers, where the arrays are those of such a weight."""
    owner = "PrepackedWeight"
    n, k = check_matrix_shape(shape, f"{owner} needs shape")
    padded_n = check_padded_n(owner, (n, k), padded_n, "shape")
    tiles, records = interop.view(data, "data"), interop.view(restored, "restored")
    scale = interop.view(global_scale, "global_scale")
    interop.same_device(tiles, records, scale)
    check_bytes(owner, "data", tiles, ("uint8",), tiles_shape(n, k))
    check_bytes(owner, "restored", records, ("uint8",), (*records.shape[:1], RECORD_BYTES))
    check_one_float(owner, "global_scale", scale)
    return (n, k), padded_n


def check_version(weight: PrepackedWeight) -> None:
    """Refuse a weight whose layout this version does not read.

    Raises:
        LayoutError: names both versions.
    """
    if weight.version != PREPACKED_VERSION:
        raise LayoutError(
            f"prepacked weight of shape {weight.shape} has layout version {weight.version}, this fp4rt reads version "
            f"{PREPACKED_VERSION}; unpack it with the fp4rt that made it, or prepack the quantized weight again"
        )


def tiles_shape(n: int, k: int) -> tuple[int, int, int]:
    """Shape in bytes of the tiles of a weight (n, k)."""
    return ceil_div(k, TILE_COLUMNS), ceil_div(n, TILE_ROWS), TILE_BYTES


def check_packable(n: int, k: int) -> None:
    """Raises ShapeError where a record could not say which block it is of."""
    if n > MOST_ROWS or k > MOST_COLUMNS:
        raise ShapeError(
            f"prepack takes a weight of at most {MOST_ROWS} rows and {MOST_COLUMNS} columns, got {(n, k)}; cut it "
            "into parts"
        )


def pack(data: np.ndarray, scales: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Pack a weight on the host.

    Args:
        data: uint8 (n, at least ceil(k / 2)), codes as in ``fp4rt.layout``.
        scales: uint8 (n, at least ceil(k / 16)), row-major.
        k: columns; codes and scales beyond them are not read.

    Returns:
        (tiles, records): uint8 ``tiles_shape(n, k)`` and (count, 16).
    """
    n = data.shape[0]
    tiles = np.empty(tiles_shape(n, k), np.uint8)
    words = tiles.view("<u4")
    records = [np.empty(0, _RECORD)]
    rows_a_slab = _rows_a_slab(k)
    for row in range(0, n, rows_a_slab):
        codes, scale_bytes = _padded_rows(data[row : row + rows_a_slab], scales[row : row + rows_a_slab], k)
        records.append(_make_exact(codes, scale_bytes, row))
        tile = slice(row // TILE_ROWS, row // TILE_ROWS + len(codes) // TILE_ROWS)
        words[:, tile, : TILE_CODE_BYTES // 4] = _pack_codes(codes)
        words[:, tile, TILE_CODE_BYTES // 4 :] = _pack_scales(_E5M3_OF_E4M3[scale_bytes])
    return tiles, np.concatenate(records).view(np.uint8).reshape(-1, RECORD_BYTES)


def unpack(tiles: np.ndarray, restored: np.ndarray, n: int, k: int, padded_n: int) -> tuple[np.ndarray, np.ndarray]:
    """Undo :func:`pack`: data uint8 (n, padded_n / 2) and row-major scales (n, padded_n / 16); padding is 0.

    Raises:
        LayoutError: a record is of a block that the weight does not have.
    """
    data = np.zeros((n, padded_n // CODES_PER_BYTE), np.uint8)
    scales = np.zeros((n, padded_n // BLOCK), np.uint8)
    words = np.ascontiguousarray(tiles).view("<u4")
    code_bytes, blocks = ceil_div(k, CODES_PER_BYTE), ceil_div(k, BLOCK)
    rows_a_slab = _rows_a_slab(k)
    for row in range(0, n, rows_a_slab):
        rows = min(rows_a_slab, n - row)
        slab = words[:, row // TILE_ROWS : ceil_div(row + rows, TILE_ROWS)]
        data[row : row + rows, :code_bytes] = _unpack_codes(slab[..., : TILE_CODE_BYTES // 4])[:rows, :code_bytes]
        e5m3 = _unpack_scales(slab[..., TILE_CODE_BYTES // 4 :])[:rows, :blocks]
        scales[row : row + rows, :blocks] = E4M3_OF_E5M3[e5m3]
    records = np.ascontiguousarray(restored).view(_RECORD).reshape(-1)
    rows_kept, columns = records["row"], records["column_and_scale"] >> 8
    if np.any(rows_kept >= n) or np.any(columns >= blocks):
        raise LayoutError(
            f"prepacked weight of shape {(n, k)} has records of blocks that it does not have; prepack the quantized "
            "weight again"
        )
    scales[rows_kept, columns] = records["column_and_scale"] & 0xFF
    data.reshape(n, padded_n // BLOCK, _BLOCK_BYTES)[rows_kept, columns] = records["codes"]
    return data, scales


def _rows_a_slab(k: int) -> int:
    row_bytes = ceil_div(k, TILE_COLUMNS) * TILE_COLUMNS // CODES_PER_BYTE
    return max(1, _SLAB_BYTES // (row_bytes * TILE_ROWS)) * TILE_ROWS


def _padded_rows(data: np.ndarray, scales: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Copies of some rows, padded with zeros to whole tiles: codes (rows, blocks, 8) and scales (rows, blocks)."""
    rows = ceil_div(len(data), TILE_ROWS) * TILE_ROWS
    columns = ceil_div(k, TILE_COLUMNS) * TILE_COLUMNS
    codes = np.zeros((rows, columns // CODES_PER_BYTE), np.uint8)
    padded = np.zeros((rows, columns // BLOCK), np.uint8)
    whole_bytes, blocks = k // CODES_PER_BYTE, ceil_div(k, BLOCK)
    codes[: len(data), :whole_bytes] = data[:, :whole_bytes]
    if k % CODES_PER_BYTE:
        codes[: len(data), whole_bytes] = data[:, whole_bytes] & 0x0F
    padded[: len(data), :blocks] = scales[:, :blocks]
    return codes.reshape(rows, -1, _BLOCK_BYTES), padded


def _make_exact(codes: np.ndarray, scales: np.ndarray, first_row: int) -> np.ndarray:
    """Make every block representable, in place; records of the blocks that changed."""
    magnitude = scales & 0x7F
    zero, negative = magnitude == 0, scales >= SIGN_BIT
    changed = negative | (zero & codes.any(axis=2))
    rows, columns = np.nonzero(changed)
    records = np.empty(len(rows), _RECORD)
    records["row"] = rows + first_row
    records["column_and_scale"] = columns.astype(np.uint32) << 8 | scales[rows, columns]
    records["codes"] = codes[rows, columns]
    codes[negative] ^= SIGN_BITS_OF_CODES
    codes[zero] = 0
    scales[...] = magnitude
    return records


def _e5m3_table() -> np.ndarray:
    """e5m3 byte of every non-negative e4m3 byte."""
    table = np.zeros(E4M3.magnitude_count, np.uint8)
    fraction, exponent = np.frexp(E4M3.values[: E4M3.magnitude_count].astype(np.float64))
    for byte in range(1, E4M3_NAN_BYTE):  # value = fraction * 2^exponent, fraction in [1/2, 1) with 4 bits
        table[byte] = (int(exponent[byte]) - 1 + E5M3_BIAS) << 3 | (int(fraction[byte] * 16) & 7)
    table[E4M3_NAN_BYTE] = E5M3_NAN
    return table


def _code_table(q: int) -> np.ndarray:
    """Bits of a word for every byte (two codes, h = 0 in the low nibble) at fragment register ``q``."""
    byte = np.arange(256, dtype=np.uint32)
    word = np.zeros(256, np.uint32)
    for h in range(2):
        code = byte >> np.uint32(4 * h) & np.uint32(15)
        word |= (code & np.uint32(7)) << np.uint32(CODE_BITS[q] + 16 * h)
        word |= (code >> np.uint32(3)) << np.uint32(SIGN_BITS[q] + 16 * h)
    return word


def _rotate(word: np.ndarray, bits: int) -> np.ndarray:
    """Rotate 32-bit words left by 1 ... 31 bits."""
    return word << np.uint32(bits) | word >> np.uint32(32 - bits)


_E5M3_OF_E4M3 = _e5m3_table()
E4M3_OF_E5M3 = np.zeros(256, np.uint8)
E4M3_OF_E5M3[_E5M3_OF_E4M3] = np.arange(len(_E5M3_OF_E4M3))
_CODE_TABLES = tuple(_code_table(q) for q in range(4))


def _pack_codes(codes: np.ndarray) -> np.ndarray:
    """(rows, blocks, 8) to words (k groups, row tiles, 512)."""
    tiles = len(codes) // TILE_ROWS
    # axes: tile, rr, g, k group, chunk, j, kk, t
    pairs = codes.reshape(tiles, 2, 8, -1, 4, 4, 2, 4)
    word = _CODE_TABLES[0][pairs[:, 0, ..., 0, :]]
    for q in range(1, 4):
        word |= _CODE_TABLES[q][pairs[:, q & 1, ..., q >> 1, :]]
    # tile, g, k group, chunk, j, t -> k group, tile, chunk, g, t, j
    return word.transpose(2, 0, 3, 1, 5, 4).reshape(-1, tiles, TILE_CODE_BYTES // 4)


def _unpack_codes(words: np.ndarray) -> np.ndarray:
    """Words (k groups, row tiles, 512) to code bytes (rows, columns / 2)."""
    k_groups, tiles, _ = words.shape
    word = words.reshape(k_groups, tiles, 4, 8, 4, 4)  # k group, tile, chunk, g, t, j
    pairs = np.empty((tiles, 2, 8, k_groups, 4, 4, 2, 4), np.uint8)
    for q in range(4):
        eem, sign = CODE_BITS[q], SIGN_BITS[q]
        byte = word >> eem & 0x07 | word >> sign - 3 & 0x08 | word >> eem + 12 & 0x70 | word >> sign + 9 & 0x80
        pairs[:, q & 1, ..., q >> 1, :] = byte.astype(np.uint8).transpose(1, 3, 0, 2, 5, 4)
    return pairs.reshape(tiles * TILE_ROWS, -1)


def _pack_scales(e5m3: np.ndarray) -> np.ndarray:
    """(rows, blocks) to words (k groups, row tiles, 64)."""
    tiles = len(e5m3) // TILE_ROWS
    b = e5m3.reshape(tiles, 2, 8, -1, 2, 2, 4).astype(np.uint32)  # tile, rr, g, k group, pr, cc, j
    word = b[..., 0] << 4 | b[..., 2] << 20 | _rotate(b[..., 1] << 4 | b[..., 3] << 20, 24)
    return word.transpose(3, 0, 4, 2, 5, 1).reshape(-1, tiles, TILE_BYTES // 4 - TILE_CODE_BYTES // 4)


def _unpack_scales(words: np.ndarray) -> np.ndarray:
    """Words (k groups, row tiles, 64) to e5m3 bytes (rows, blocks)."""
    k_groups, tiles, _ = words.shape
    word = words.reshape(k_groups, tiles, 2, 8, 2, 2).transpose(1, 5, 3, 0, 2, 4)  # tile, rr, g, k group, pr, cc
    turned = _rotate(word, 8)
    b = np.stack([word >> 4, turned >> 4, word >> 20, turned >> 20], axis=-1) & 0xFF
    return b.astype(np.uint8).reshape(tiles * TILE_ROWS, -1)
