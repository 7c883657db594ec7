"""``NVFP4Linear``: a linear layer whose weight is an NVFP4 tensor."""

from __future__ import annotations

import math
import threading
from typing import Any, Literal

import numpy as np
import torch

from fp4rt import api
from fp4rt.arguments import check_is_weight
from fp4rt.errors import DtypeError, ShapeError
from fp4rt.format import BLOCK, CODES_PER_BYTE
from fp4rt.layout import block_columns, round_up
from fp4rt.prepacked import PrepackedWeight
from fp4rt.tensor import QuantizedTensor
from fp4rt.tensor_checks import check_integer
from fp4rt.torch import ops

__all__ = ["MODES", "Mode", "NVFP4Linear", "encode_scale"]

Mode = Literal["w4a16", "w4a4"]
MODES = ("w4a16", "w4a4")
STORED_LAYOUT = "linear"  # of the scales in the state dict, as compressed-tensors has them
HALVES = (torch.float16, torch.bfloat16)
_TILES = ("prepacked_data", "prepacked_restored")
_prepacking = threading.Lock()  # of any layer: rare, and a layer is copied and pickled without one


class NVFP4Linear(torch.nn.Module):
    """``y = x @ weight.T + bias`` with the weight (out_features, in_features) in NVFP4.

    The weight stays as it is. Gradients reach x and, where it wants one, the bias, so that adapters and other layers
    can be trained beside it: that of x is the product with the weight rounded to x's dtype, and rounding x, with mode
    "w4a4", counts as the identity (straight-through). A bias wants none until its ``requires_grad_(True)``.

    Buffers, and so the state dict, have the names and the meaning of compressed-tensors:

    - ``weight_packed`` uint8 (out, padded_in / 2), ``weight_scale`` uint8 (out, padded_in / 16), row-major;
    - ``weight_global_scale`` fp32 (1,): the encode scale 2688 / amax;
    - ``input_global_scale`` fp32 (1,), only with a fixed one: the encode scale of the activations.

    ``.to()`` moves them; a dtype there changes the bias alone. A float8 ``weight_scale`` is loaded by its bytes. On a
    CUDA device the weight is repacked at the first call, or by :meth:`prepack`, and then held in that form only; the
    state dict is made from it, byte for byte. A first call that is being compiled, or captured in a graph, takes the
    weight as it is, and then it stays so until :meth:`prepack`. That, :meth:`unpack`, :meth:`set_weight`, and loading a
    state into a repacked layer give the weight other memory: capture graphs anew after them.

    A layer that was not made by :meth:`from_linear` has a weight of zeros until one is loaded or set.

    Args:
        in_features, out_features: sizes; in_features need not be a multiple of 16.
        bias: whether there is one.
        mode: "w4a16": 16-bit activations. "w4a4": activations are quantized to NVFP4 on the way in.
        input_global_scale: "w4a4" only: whether the activations' encode scale is fixed (loaded, or set by
            ``from_linear``); else it is computed from each batch, on the device.
        device, dtype: of the bias, and where the buffers are.

    Raises:
        ValueError: the mode is unknown, or a fixed input scale is asked for with 16-bit activations.
    """

    weight_packed: torch.Tensor
    weight_scale: torch.Tensor
    weight_global_scale: torch.Tensor
    input_global_scale: torch.Tensor | None
    prepacked_data: torch.Tensor | None
    prepacked_restored: torch.Tensor | None
    _kept: PrepackedWeight | None = None  # what _tiles() gave last
    _in_graph = False  # whether a graph reads the weight as it is

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        mode: Mode = "w4a16",
        input_global_scale: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        in_features = check_integer("NVFP4Linear", "in_features", in_features)
        out_features = check_integer("NVFP4Linear", "out_features", out_features)
        if in_features < 1 or out_features < 0:
            got = f"{in_features} and {out_features}"
            raise ShapeError(f"NVFP4Linear needs in_features of at least 1 and out_features of at least 0, got {got}")
        if mode not in MODES:
            raise ValueError(f"NVFP4Linear needs mode as one of {', '.join(map(repr, MODES))}, got {mode!r}")
        if input_global_scale and mode != "w4a4":
            raise ValueError(f"NVFP4Linear has an input_global_scale only with mode='w4a4', got mode={mode!r}")
        self.in_features, self.out_features, self.mode = in_features, out_features, mode
        self.padded_in = round_up(in_features, BLOCK)
        data = (out_features, self.padded_in // CODES_PER_BYTE)
        scales = (out_features, block_columns(self.padded_in))
        one = torch.ones(1, dtype=torch.float32, device=device)
        self.register_buffer("weight_packed", torch.zeros(data, dtype=torch.uint8, device=device))
        self.register_buffer("weight_scale", torch.zeros(scales, dtype=torch.uint8, device=device))
        self.register_buffer("weight_global_scale", one)
        self.register_buffer("input_global_scale", one.clone() if input_global_scale else None)
        for name in _TILES:
            self.register_buffer(name, None, persistent=False)
        self.bias = (
            torch.nn.Parameter(torch.zeros(out_features, device=device, dtype=dtype), requires_grad=False)
            if bias
            else None
        )

    @classmethod
    def from_linear(
        cls, linear: torch.nn.Linear, mode: Mode = "w4a16", input_global_scale: Any = None, weight: Any = None
    ) -> NVFP4Linear:
        """Quantize an ``nn.Linear``.

        Args:
            linear: float16, bfloat16 or float32 weight, on any device; it stays as it is. On the meta device there is
                nothing to quantize: the layer is there too, for ``load_state_dict(..., assign=True)``.
            mode: "w4a16" or "w4a4".
            input_global_scale: "w4a4" only: the activations' encode scale, 2688 / amax from calibration: a number or
                one element, as :func:`fp4rt.global_scale` gives it.
            weight: a QuantizedTensor (out, in) to take instead of quantizing, e.g. from a checkpoint: see
                :meth:`set_weight`. Quantizing turns blocks with a NaN to NaN and an infinity to the largest value.

        Returns:
            The layer, on the same device, with the bias in its own dtype.

        Raises:
            DtypeError, ShapeError: the weight is none, or none for this layer.
            ValueError: the mode is unknown, or the input's scale is not one or is asked for with 16-bit activations.
            TypeError: ``linear`` is no ``nn.Linear``.
        """
        if not isinstance(linear, torch.nn.Linear):
            raise TypeError(f"NVFP4Linear.from_linear needs an nn.Linear, got {type(linear).__name__}")
        bias = linear.bias
        scale = None if input_global_scale is None else encode_scale(input_global_scale)
        layer = cls(
            linear.in_features,
            linear.out_features,
            bias is not None,
            mode,
            scale is not None,
            linear.weight.device,
            None if bias is None else bias.dtype,
        )
        if weight is None and not linear.weight.is_meta:
            source = linear.weight.detach()
            weight = api.quantize(source, layout=STORED_LAYOUT, padded_n=layer.padded_in)
        if weight is not None:
            layer.set_weight(weight)
        if bias is not None and layer.bias is not None:
            layer.bias.data.copy_(bias.detach())
        if layer.input_global_scale is not None and scale is not None:
            layer.input_global_scale.fill_(scale)
        layer.train(linear.training)
        return layer

    def set_weight(self, weight: QuantizedTensor | PrepackedWeight) -> None:
        """Take a weight (out_features, in_features), quantized or prepacked, padded to ``padded_in`` columns.

        torch's tensors are kept; other libraries' arrays, such as those of a checkpoint, are copied to the layer's
        device, or, where that is meta, on their own.

        Raises:
            DtypeError: it is no such weight. ShapeError: another shape or padding.
        """
        check_is_weight(weight)
        if isinstance(weight, PrepackedWeight):
            weight = weight.unpack()
        if weight.shape != (self.out_features, self.in_features) or weight.padded_n != self.padded_in:
            raise ShapeError(
                f"NVFP4Linear needs a weight of shape {(self.out_features, self.in_features)} with padded_n = "
                f"{self.padded_in}, got {weight.shape} with padded_n = {weight.padded_n}"
            )
        stored = weight if weight.layout == STORED_LAYOUT else weight.relayout(STORED_LAYOUT)
        parts = (stored.data, stored.scales, stored.global_scale)
        device = self.weight_global_scale.device
        self.weight_packed, self.weight_scale, self.weight_global_scale = (_own(part, device) for part in parts)
        self.prepacked_data = self.prepacked_restored = self._kept = None
        self._in_graph = False

    @property
    def prepacked(self) -> bool:
        """Whether the weight is held repacked."""
        return self.prepacked_data is not None

    def weight(self) -> QuantizedTensor:
        """The weight as a quantized tensor, row-major scales."""
        if self.prepacked:
            return self._tiles().unpack()
        shape = (self.out_features, self.in_features)
        return QuantizedTensor.trusted(
            self.weight_packed, self.weight_scale, self.weight_global_scale, shape, STORED_LAYOUT, self.padded_in
        )

    def prepack(self) -> NVFP4Linear:
        """Repack the weight for speed and hold it in that form only. Call it before ``torch.compile`` or a capture."""
        # A first call in inference mode must not keep later ones from being trained through.
        with _prepacking, torch.inference_mode(False):
            if not self.prepacked:
                tiles = api.prepack(self.weight())
                # In the order in which forward, on another thread, may see them.
                self.prepacked_restored = tiles.restored
                self.prepacked_data = tiles.data
                self.weight_packed = self.weight_packed.new_empty(0)
                self.weight_scale = self.weight_scale.new_empty(0)
                self._in_graph = False
        return self

    def unpack(self) -> NVFP4Linear:
        """Undo :meth:`prepack`, byte for byte."""
        if self.prepacked:
            with torch.inference_mode(False):
                self.set_weight(self.weight())
        return self

    def _tiles(self) -> PrepackedWeight:
        """The repacked weight: the same object again, which knows its pointers, as long as the buffers are the same.

        It holds the buffers' memory until the next call, :meth:`set_weight` or a move of the module, also after the
        buffers were exchanged by hand.
        """
        kept, buffers = self._kept, self._buffers
        data, restored = buffers["prepacked_data"], buffers["prepacked_restored"]
        scale = buffers["weight_global_scale"]
        if kept is None or kept.data is not data or kept.restored is not restored or kept.global_scale is not scale:
            shape = (self.out_features, self.in_features)
            kept = ops.prepacked_weight(data, restored, scale, shape, STORED_LAYOUT, self.padded_in)
            self._kept = kept
        return kept

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., out_features) in x's dtype, or in that of ``torch.autocast``, to which x is cast as for ``nn.Linear``.

        Args:
            x: (..., in_features), float16 or bfloat16; float32 too with mode "w4a4", and under ``torch.autocast``.

        Raises:
            ShapeError, DtypeError, DeviceError: x does not fit the weight.
        """
        try:
            flat, columns = x.dim() == 2, x.shape[-1]
        except AttributeError:
            raise DtypeError(f"NVFP4Linear needs x as a torch.Tensor, got {type(x).__name__}") from None
        except IndexError:  # it has no dimension
            flat, columns = False, 0
        if columns != self.in_features:
            raise ShapeError(f"NVFP4Linear needs x with {self.in_features} columns, got x.shape = {tuple(x.shape)}")
        quantize_input = self.mode == "w4a4"
        if not quantize_input and x.dtype not in HALVES:
            self._check_autocast(x)
        rows = x if flat else x.reshape(-1, self.in_features)
        buffers = self._buffers  # ``self.name`` costs more than the product's checks
        plain, plain_scale = buffers["weight_packed"], buffers["weight_scale"]  # there as long as nothing is prepacked
        if buffers["prepacked_data"] is None and x.is_cuda and not torch.compiler.is_compiling():
            if torch.cuda.is_current_stream_capturing():
                self._in_graph = True
            elif not self._in_graph:
                self.prepack()
        bias = self.bias
        if buffers["prepacked_data"] is not None:
            if not torch.compiler.is_compiling():
                self._tiles()  # held here, the operator finds it
            y = ops.linear_prepacked(
                rows,
                buffers["prepacked_data"],
                buffers["prepacked_restored"],
                buffers["weight_global_scale"],
                self.out_features,
                STORED_LAYOUT,
                self.padded_in,
                bias,
                quantize_input,
                buffers["input_global_scale"],
            )
        else:
            y = ops.linear(
                rows,
                plain,
                plain_scale,
                buffers["weight_global_scale"],
                STORED_LAYOUT,
                bias,
                quantize_input,
                buffers["input_global_scale"],
            )
        return y if flat else y.reshape(*x.shape[:-1], self.out_features)

    def _check_autocast(self, x: torch.Tensor) -> None:
        """Refuse an x that the operators will not cast to 16 bits."""
        device = x.device.type
        if x.dtype is torch.float32 and device in ("cpu", "cuda") and torch.is_autocast_enabled(device):
            return
        got = str(x.dtype).removeprefix("torch.")
        raise DtypeError(
            f"NVFP4Linear({self.extra_repr()}) needs x as float16, bfloat16, got {got}; "
            "call .bfloat16() on the model and on its input, run it under torch.autocast, or take mode='w4a4'"
        )

    def extra_repr(self) -> str:
        """Sizes, bias, mode: the inside of the printed module."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"mode={self.mode!r}"
        )

    # ---- what torch calls when it moves, copies, saves and loads

    def _apply(self, fn: Any, recurse: bool = True) -> NVFP4Linear:
        """Move the buffers; fp32 scales keep their dtype: ``.half()`` is for activations."""
        self._kept, self._in_graph = None, False  # it would hold the memory that the buffers leave
        scales = {name: getattr(self, name) for name in ("weight_global_scale", "input_global_scale")}
        super()._apply(fn, recurse)
        for name, before in scales.items():
            if before is not None and getattr(self, name).dtype != before.dtype:
                setattr(self, name, before.to(getattr(self, name).device))
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_kept", "_in_graph")}

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.prepacked:
            weight = self.weight()
            destination[prefix + "weight_packed"], destination[prefix + "weight_scale"] = weight.data, weight.scales

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        self.unpack()
        name = prefix + "weight_scale"
        given = state_dict.get(name)
        if isinstance(given, torch.Tensor) and given.dtype in (torch.float8_e4m3fn, torch.int8):
            state_dict[name] = given.view(torch.uint8)  # bytes; copying would convert the values
        super()._load_from_state_dict(state_dict, prefix, *args)


def encode_scale(value: Any) -> float:
    """A fixed encode scale of activations as a number; waits for a device that has it.

    Raises:
        ValueError: it is not one positive, finite number.
    """
    scale = torch.as_tensor(value, dtype=torch.float32)
    number = scale.item() if scale.numel() == 1 else math.nan
    if not 0 < number < math.inf:
        raise ValueError(f"NVFP4Linear needs input_global_scale as one positive, finite number, got {value!r}")
    return float(number)


def _own(part: Any, device: torch.device) -> torch.Tensor:
    """A tensor as it is, another library's array copied to ``device``; where that holds nothing, on its own."""
    if isinstance(part, torch.Tensor):
        return part
    to = None if device.type == "meta" else device
    if isinstance(part, np.ndarray):
        return torch.tensor(part, device=to)
    return torch.from_dlpack(part).to(to, copy=True)
