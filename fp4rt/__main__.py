"""``fp4rt`` and ``python -m fp4rt``: the commands."""

from __future__ import annotations

import io
import os
import sys


def main() -> None:
    """Run the command line of this process and exit with its status, which ``fp4rt --help`` explains."""
    _settle_streams()
    status = 1
    try:
        from fp4rt.cli import run

        status = run(sys.argv[1:])
        sys.stdout.flush()
    except KeyboardInterrupt:  # before a command has begun
        status = 130
    except OSError as error:  # of standard output: commands see to their own files
        if not isinstance(error, BrokenPipeError):
            print(f"error: standard output: {error.strerror or error}", file=sys.stderr)
        status = status or 1
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left goes nowhere
    sys.exit(status)


def _settle_streams() -> None:
    """Any name of a tensor can be printed, on a terminal of any encoding, and even where nobody listens."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by whoever started this process
            setattr(sys, name, io.StringIO())
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


if __name__ == "__main__":
    main()
