"""``riffle shuffler | coordinator | node``: one role as a process.

Everything a role needs is in environment variables, ``RIFFLE_SHUFFLER_*`` and so on.
"""

import logging

from deploy.cli.output import one_line_errors, progress


def log_to_stderr() -> None:
    """Show Riffle's own log lines, which name batches and counts, never a user, lease or episode.

    Libraries log at WARNING only: an HTTP client's INFO lines would tell who sent when.
    """
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("riffle").setLevel(logging.INFO)


@one_line_errors
def shuffler_command() -> None:
    """Run the shuffler. Settings: RIFFLE_SHUFFLER_* variables."""
    from shuffler.main import run  # noqa: PLC0415  (each process loads its own role only)
    from shuffler.settings import Settings  # noqa: PLC0415

    log_to_stderr()
    run(Settings.load(), on_start=lambda: progress.print("shuffler: serving"))


@one_line_errors
def coordinator_command() -> None:
    """Run the coordinator. Settings: RIFFLE_COORDINATOR_* variables."""
    from coordinator.main import run  # noqa: PLC0415
    from coordinator.settings import Settings  # noqa: PLC0415

    log_to_stderr()
    run(Settings.load(), on_start=lambda: progress.print("coordinator: serving"))


@one_line_errors
def node_command() -> None:
    """Run nodes: one for every credential. Settings: RIFFLE_NODE_* variables."""
    from node_client.main import run  # noqa: PLC0415
    from node_client.settings import Settings  # noqa: PLC0415

    log_to_stderr()
    run(Settings.load(), on_start=lambda: progress.print("nodes: serving"))
