"""``riffle network init | enrol | rotate-key``: the secrets of a network."""

from pathlib import Path
from typing import Annotated

import typer

from riffle.deploy.network.secrets import enrol, init_network, pin
from riffle.deploy.output import Format, Output, emit, one_line_errors, progress, steps

network_app = typer.Typer(no_args_is_help=True, help="The secrets of a network.")

NetworkFolder = Annotated[Path, typer.Argument(help="folder of the network's secrets")]


@network_app.command("init")
@one_line_errors
def init_command(
    folder: NetworkFolder,
    replicas: Annotated[
        int, typer.Option(min=1, help="hosts that a server's certificate names: shuffler-2, ...")
    ] = 1,
    output: Output = Format.text,
) -> None:
    """Write the keys, tokens and certificates that are missing; never replace one."""
    init_network(folder, replicas)
    document = {"folder": str(folder), "replicas": replicas}
    emit(document, output, lambda: progress.print(f"the network's secrets are in {folder}"))


@network_app.command("enrol")
@one_line_errors
def enrol_command(
    folder: NetworkFolder,
    shuffler_url: Annotated[str, typer.Option(help="where the shuffler answers")],
    users: Annotated[int, typer.Option(min=1, help="most people that each node may serve, ever")],
    nodes: Annotated[int, typer.Option(min=1, help="credentials the network shall have")] = 20,
    output: Output = Format.text,
) -> None:
    """Enrol nodes at the shuffler, as its operator, and write their credentials."""
    with steps("enrolling", nodes) as shown:
        enrol(folder, shuffler_url, nodes, users, shown.step)
    document = {"folder": str(folder), "nodes": nodes}
    emit(document, output, lambda: progress.print(f"{nodes} nodes are enrolled"))


@network_app.command("rotate-key")
@one_line_errors
def rotate_key_command(
    folder: NetworkFolder,
    coordinator_url: Annotated[str, typer.Option(help="where the coordinator answers")],
    activate: Annotated[
        bool, typer.Option(help="seal new batches to the new key, once it is pinned")
    ] = True,
    output: Output = Format.text,
) -> None:
    """Give the analyzer a new key: make it, pin it at nodes and shuffler, then activate it.

    Where pins are files on other machines: --no-activate, copy nodes/analyzer_keys and
    shuffler/analyzer_keys there, and say it again. Keys that are erased are let go of.
    """
    from riffle.deploy.operator import Operator  # noqa: PLC0415  (the other commands do without it)

    with Operator.of(folder, coordinator_url) as operator:
        made = operator.make_key()
        pin(folder, operator.keys())
        if activate:
            operator.activate_key(made["id"])
            pin(folder, operator.keys())
    after = "active; the one before opens what was issued under it"
    said = after if activate else f"pending, and pinned in {folder}"
    document = {"id": made["id"], "state": "active" if activate else "pending"}
    emit(document, output, lambda: progress.print(f"key {made['id']} is {said}"))
