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

The last rule that matches decides. What it does not say is as elsewhere: a rule with ``quantize = true`` alone takes a
layer back in with the usual method, and a method percentile without its number takes the command line's.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp4rt.checkpoint.header import printable
from fp4rt.checkpoint.methods import Method
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
class Wanted:
    """What is said about a method; None where nothing is."""

    name: str | None = None
    percentile: float | None = None

    def over(self, usual: Method) -> Method:
        """The method, ``usual`` in what is not said."""
        name = self.name or ("percentile" if self.percentile is not None else usual.name)
        return Method(name, usual.percentile if self.percentile is None else self.percentile)

    @property
    def takes_percentile(self) -> bool:
        """Whether the percentile is somebody else's to say."""
        return self.name == "percentile" and self.percentile is None


@dataclass(frozen=True)
class Rule:
    """One rule: a glob, and what holds for the tensors that it matches; ``wanted`` None leaves them alone."""

    match: str
    wanted: Wanted | None


@dataclass(frozen=True)
class Overrides:
    """The content of a file; callable as ``QuantizeOptions.override``."""

    path: Path
    default: Wanted
    rules: tuple[Rule, ...]

    def __call__(self, tensor: str, method: Method) -> Method | None:
        """The method for a tensor, None to leave it."""
        usual = self.default.over(method)
        rule = next((rule for rule in reversed(self.rules) if matches(rule.match, tensor)), None)
        if rule is None:
            return usual
        return None if rule.wanted is None else rule.wanted.over(usual)

    @property
    def takes_percentile(self) -> bool:
        """Whether the command line's percentile is used somewhere, whatever its method."""
        said = (self.default, *(rule.wanted for rule in self.rules))
        return any(wanted is not None and wanted.takes_percentile for wanted in said)

    def check_used(self, left: dict[str, str | None]) -> None:
        """Refuse a rule that changes nothing: most likely a typing mistake.

        Args:
            left: every tensor, and why it is left alone whatever the rules say; None where it is not.

        Raises:
            CheckpointError: there is one.
        """
        for rule in self.rules:
            reasons = {reason for tensor, reason in left.items() if matches(rule.match, tensor)}
            if not reasons:
                raise CheckpointError(f"{self.path}: the rule {printable(rule.match)} matches no tensor")
            if rule.wanted is not None and None not in reasons:
                why = "; ".join(sorted(filter(None, reasons)))
                raise CheckpointError(
                    f"{self.path}: the rule {printable(rule.match)} matches only tensors that are left ({why}); "
                    "include them too, or drop the rule"
                )


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
    return Overrides(path, _wanted(path, table), tuple(_rule(path, rule) for rule in rules))


def _rule(path: Path, rule: Any) -> Rule:
    if not isinstance(rule, dict) or not isinstance(rule.get("match"), str):
        raise CheckpointError(f"{path}: a [[layer]] needs match, a glob")
    _check_keys(path, rule, RULE_KEYS)
    quantize, layers = rule.get("quantize", True), printable(rule["match"])
    if not isinstance(quantize, bool):
        raise CheckpointError(f"{path}: quantize of {layers} must be true or false")
    if rule.keys() == {"match"}:
        raise CheckpointError(f"{path}: the rule {layers} says nothing; {FORM}")
    if not quantize and rule.keys() & {"method", "percentile"}:
        raise CheckpointError(f"{path}: {layers} has quantize = false and a method; leave one out")
    return Rule(rule["match"], _wanted(path, rule) if quantize else None)


def _wanted(path: Path, table: dict[str, Any]) -> Wanted:
    name, percentile = table.get("method"), table.get("percentile")
    if percentile is not None and (isinstance(percentile, bool) or not isinstance(percentile, (int, float))):
        raise CheckpointError(f"{path}: percentile must be a number, got {printable(percentile)}")
    wanted = Wanted(name, None if percentile is None else float(percentile))
    try:
        method = wanted.over(Method())
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    if percentile is not None and method.name != "percentile":
        raise CheckpointError(f"{path}: percentile means nothing to method = {printable(method.name)}; leave one out")
    return wanted


def _check_keys(path: Path, table: dict[str, Any], known: set[str], form: str = "") -> None:
    for key in table:
        if key not in known:
            raise CheckpointError(f"{path}: unknown key {printable(key)}; known are {', '.join(sorted(known))}{form}")
