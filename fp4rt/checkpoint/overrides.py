"""Per-layer choices from a TOML file: which method, or none.

::

    method = "mse"                      # for every layer that no rule names; the command line's choice where missing

    [[layer]]
    match = "*.down_proj.weight"        # a shell glob on the tensor's or its module's name
    method = "four-over-six"

    [[layer]]
    match = "*.layers.0.*"
    quantize = false

    [[layer]]
    match = "*.q_proj.weight"
    method = "percentile"
    percentile = 99.9

The last rule that matches decides.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp4rt.checkpoint.header import printable
from fp4rt.checkpoint.methods import DEFAULT_PERCENTILE, Method
from fp4rt.checkpoint.selection import matches
from fp4rt.errors import CheckpointError

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover
    import tomli as tomllib

__all__ = ["EXAMPLE", "Overrides", "read_overrides"]

EXAMPLE = """\
[[layer]]
match = "*.mlp.*"
method = "mse"        # or percentile = 99.9, or quantize = false"""
FORM = '[[layer]] with match = "GLOB" and method = "mse", percentile = 99.9 or quantize = false chooses for some layers'
RULE_KEYS = {"match", "method", "percentile", "quantize"}


@dataclass(frozen=True)
class Rule:
    """One rule: a glob and what holds for the tensors that it matches; ``method`` None leaves them alone."""

    match: str
    method: Method | None


@dataclass(frozen=True)
class Overrides:
    """The content of a file; callable as ``QuantizeOptions.override``."""

    path: Path
    default: Method | None
    rules: tuple[Rule, ...]

    def __call__(self, tensor: str, method: Method) -> Method | None:
        """The method for a tensor, None to leave it."""
        rule = next((rule for rule in reversed(self.rules) if matches(rule.match, tensor)), None)
        return (self.default or method) if rule is None else rule.method

    def check_used(self, tensors: list[str]) -> None:
        """Refuse a rule that matches nothing: most likely a typing mistake.

        Raises:
            CheckpointError: there is one.
        """
        for rule in self.rules:
            if not any(matches(rule.match, tensor) for tensor in tensors):
                raise CheckpointError(f"{self.path}: the rule {printable(rule.match)} matches no tensor")


def read_overrides(path: str | os.PathLike[str]) -> Overrides:
    """Read a file.

    Raises:
        CheckpointError: it is not TOML, or has keys or values that mean nothing; the message names them.
        OSError: it cannot be read.
    """
    path = Path(path)
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: not valid TOML: {error}") from None
    _check_keys(path, table, {"layer", "method", "percentile"}, f"; {FORM}")
    rules = table.pop("layer", [])
    if not isinstance(rules, list):
        raise CheckpointError(f"{path}: layer must be a list of tables, [[layer]]")
    default = _method(path, table) if table else None
    return Overrides(path, default, tuple(_rule(path, rule) for rule in rules))


def _rule(path: Path, rule: Any) -> Rule:
    if not isinstance(rule, dict) or not isinstance(rule.get("match"), str):
        raise CheckpointError(f"{path}: a [[layer]] needs match, a glob")
    _check_keys(path, rule, RULE_KEYS)
    if not isinstance(rule.get("quantize", True), bool):
        raise CheckpointError(f"{path}: quantize of {printable(rule['match'])} must be true or false")
    if not rule.get("quantize", True) and ("method" in rule or "percentile" in rule):
        raise CheckpointError(
            f"{path}: {printable(rule['match'])} has quantize = false and a method; leave one of them out"
        )
    return Rule(rule["match"], _method(path, rule) if rule.get("quantize", True) else None)


def _method(path: Path, table: dict[str, Any]) -> Method:
    percentile = table.get("percentile", DEFAULT_PERCENTILE)
    if isinstance(percentile, bool) or not isinstance(percentile, (int, float)):
        raise CheckpointError(f"{path}: percentile must be a number, got {printable(percentile)}")
    try:
        method = Method(table.get("method", "percentile" if "percentile" in table else "amax"), float(percentile))
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    if "percentile" in table and method.name != "percentile":
        raise CheckpointError(f"{path}: percentile means nothing to method = {printable(method.name)}; leave one out")
    return method


def _check_keys(path: Path, table: dict[str, Any], known: set[str], form: str = "") -> None:
    for key in table:
        if key not in known:
            raise CheckpointError(f"{path}: unknown key {printable(key)}; known are {', '.join(sorted(known))}{form}")
