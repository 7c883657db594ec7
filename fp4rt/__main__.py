"""``fp4rt`` and ``python -m fp4rt``: the commands."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line of this process and exit with its status: 0 done, 1 bad input, 2 wrong usage."""
    from fp4rt.cli import run

    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
