"""The commands. Each is a thin shell over the package: it reads options, calls one function, and shows the result.

Exit status: ``STATUS``; one line on stderr says what is wrong. With ``--json`` an error is an object on stdout, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import typer

from fp4rt.checkpoint.overrides import EXAMPLE
from fp4rt.checkpoint.selection import RULES
from fp4rt.cli.bench import bench
from fp4rt.cli.compile import compile_kernels
from fp4rt.cli.console import answer_error, answering_in_json
from fp4rt.cli.convert import convert, dequantize, quantize
from fp4rt.cli.coverage import coverage
from fp4rt.cli.doctor import doctor
from fp4rt.cli.look import inspect, verify
from fp4rt.version import __version__

__all__ = ["app", "run"]

STATUS = "Exit status: 0 done, 1 bad input or a check that fails, 2 wrong usage, 130 interrupted."

app = typer.Typer(
    name="fp4rt",
    help="NVFP4 quantization runtime: convert, look at and check 4-bit models.",
    epilog=STATUS,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
UsageError: Any = typer.BadParameter.__base__  # click's, or the one that a newer typer brings along

# \b keeps the lines of a paragraph as they are.
app.command(epilog=f"{RULES}\n\nA FILE of --overrides, the last rule that matches decides:\n\n\b\n{EXAMPLE}")(quantize)
for command in (dequantize, convert, inspect, verify, doctor, coverage):
    app.command()(command)
app.command(context_settings={"allow_interspersed_args": False})(bench)  # options after NAME are the bench's own
app.command("compile")(compile_kernels)


@app.callback(invoke_without_command=True)
def _version(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    if version:
        print(f"fp4rt {__version__}")
        raise typer.Exit


def run(arguments: Sequence[str]) -> int:
    """Run a command line; returns the exit status."""
    options = list(arguments)
    if "--" in options:
        options = options[: options.index("--")]
    with answering_in_json("--json" in options):
        try:
            return int(app(list(arguments), prog_name="fp4rt", standalone_mode=False) or 0)
        except UsageError as error:
            error.show()
            answer_error(error.format_message(), error.exit_code)
            return int(error.exit_code)
        except SystemExit as end:  # the reader of our output has gone
            return end.code if isinstance(end.code, int) else int(end.code is not None)
