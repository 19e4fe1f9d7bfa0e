"""``riffle network``: the secrets of a network. ``shuffler``, ``coordinator``, ``node``: its roles,
each as a process. ``health`` and ``doctor``: checks.

Every command imports only the modules that it needs, because a role must not import another role.
"""
# ruff: noqa: PLC0415

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from riffle.common.process.journal import Journal, log_to_stderr
from riffle.common.protocol.errors import LocalError, RiffleError
from riffle.deploy.cli.options import SECRETS, CoordinatorUrl, ShufflerUrl, whole
from riffle.deploy.output import (
    Exit,
    Output,
    TableOutput,
    counted,
    emit,
    emit_findings,
    emit_rows,
    exit_code,
    fail,
    one_line_errors,
    progress,
    steps,
    utc,
)

network_command = typer.Typer(
    no_args_is_help=True, help="Create and change the secrets of a network."
)

NetworkFolder = Annotated[Path, typer.Argument(help="folder of the network's secrets")]


def _file(role: str) -> Any:  # noqa: ANN401  (Typer's own types)
    return typer.Argument(help=f"settings file, such as network/{role}/settings")


@network_command.command("init")
@one_line_errors
def init_command(
    folder: NetworkFolder = SECRETS,
    shuffler_url: Annotated[
        str | None,
        typer.Option(help="shuffler's addresses, https://host:port[,...]; default: localhost:8401"),
    ] = None,
    coordinator_url: Annotated[
        str | None, typer.Option(help="coordinator's addresses; default: localhost:8400")
    ] = None,
    output: Output = "text",
) -> None:
    """Write missing keys, tokens, certificates and settings files; never replace one.

    The certificates name the hosts of the addresses. Later commands find the addresses in FOLDER.
    """
    from riffle.deploy.network.secrets import init_network
    from riffle.deploy.network.settings_files import read_addresses, write_settings

    shuffler, coordinator = read_addresses(folder, shuffler_url, coordinator_url)
    init_network(folder, shuffler, coordinator)
    write_settings(folder, shuffler, coordinator)
    document = {"folder": str(folder), "shuffler_url": shuffler, "coordinator_url": coordinator}
    text = f"secrets and settings of the network are in {folder}: shuffler {shuffler}, "
    emit(
        document, output, lambda: progress.print(f"{text}coordinator {coordinator}", soft_wrap=True)
    )


@network_command.command("enrol")
@one_line_errors
def enrol_command(
    owner: Annotated[str, typer.Option(help="owner of the nodes, who has one share of each batch")],
    users: Annotated[int, whole("people whom each node may serve, ever")],
    folder: NetworkFolder = SECRETS,
    shuffler_url: ShufflerUrl = None,
    nodes: Annotated[int, typer.Option(min=1, help="valid nodes that the owner has then")] = 1,
    owners: Annotated[
        int, typer.Option(min=1, help="simulate this many owners, named OWNER-1, OWNER-2, ...")
    ] = 1,
    credentials: Annotated[
        Path | None,
        typer.Option(help="file of the credentials; default: nodes/credentials.json in FOLDER"),
    ] = None,
    output: Output = "text",
) -> None:
    """Act as the shuffler's operator: enrol an owner's nodes and write their credentials."""
    from riffle.deploy.network.secrets import enrol

    names = [owner] if owners == 1 else [f"{owner}-{number + 1}" for number in range(owners)]
    with steps("enrolling", owners * nodes) as shown:
        count, held = enrol(folder, shuffler_url, names, nodes, users, shown.step, credentials)
    document = {"folder": str(folder), "owners": names, "nodes": nodes, "enrolled": count}
    who = f"{owner} has" if owners == 1 else f"each of {owners} owners has at least"
    text = f"enrolled {counted(count, 'node')}: {who} {counted(held, 'valid node')}"
    if not count:
        valid = f"{counted(held, 'valid node')} already"
        text = f"enrolled none: {who} {valid}; for another, --nodes {held + 1}"
    emit(document, output, lambda: progress.print(text, soft_wrap=True))


@network_command.command("nodes")
@one_line_errors
def nodes_command(
    folder: NetworkFolder = SECRETS,
    shuffler_url: ShufflerUrl = None,
    output: TableOutput = "text",
) -> None:
    """Act as the shuffler's operator: list all nodes with their users, reports and failures."""
    from riffle.deploy.network.secrets import list_nodes, shuffler_operator

    with shuffler_operator(folder, shuffler_url) as client:
        nodes = list_nodes(client)
    valid = [node for node in nodes if node.revoked_at is None]
    left = sum(node.users_left for node in valid)
    rows = [node.model_dump() for node in nodes]
    emit_rows({"nodes": rows, "users_left": left}, rows, output)
    if output == "text":
        owners = counted(len({node.owner for node in valid}), "owner")
        whose = f"{counted(len(valid), 'valid node')} of {owners}"
        progress.print(f"{whose} may name {counted(left, 'more user')}")


@network_command.command("revoke")
@one_line_errors
def revoke_command(
    node: Annotated[str, typer.Argument(help="name of a node, its id, or the id's beginning")],
    folder: NetworkFolder = SECRETS,
    shuffler_url: ShufflerUrl = None,
    output: Output = "text",
) -> None:
    """Act as the shuffler's operator: refuse a node from now on, for good."""
    from riffle.deploy.network.secrets import find_node, revoke_node, shuffler_operator

    with shuffler_operator(folder, shuffler_url) as client:
        revoked = find_node(client, node)
        if revoked.revoked_at is None:
            revoke_node(client, revoked.node_id)
    document = {"node_id": revoked.node_id, "name": revoked.name, "owner": revoked.owner}
    since = "" if revoked.revoked_at is None else f" already, at {utc(revoked.revoked_at)}"
    text = f"revoked{since}: {revoked.name} ({revoked.node_id}) of owner {revoked.owner}"
    emit(document, output, lambda: progress.print(text, soft_wrap=True))


