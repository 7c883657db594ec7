"""The NVFP4 file formats: how each names its tensors and what it stores in them. The conventions stand only here.

===================  ====================  ====================  =====================
                     modelopt              compressed-tensors    comfy
===================  ====================  ====================  =====================
codes                ``weight`` U8         ``weight_packed`` U8  ``weight`` U8
even column          low nibble            low nibble            **high** nibble
block scales         ``weight_scale``      ``weight_scale``      ``weight_scale``
scale layout         linear                linear                **128x4**
global scale         ``weight_scale_2``    ``weight_global_..``  ``weight_scale_2``
its convention       decode, amax / 2688   **encode**            decode
its shape            ()                    (1,)                  ()
activation scale     ``input_scale``       ``input_global_..``   ``input_scale``
rows stored          n                     n                     **n up to 16**
===================  ====================  ====================  =====================

Block scales are F8_E4M3, global scales F32. Decode scales become encode scales, and the reverse, as fp32 reciprocals;
one in six has no fp32 reciprocal that leads back, and a trip there and back ends at the nearest that has one.

A matrix that is a parameter of its own rather than a module's ``weight`` (stacked experts: ``experts.gate_up_proj``)
joins with an underscore: ``experts.gate_up_proj_weight_scale``.

fp4rt's own ``modelopt`` files may store the scales in another layout (``--layout``). The tensor is then called
``weight_scale_128x4`` or ``weight_scale_8x4``, so that a reader that does not know of it fails instead of decoding
noise.

Sources: nvidia-modelopt 0.47 (``torch/export/quant_utils.py``, ``unified_export_hf.py``,
``torch/quantization/qtensor/nvfp4_tensor.py``); compressed-tensors 0.20 (``compressors/nvfp4``);
comfy-kitchen 0.2.40 (``tensor/nvfp4.py``, ``float_utils.py``) and ComfyUI's ``QUANTIZATION.md``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fp4rt.format import FP32_MAX

__all__ = [
    "COMFY",
    "COMPRESSED_TENSORS",
    "FORMATS",
    "MODELOPT",
    "SCALES",
    "Format",
    "LayerName",
    "decode_scale",
    "encode_scale",
    "storable_scale",
    "swap_nibbles",
]

SCALES = "weight_scale"
WEIGHT = "weight"
COMFY_ROWS = 16
SMALLEST_DECODE = np.nextafter(np.float32(1) / FP32_MAX, np.float32(1))  # whose reciprocal is finite
NIBBLE = 4  # bits
WORD_BYTES = 8
SCRATCH_WORDS = 1 << 14  # 128 kB: stays in the cache
LOW_NIBBLES = np.uint64(0x0F0F0F0F0F0F0F0F)


@dataclass(frozen=True)
class Format:
    """One file format. Suffixes follow a module's name; see the table of this module."""

    name: str
    data: str
    global_scale: str
    input_scale: str
    stores_decode: bool
    high_nibble_first: bool
    layout: str
    scalar_shape: tuple[int, ...]
    row_multiple: int = 1


MODELOPT = Format("modelopt", WEIGHT, "weight_scale_2", "input_scale", True, False, "linear", ())
COMPRESSED_TENSORS = Format(
    "compressed-tensors", "weight_packed", "weight_global_scale", "input_global_scale", False, False, "linear", (1,)
)
COMFY = Format("comfy", WEIGHT, "weight_scale_2", "input_scale", True, True, "128x4", (), COMFY_ROWS)
FORMATS = {form.name: form for form in (MODELOPT, COMPRESSED_TENSORS, COMFY)}


