"""A checkpoint opened for reading: raw tensors by name, quantized layers as :class:`QuantizedTensor`."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType

import numpy as np

from fp4rt import api
from fp4rt.checkpoint.catalog import StoredLayer, catalog
from fp4rt.checkpoint.detect import detect, read_configuration
from fp4rt.checkpoint.header import printable
from fp4rt.checkpoint.kinds import check_kinds
from fp4rt.checkpoint.layers import input_scales, matrices
from fp4rt.checkpoint.store import Store
from fp4rt.errors import CheckpointError, counted
from fp4rt.tensor import QuantizedTensor

__all__ = ["Checkpoint"]


class Checkpoint(Mapping[str, np.ndarray]):
    """A file or a sharded folder, memory-mapped. Nothing is read until it is asked for.

    As a mapping it gives every stored tensor by its name in the file, as a read-only NumPy array of the same bits
    (F8_E4M3 and BF16 as ml_dtypes). :meth:`load` gives quantized layers::

        checkpoint = fp4rt.checkpoint.open("model-nvfp4")
        weight = checkpoint.load("model.layers.0.mlp.down_proj")
        y = fp4rt.matmul(x, weight)

    Attributes:
        format: "modelopt", "compressed-tensors", "comfy", or "plain" where nothing is NVFP4.
        layers: the quantized layers by the name of their weight, in the order of the file.
    """

    def __init__(self, path: str | os.PathLike[str], format: str | None = None) -> None:
        """Open ``path``, check headers and index, and find the quantized layers.

        Args:
            path: a safetensors file, an index, or a folder.
            format: the format's name where names and configuration do not tell.

        Raises:
            CheckpointError: a file is broken, a layer is incomplete, or the format cannot be told.
        """
        self._store = Store(path)
        try:
            self._configuration = read_configuration(self._store)
            form = detect(self._store, self._configuration, format)
            self.format: str = "plain" if form is None else form.name
            self.layers: dict[str, StoredLayer] = catalog(self._store, form)
        except BaseException:
            self._store.close()
            raise

    @property
    def path(self) -> Path:
        """What was opened."""
        return self._store.path

    @property
    def metadata(self) -> dict[str, str]:
        """``__metadata__`` of all files together."""
        return {key: value for file in self._store.files.values() for key, value in file.metadata.items()}

    def load(self, name: str, *, expert: int | None = None, layout: str | None = None) -> QuantizedTensor:
        """A quantized layer.

        Args:
            name: of the module ("model.layers.0.mlp.down_proj") or of its weight (with ".weight").
            expert: which one, where the layer is a stack of experts.
            layout: the layout of the scales; None for linear, which most formats store and which is not copied then.

        Returns:
            NumPy arrays, read-only views of the file where it holds the bytes so; global scale as encode scale.

        Raises:
            CheckpointError: there is no such layer, or it needs ``expert`` or :meth:`load_parts`; a scale is unusable.
        """
        layer = self.layer(name)
        if layer.fused_rows:
            parts = self.load_parts(name)
            encode = {float(part.global_scale[0]) for part in parts}
            raise CheckpointError(
                f"{self.path}: {printable(name)} has {len(parts)} global scales ({len(encode)} different), one for "
                "each fused part; load_parts gives the parts"
            )
        if layer.experts is None and expert is not None:
            raise CheckpointError(f"{self.path}: {printable(name)} is one matrix, not a stack of experts")
        if layer.experts is not None and (expert is None or not 0 <= expert < layer.experts):
            raise CheckpointError(
                f"{self.path}: {printable(name)} is a stack of {counted(layer.experts, 'expert')}; pass expert=0 ... "
                f"{layer.experts - 1}, got {expert}"
            )
        q = next(matrices(self._store, layer, first=expert or 0))
        return q if layout is None else api.relayout(q, layout)

    def load_parts(self, name: str) -> tuple[QuantizedTensor, ...]:
        """All matrices of a layer: its experts, the parts of a fused one, or the one it is."""
        return tuple(matrices(self._store, self.layer(name)))

    def input_scale(self, name: str) -> np.ndarray | None:
        """Encode scales of a layer's activations, None where the checkpoint has none."""
        return input_scales(self._store, self.layer(name))

    def layer(self, name: str) -> StoredLayer:
        """Names, shapes and convention of a quantized layer.

        Raises:
            CheckpointError: there is no such layer. DtypeError: the name is no string.
        """
        check_kinds("a checkpoint", ("a layer's name", name, str, "a string"))
        layer = self.layers.get(name) or self.layers.get(f"{name}.weight")
        if layer is None:
            kind = "is not quantized" if name in self._store or f"{name}.weight" in self._store else "is not in it"
            near = difflib.get_close_matches(name, [known.removesuffix(".weight") for known in self.layers], 1)
            hint = f"; there is {printable(near[0])}" if near else "; .layers lists those that are"
            raise CheckpointError(f"{self.path}: no quantized layer named {printable(name)}: it {kind}{hint}")
        return layer

    def __getitem__(self, name: str) -> np.ndarray:
        return self._store[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._store)

    def __len__(self) -> int:
        return len(self._store)

    def __contains__(self, name: object) -> bool:
        return name in self._store

    def __repr__(self) -> str:
        counts = f"{counted(len(self.layers), 'quantized layer')}, {counted(len(self), 'tensor')}"
        return f"Checkpoint({str(self.path)!r}, {self.format}, {counts})"

    def close(self) -> None:
        """Close the files; arrays that were handed out stay valid as long as they live."""
        self._store.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
