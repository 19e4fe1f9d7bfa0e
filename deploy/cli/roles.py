"""``riffle shuffler | coordinator | node``: one role as a process.

Everything a role needs is in environment variables, ``RIFFLE_SHUFFLER_*`` and so on. What it
has to say is in its log, JSON lines on stderr (`common.process.journal`), its last words too.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from riffle.common.process.journal import Journal, log_to_stderr
from riffle.common.protocol.errors import LocalError, RiffleError
from riffle.deploy.output import Exit, exit_code


@contextmanager
def _as(journal: Journal) -> Iterator[None]:
    """Log as this role; an error that ends it is its last line and its exit code."""
    log_to_stderr(journal.role)
    try:
        yield
    except RiffleError as error:
        journal.fatal(error)
        raise typer.Exit(exit_code(error)) from error
    except OSError as error:
        detail = f"{error.strerror or type(error).__name__} {error.filename or ''}".strip()
        journal.fatal(LocalError("unavailable", detail))
        raise typer.Exit(Exit.UNAVAILABLE) from error
    except Exception as error:
        journal.exception("ended", error)
        raise typer.Exit(Exit.UNAVAILABLE) from error


def shuffler_command() -> None:
    """Run the shuffler. Settings: RIFFLE_SHUFFLER_* variables."""
    from riffle.shuffler.app import run  # noqa: PLC0415
    from riffle.shuffler.metrics import JOURNAL, note  # noqa: PLC0415  (each process loads its own role)
    from riffle.shuffler.settings import Settings  # noqa: PLC0415

    with _as(JOURNAL):
        run(Settings.load(), on_start=lambda: note("serving"))


def coordinator_command() -> None:
    """Run the coordinator. Settings: RIFFLE_COORDINATOR_* variables."""
    from riffle.coordinator.app import run  # noqa: PLC0415
    from riffle.coordinator.metrics import JOURNAL, note  # noqa: PLC0415
    from riffle.coordinator.settings import Settings  # noqa: PLC0415

    with _as(JOURNAL):
        run(Settings.load(), on_start=lambda: note("serving"))


def node_command() -> None:
    """Run nodes: one for every credential. Settings: RIFFLE_NODE_* variables."""
    from riffle.node_client.journal import JOURNAL, note  # noqa: PLC0415
    from riffle.node_client.main import run  # noqa: PLC0415
    from riffle.node_client.settings import Settings  # noqa: PLC0415

    with _as(JOURNAL):
        run(Settings.load(), on_start=lambda: note("serving"))
