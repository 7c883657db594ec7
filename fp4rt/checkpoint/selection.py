"""Which tensors ``quantize`` turns into NVFP4, and why it leaves the others: a reason for every tensor.

By default every linear weight: a 2-D ``*.weight`` of float16, bfloat16 or float32, and stacked experts, which are 3-D
tensors below a module called ``experts``. Not: embeddings, norms, the output head, also that of a classifier, and the
routers of experts, which ModelOpt and llm-compressor leave as they are too. A weight whose columns are no multiple of
16 is left unless padding was asked for. A weight that is stored as (k, n) is always left: no format of layers has it
so; see ``orientation``.

Patterns are those of ``fnmatch``, against the tensor's name or its module's name. With ``include``, exactly the
tensors that match are taken, whatever their names; ``default`` among the patterns stands for the rules above.
``exclude`` then takes tensors out.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from fp4rt.checkpoint.dtypes import FLOAT_TAGS
from fp4rt.checkpoint.formats import LayerName
from fp4rt.checkpoint.header import TensorEntry
from fp4rt.errors import DtypeError, counted
from fp4rt.format import BLOCK

__all__ = ["DEFAULT_PATTERN", "RULES", "Selection", "is_listed", "matches"]

DEFAULT_PATTERN = "default"
REGEX = "re:"

# Last part of a module's name, or any part for embeddings and routers.
EMBEDDING = re.compile(r"(^|\.)(\w*embed\w*|wte|wpe|shared|relative_attention_bias)(\.|$)", re.IGNORECASE)
NORM = re.compile(r"(^|\.)(\w*norm\w*|ln_\w+|ln\d*)$", re.IGNORECASE)
HEAD = re.compile(
    r"(^|\.)(lm_head|codec_head|embed_out|output_layer|shared_head\.head|head"
    r"|score|classifier(\.(dense|out_proj))?|qa_outputs|predictions\.decoder|(v|value|reward)_head(\.summary)?)$"
    r"|^((language_model|llm)\.)?(model\.)?output$",
    re.IGNORECASE,
)
ROUTER = re.compile(r"(^|\.)(\w*router\w*(\.\w+)*|gate(\.wg)?|\w*expert_gate)$", re.IGNORECASE)
LEFT_BY_DEFAULT = ((NORM, "a norm"), (EMBEDDING, "an embedding"), (HEAD, "the output head"), (ROUTER, "a router"))
EXPERTS = re.compile(r"(^|\.)experts\.")

RULES = """\
By default every linear weight is quantized: 2-D *.weight tensors of F16, BF16 or F32, and 3-D stacks below a module
called `experts`. Left as they are: embeddings, norms, the output head (lm_head, score, classifier), the routers of
experts, weights stored as (k, n) (Hugging Face's Conv1D, as in GPT-2), and weights whose columns are no multiple of 16
(--pad pads them). Which axis of a stack is k is told by config.json (model_type, sizes of the experts); where that does
not tell, the last is taken and a note says so. --include PATTERN takes exactly what matches (`default` stands for these
rules), --exclude PATTERN takes out; patterns are shell globs on tensor or module names."""


@dataclass(frozen=True)
class Selection:
    """Patterns that choose tensors; see the module.

    Raises:
        DtypeError: the patterns are no tuple or list of strings, or ``pad`` is no bool.
    """

    include: tuple[str, ...] | list[str] = ()
    exclude: tuple[str, ...] | list[str] = ()
    pad: bool = False

    def __post_init__(self) -> None:
        for name in ("include", "exclude"):
            patterns = getattr(self, name)
            if not isinstance(patterns, (list, tuple)) or not all(isinstance(pattern, str) for pattern in patterns):
                raise DtypeError(
                    f'Selection needs {name} as a tuple or list of patterns, as ("*.mlp.*",), got {patterns!r}'
                )
        if not isinstance(self.pad, bool):
            raise DtypeError(f"Selection needs pad as a bool, got {self.pad!r}")

    def reason_to_leave(self, entry: TensorEntry, transposed: bool = False) -> str | None:
        """Why a tensor stays as it is; None where it is to be quantized.

        Args:
            entry: the tensor.
            transposed: whether it lies as (k, n), or a stack of experts as (e, k, n).
        """
        if entry.dtype not in FLOAT_TAGS:
            return f"{entry.dtype} is no dtype that NVFP4 is made from"
        reason = self._named(entry)
        if reason is not None:
            return reason
        if len(entry.shape) not in (2, 3):
            return f"{len(entry.shape)}-dimensional; wanted a matrix, or a stack of matrices"
        if 0 in entry.shape:
            return "empty"
        if transposed and len(entry.shape) == 2:
            return "stored as (k, n), as Hugging Face's Conv1D does; NVFP4 weights are (n, k)"
        columns = entry.shape[-2 if transposed else -1]
        if columns % BLOCK and not self.pad:
            found = counted(columns, "column is", "columns are")
            return f"{found} no multiple of {BLOCK}; --pad stores zeros behind them"
        return None

    def _named(self, entry: TensorEntry) -> str | None:
        """The verdict of patterns and names."""
        if any(matches(pattern, entry.name) for pattern in self.exclude):
            return "excluded by a pattern"
        if not self.include:
            return default_reason(entry)
        reason: str | None = "matches no --include pattern"
        for pattern in self.include:
            if pattern == DEFAULT_PATTERN:
                reason = default_reason(entry)
            elif matches(pattern, entry.name):
                reason = None
            if reason is None:
                return None
        return reason


def default_reason(entry: TensorEntry) -> str | None:
    """Why the default rules leave a tensor; None where they take it. Judges by name and number of dimensions."""
    module = LayerName.of_weight(entry.name).base
    if len(entry.shape) == 3 and EXPERTS.search(entry.name) and not entry.name.endswith("bias"):
        return None
    if not entry.name.endswith(".weight") and entry.name != "weight":
        return "not a weight"
    if len(entry.shape) != 2:
        return f"{len(entry.shape)}-dimensional"
    return next((what for pattern, what in LEFT_BY_DEFAULT if pattern.search(module)), None)


def matches(pattern: str, tensor: str) -> bool:
    """Whether a glob fits a tensor's name or the name of its module."""
    return fnmatchcase(tensor, pattern) or fnmatchcase(LayerName.of_weight(tensor).base, pattern)


def is_listed(entry: str, tensor: str) -> bool:
    """Whether an entry of a list of modules to leave alone means that of a tensor.

    It is a name, a glob, or a regular expression behind ``re:``, which compressed-tensors matches from the beginning.
    """
    if not entry.startswith(REGEX):
        return matches(entry, tensor)
    try:
        return re.match(entry.removeprefix(REGEX), LayerName.of_weight(tensor).base) is not None
    except re.error:
        return False


def unused(patterns: Sequence[str], tensors: Sequence[str]) -> list[str]:
    """Patterns that fit no tensor: most likely a typing mistake."""
    return [
        pattern
        for pattern in patterns
        if pattern != DEFAULT_PATTERN and not any(matches(pattern, tensor) for tensor in tensors)
    ]