@dataclass(frozen=True, order=True)
class LayerName:
    """A quantized matrix: a module with a ``weight``, or (``bare``) a parameter of its own."""

    base: str
    bare: bool = False

    @classmethod
    def of_weight(cls, tensor: str) -> LayerName:
        """The layer of a weight's tensor name, ``X.weight`` or ``X``."""
        suffix = f".{WEIGHT}"
        return cls(tensor[: -len(suffix)]) if tensor.endswith(suffix) else cls(tensor, bare=True)

    @classmethod
    def of_part(cls, tensor: str, suffix: str) -> LayerName | None:
        """The layer whose tensor called ``suffix`` has this name; None where it is no such name."""
        for joint, bare in ((".", False), ("_", True)):
            if tensor.endswith(joint + suffix):
                return cls(tensor[: -len(joint + suffix)], bare)
        return None

    @classmethod
    def of_data(cls, tensor: str, form: Format) -> LayerName | None:
        """The layer whose packed codes have this name; None where it is no such name."""
        return cls.of_weight(tensor) if form.data == WEIGHT else cls.of_part(tensor, form.data)

    @property
    def weight(self) -> str:
        """Name of the weight in an unquantized checkpoint."""
        return self.base if self.bare else f"{self.base}.{WEIGHT}"

    def data(self, form: Format) -> str:
        """Name of the packed codes."""
        return self.base if self.bare and form.data == WEIGHT else self.join(form.data)

    def scales(self, form: Format, layout: str) -> str:
        """Name of the block scales."""
        return self.join(SCALES if layout == form.layout else f"{SCALES}_{layout}")

    def global_scale(self, form: Format) -> str:
        """Name of the global scale."""
        return self.join(form.global_scale)

    def input_scale(self, form: Format) -> str:
        """Name of the activation's global scale."""
        return self.join(form.input_scale)

    def join(self, suffix: str) -> str:
        """Name of the layer's tensor called ``suffix``."""
        return f"{self.base}{'_' if self.bare else '.'}{suffix}"


def decode_scale(encode: np.ndarray | np.float32) -> np.ndarray:
    """fp32(1 / encode): what ModelOpt and ComfyUI store; infinite where it has no fp32.

    Next to 1 / FP32_MAX, among the subnormals, it may be rounded down to where its own reciprocal is infinite; the next
    one is taken then.
    """
    with np.errstate(over="ignore", divide="ignore"):
        return np.maximum(np.float32(1) / np.asarray(encode, np.float32), SMALLEST_DECODE)


def encode_scale(decode: np.ndarray | np.float32) -> np.ndarray:
    """fp32(1 / decode): what compressed-tensors stores and fp4rt computes with; infinite where it has no fp32."""
    with np.errstate(over="ignore", divide="ignore"):
        return np.float32(1) / np.asarray(decode, np.float32)


def storable_scale(encode: float) -> np.float32:
    """The encode scale next to ``encode`` that survives any number of trips through either convention.

    1 / (1 / x) in fp32 may differ from x by one unit in the last place; taken once more it does not change. So a
    tensor that is quantized with this scale has the same bytes in every format.
    """
    return np.float32(encode_scale(decode_scale(np.float32(encode))))


def swap_nibbles(data: np.ndarray) -> np.ndarray:
    """Codes with the two halves of every byte exchanged: between low-nibble-first and high-nibble-first."""
    if data.shape[-1] % WORD_BYTES:
        return (data << NIBBLE) | (data >> NIBBLE)
    words = np.ascontiguousarray(data).reshape(-1).view(np.uint64)  # a row is whole blocks of 8 bytes
    swapped = np.empty_like(words)
    scratch = np.empty(min(words.size, SCRATCH_WORDS), np.uint64)
    for start in range(0, words.size, SCRATCH_WORDS):
        source, target = words[start : start + SCRATCH_WORDS], swapped[start : start + SCRATCH_WORDS]
        high = np.right_shift(source, np.uint64(NIBBLE), out=scratch[: source.size])
        high &= LOW_NIBBLES
        np.bitwise_and(source, LOW_NIBBLES, out=target)
        target <<= np.uint64(NIBBLE)
        target |= high
    return swapped.view(np.uint8).reshape(data.shape)
