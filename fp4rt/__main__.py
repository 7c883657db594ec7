"""``fp4rt`` and ``python -m fp4rt``: the commands."""

from __future__ import annotations

import io
import sys


def main() -> None:
    """Run the command line of this process and exit with its status, which ``fp4rt --help`` explains."""
    _settle_streams()
    from fp4rt.cli import run

    sys.exit(run(sys.argv[1:]))


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
