"""Where ``riffle`` begins: loading its modules takes a while, and may be interrupted."""

import os
import sys

INTERRUPTED = 130
"""`deploy.output.Exit.INTERRUPTED`, which is not loaded yet."""


def main() -> None:
    """Load the command line and run it; an interruption is told in one line from the beginning."""
    # No process that is started from here looks for modules in the user's current folder.
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        from riffle.deploy.cli.main import main as riffle  # noqa: PLC0415

        riffle()
    except KeyboardInterrupt:
        sys.stderr.write("riffle: interrupted\n")
        sys.exit(INTERRUPTED)
