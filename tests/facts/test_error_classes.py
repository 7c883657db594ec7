"""Each error is also the built-in that a caller would expect."""

from __future__ import annotations

import pytest

from fp4rt import errors


@pytest.mark.parametrize(
    ("name", "builtin"),
    [
        ("ShapeError", ValueError),
        ("DtypeError", TypeError),
        ("LayoutError", ValueError),
        ("ScaleError", ValueError),
        ("DeviceError", ValueError),
        ("CheckpointError", ValueError),
        ("BackendUnavailable", RuntimeError),
        ("CompileError", RuntimeError),
    ],
)
def test_errors_are_builtins_too(name: str, builtin: type[Exception]) -> None:
    error = getattr(errors, name)
    assert issubclass(error, builtin)
    assert issubclass(error, errors.Fp4rtError)
    assert name in errors.__all__


def test_every_class_is_listed() -> None:
    classes = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert classes == set(errors.__all__) - {"counted"}
