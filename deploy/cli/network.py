"""``riffle network init | enrol``: the secrets of a network."""

from pathlib import Path
from typing import Annotated

import typer

from deploy.cli.output import one_line_errors, progress
from deploy.network import enrol, init_network

network_app = typer.Typer(no_args_is_help=True, help="The secrets of a network.")

NetworkFolder = Annotated[Path, typer.Argument(help="folder of the network's secrets")]


@network_app.command("init")
@one_line_errors
def init_command(folder: NetworkFolder) -> None:
    """Write the keys, tokens and certificates that are missing; never replace one."""
    init_network(folder)
    progress.print(f"the network's secrets are in {folder}")


@network_app.command("enrol")
@one_line_errors
def enrol_command(
    folder: NetworkFolder,
    shuffler_url: Annotated[str, typer.Option(help="where the shuffler answers")],
    users: Annotated[int, typer.Option(min=1, help="most people that each node may serve, ever")],
    nodes: Annotated[int, typer.Option(min=1, help="credentials the network shall have")] = 20,
) -> None:
    """Enrol nodes at the shuffler, as its operator, and write their credentials."""
    enrol(folder, shuffler_url, nodes, users)
    progress.print(f"{nodes} nodes are enrolled")
