"""How commands speak: results on stdout, everything else on stderr, one line an error, a bar for long work.

With ``--json`` stdout is one JSON document whatever happens: the result, or ``{"error": ..., "status": ...}`` beside
the line on stderr.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, TypeVar

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from fp4rt.errors import Fp4rtError

__all__ = [
    "BAD_INPUT",
    "WRONG_USAGE",
    "add",
    "answer_error",
    "answering_in_json",
    "bar",
    "clean",
    "fail",
    "failing",
    "note",
    "print_json",
    "print_table",
    "size",
    "table",
    "usage",
]

BAD_INPUT = 1
WRONG_USAGE = 2
INTERRUPTED = 130
WIDE = 200  # columns of a table that goes to a file or a pipe

_in_json: ContextVar[bool] = ContextVar("_in_json", default=False)

Command = TypeVar("Command", bound=Callable[..., Any])


def _stdout() -> Console:
    return Console(width=None if sys.stdout.isatty() else WIDE, soft_wrap=False, highlight=False, markup=False)


def _stderr() -> Console:
    return Console(stderr=True, highlight=False, markup=False)


def failing(command: Command) -> Command:
    """Decorate a command: what goes wrong with its input becomes one line on stderr and exit status 1."""

    @functools.wraps(command)
    def run(*arguments: Any, **options: Any) -> Any:
        try:
            with warnings.catch_warnings():
                warnings.showwarning = _one_line
                return command(*arguments, **options)
        except Fp4rtError as error:
            fail(str(error))
        except BrokenPipeError:  # the reader of our output has gone: nothing more to say
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(BAD_INPUT) from None
        except MemoryError as error:
            fail(f"not enough memory: {error}")
        except OSError as error:
            fail(_describe(error))
        except KeyboardInterrupt:
            fail("interrupted; the same command finishes an unfinished folder", INTERRUPTED)

    return run  # type: ignore[return-value]


def fail(message: str, status: int = BAD_INPUT) -> Any:
    """End the command with one line."""
    line = " ".join(message.splitlines())
    print(f"error: {clean(line)}", file=sys.stderr)
    answer_error(line, status)
    raise typer.Exit(status)


@contextlib.contextmanager
def answering_in_json(on: bool) -> Iterator[None]:
    """Whether :func:`answer_error` speaks inside."""
    token = _in_json.set(on)
    try:
        yield
    finally:
        _in_json.reset(token)


def answer_error(message: str, status: int) -> None:
    """The error for scripts, where one asked for JSON."""
    if _in_json.get():
        print_json({"error": message, "status": status})


@contextlib.contextmanager
def usage() -> Iterator[None]:
    """Options are looked at inside, before any file: an error is wrong usage, one line and exit status 2."""
    try:
        yield
    except Fp4rtError as error:
        fail(str(error), WRONG_USAGE)


def note(message: str) -> None:
    """Say something that is not the result."""
    print(message, file=sys.stderr)


def print_json(value: Any) -> None:
    """The result for scripts."""
    print(json.dumps(value, indent=2, allow_nan=False))


def table(title: str, columns: list[tuple[str, str]]) -> Table:
    """An empty table; a column is (heading, "left" or "right")."""
    result = Table(title=title or None, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for heading, side in columns:
        result.add_column(heading, justify=side, no_wrap=side == "right", overflow="fold")  # type: ignore[arg-type]
    return result


def add(result: Table, *cells: str) -> None:
    """Add a row; a name of a file cannot send control characters to the terminal."""
    result.add_row(*map(clean, cells))


def clean(text: str) -> str:
    """Text of a file as it may be printed."""
    return text if text.isprintable() else ascii(text)


def print_table(value: Table) -> None:
    """Print a table on stdout."""
    _stdout().print(value)


def size(nbytes: int) -> str:
    """Bytes as people read them."""
    amount, unit = float(nbytes), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if amount < 1000 or unit == "TB":
            break
        amount /= 1000
    return f"{nbytes} B" if unit == "B" else f"{amount:.3g} {unit}" if amount < 100 else f"{amount:.0f} {unit}"


@contextlib.contextmanager
def bar(title: str, total: int, quiet: bool = False) -> Iterator[Callable[[int], None]]:
    """A progress bar on stderr with bytes, speed and time to go; gives the function that moves it."""
    console = _stderr()
    if quiet or not console.is_terminal:
        yield lambda nbytes: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as progress:
        task = progress.add_task(title, total=total)
        yield lambda nbytes: progress.advance(task, nbytes)


def _one_line(message: Warning | str, *_: Any, **__: Any) -> None:
    print(f"warning: {' '.join(str(message).splitlines())}", file=sys.stderr)


def _describe(error: OSError) -> str:
    place = f"{os.fsdecode(error.filename)}: " if error.filename else ""
    hint = "; free some space and run the same command again" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
    return f"{place}{error.strerror or error}{hint}"