@network_command.command("rotate-key")
@one_line_errors
def rotate_key_command(
    folder: NetworkFolder = SECRETS,
    coordinator_url: CoordinatorUrl = None,
    activate: Annotated[
        bool, typer.Option(help="seal new batches to the new key, once it is pinned")
    ] = True,
    output: Output = "text",
) -> None:
    """Give the analyzer a new key: create it, pin it at nodes and shuffler, activate it.

    If nodes or shuffler keep their pins on other machines, use --no-activate. Then copy
    nodes/analyzer_keys and shuffler/analyzer_keys there, and run the command again. Pins of erased
    keys are removed.
    """
    from riffle.deploy.network.secrets import pin
    from riffle.deploy.operator import Operator

    with Operator.of(folder, coordinator_url) as operator:
        key = operator.make_key()["id"]
        pin(folder, operator.keys())
        if activate:
            operator.activate_key(key)
            pin(folder, operator.keys())
    text = f"key {key} is pending, and pinned in {folder}"
    if activate:
        text = f"key {key} is active; the previous one still opens batches issued under it"
    document = {"id": key, "state": "active" if activate else "pending"}
    emit(document, output, lambda: progress.print(text))


def _run_role(
    journal: Journal,
    load: Callable[[Path | None], Any],
    run: Callable[..., object],
    file: Path | None,
) -> None:
    """Runs a role until a signal ends it, and logs its start and its end.

    If an error ends the role, logs the error as the role's last line and sets the exit code.
    """
    log_to_stderr(journal.role)
    try:
        settings = load(file)
        address: dict[str, Any] = {}
        if hasattr(settings, "port"):  # a node has none
            address["listens_at"] = f"{settings.host}:{settings.port}"
        run(settings, on_start=partial(journal.note, "serving", **address))
        journal.note("stopped", **address)
    except RiffleError as error:
        journal.fatal(error)
        raise typer.Exit(exit_code(error)) from error
    except Exception as error:
        if isinstance(error, OSError):
            detail = f"{error.strerror or type(error).__name__} {error.filename or ''}".strip()
            journal.fatal(LocalError("unavailable", detail))
        elif isinstance(error, MemoryError) or "start new thread" in str(error):
            journal.fatal(LocalError("unavailable", "no memory, or no thread, is left; allow more"))
        else:
            journal.exception("ended", error)
        raise typer.Exit(Exit.UNAVAILABLE) from error


def shuffler_command(settings: Annotated[Path | None, _file("shuffler")] = None) -> None:
    """Run the shuffler. A file or RIFFLE_SHUFFLER_* configure it."""
    from riffle.shuffler.app import run
    from riffle.shuffler.metrics import JOURNAL
    from riffle.shuffler.settings import Settings

    _run_role(JOURNAL, Settings.load, run, settings)


def coordinator_command(settings: Annotated[Path | None, _file("coordinator")] = None) -> None:
    """Run the coordinator. A file or RIFFLE_COORDINATOR_* configure it."""
    from riffle.coordinator.app import run
    from riffle.coordinator.metrics import JOURNAL
    from riffle.coordinator.settings import Settings

    _run_role(JOURNAL, Settings.load, run, settings)


def node_command(settings: Annotated[Path | None, _file("nodes")] = None) -> None:
    """Run one node for each credential. A file or RIFFLE_NODE_* configure it."""
    from riffle.node_client.main import run
    from riffle.node_client.settings import JOURNAL, Settings

    _run_role(JOURNAL, Settings.load, run, settings)


@one_line_errors
def health_command(
    url: Annotated[str, typer.Argument(help="such as http://host:port/readyz")],
    ca: Annotated[Path | None, typer.Option(help="PEM of a private CA, for https")] = None,
    output: Output = "text",
) -> None:
    """Ask a service whether it is ready.

    Exit code 0: ready; 1: not ready; 4: no answer.
    """
    import httpx

    from riffle.common.process.endpoint import failure_reason
    from riffle.deploy.network.processes import probe

    try:
        answer = probe(url, ca)
    except httpx.HTTPError as error:
        reason = failure_reason(error)
        hint = "; name it with --ca FILE" if "unknown authority" in reason else ""
        detail = f"{url} does not answer: {reason}{hint}"
        raise LocalError("unavailable", detail) from error
    document = {"url": url, "ready": answer.is_success, "status": answer.status_code}
    emit(document, output, lambda: typer.echo("ready") if answer.is_success else None)
    if not answer.is_success:
        fail(f"{url} answers {answer.status_code}: {answer.text}", Exit.NO)


@one_line_errors
def doctor_command(
    out: Annotated[Path, typer.Option(help="folder for results")] = Path("runs"),
    port: Annotated[list[int] | None, typer.Option(help="port to be used; repeatable")] = None,
    network: Annotated[Path | None, typer.Option(help="folder of a network's secrets")] = None,
    url: Annotated[list[str] | None, typer.Option(help="ask only this service; repeatable")] = None,
    output: Output = "text",
) -> None:
    """Check this machine and, if given, a network and its services.

    Exit code 1 if something is wrong.
    """
    from riffle.deploy.network.doctor import examine

    emit_findings(examine(out, port or [], network, url or []), output)
