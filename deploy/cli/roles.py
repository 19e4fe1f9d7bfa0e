"""``riffle shuffler | coordinator | node``: one role as a process, and ``health``.

Everything a role needs is in environment variables, ``RIFFLE_SHUFFLER_*`` and so on.
"""

from typing import Annotated

import httpx
import typer

from common.errors import LocalError
from deploy.cli.output import Exit, fail, one_line_errors, progress


@one_line_errors
def shuffler_command() -> None:
    """Run the shuffler. Settings: RIFFLE_SHUFFLER_* variables."""
    from shuffler.main import run  # noqa: PLC0415  (each process loads its own role only)
    from shuffler.settings import Settings  # noqa: PLC0415

    run(Settings.load(), on_start=lambda: progress.print("shuffler: serving"))


@one_line_errors
def coordinator_command() -> None:
    """Run the coordinator. Settings: RIFFLE_COORDINATOR_* variables."""
    from coordinator.main import run  # noqa: PLC0415
    from coordinator.settings import Settings  # noqa: PLC0415

    run(Settings.load(), on_start=lambda: progress.print("coordinator: serving"))


@one_line_errors
def node_command() -> None:
    """Run nodes: one for every credential. Settings: RIFFLE_NODE_* variables."""
    from node_client.main import run  # noqa: PLC0415
    from node_client.settings import Settings  # noqa: PLC0415

    run(Settings.load(), on_start=lambda: progress.print("nodes: serving"))


@one_line_errors
def health_command(url: Annotated[str, typer.Argument(help="as http://host:port/readyz")]) -> None:
    """Ask a service whether it is ready: exit code 0 yes, 1 no, 4 no answer."""
    try:
        answer = httpx.get(url, timeout=5)
    except httpx.HTTPError as error:
        raise LocalError("unavailable", f"{url} does not answer: {error}") from error
    if answer.is_error:
        fail(f"{url} answers {answer.status_code}: {answer.text}", Exit.NO)
