"""``riffle network``: the secrets of a network. ``shuffler``, ``coordinator``, ``node``: its roles,
each as a process. ``health`` and ``doctor``: checks.

A role is configured by environment variables, ``RIFFLE_SHUFFLER_*`` and so on, and writes JSON
lines to stderr (`common.process.journal`). Every command imports only what it needs, since a role
must not import another one, and containers run ``riffle health`` every few seconds.
"""
# ruff: noqa: PLC0415

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from riffle.common.process.journal import Journal, log_to_stderr
from riffle.common.protocol.errors import LocalError, RiffleError
from riffle.deploy.output import (
    Exit,
    Output,
    emit,
    exit_code,
    fail,
    one_line_errors,
    progress,
    steps,
    table,
)

network_command = typer.Typer(
    no_args_is_help=True, help="Create and change the secrets of a network."
)

NetworkFolder = Annotated[Path, typer.Argument(help="folder of the network's secrets")]


@network_command.command("init")
@one_line_errors
def init_command(
    folder: NetworkFolder,
    replicas: Annotated[
        int, typer.Option(min=1, help="hosts that a server's certificate names: shuffler-2, ...")
    ] = 1,
    output: Output = "text",
) -> None:
    """Write missing keys, tokens and certificates; never replace one."""
    from riffle.deploy.network.secrets import init_network

    init_network(folder, replicas)
    document = {"folder": str(folder), "replicas": replicas}
    emit(document, output, lambda: progress.print(f"the network's secrets are in {folder}"))


@network_command.command("enrol")
@one_line_errors
def enrol_command(
    folder: NetworkFolder,
    shuffler_url: Annotated[str, typer.Option(help="address of the shuffler")],
    owner: Annotated[str, typer.Option(help="owner of the nodes; all nodes have one share")],
    users: Annotated[int, typer.Option(min=1, help="most people that each node may serve, ever")],
    nodes: Annotated[int, typer.Option(min=1, help="credentials the owner then has")] = 1,
    owners: Annotated[
        int, typer.Option(min=1, help="simulate this many owners, named OWNER-1, OWNER-2, ...")
    ] = 1,
    output: Output = "text",
) -> None:
    """Act as the shuffler's operator: enrol an owner's nodes and write their credentials."""
    from riffle.deploy.network.secrets import enrol

    names = [owner] if owners == 1 else [f"{owner}-{number + 1}" for number in range(owners)]
    with steps("enrolling", owners * nodes) as shown:
        enrol(folder, shuffler_url, names, nodes, users, shown.step)
    document = {"folder": str(folder), "owners": names, "nodes": nodes}
    text = f"enrolled nodes of {names[0] if owners == 1 else f'each of {owners} owners'}: {nodes}"
    emit(document, output, lambda: progress.print(text))


@network_command.command("rotate-key")
@one_line_errors
def rotate_key_command(
    folder: NetworkFolder,
    coordinator_url: Annotated[str, typer.Option(help="address of the coordinator")],
    activate: Annotated[
        bool, typer.Option(help="seal new batches to the new key, once it is pinned")
    ] = True,
    output: Output = "text",
) -> None:
    """Give the analyzer a new key: create it, pin it at nodes and shuffler, activate it.

    If nodes or shuffler keep their pins on other machines, use --no-activate, copy
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


@contextmanager
def _logged_errors(journal: Journal) -> Iterator[None]:
    """Logs as a role does; an error that ends it is its last log line and sets the exit code."""
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
        if isinstance(error, MemoryError) or "start new thread" in str(error):
            journal.fatal(LocalError("unavailable", "no memory, or no thread, is left; allow more"))
        else:
            journal.exception("ended", error)
        raise typer.Exit(Exit.UNAVAILABLE) from error


def shuffler_command() -> None:
    """Run the shuffler, configured by RIFFLE_SHUFFLER_* variables."""
    from riffle.shuffler.app import run
    from riffle.shuffler.metrics import JOURNAL, note
    from riffle.shuffler.settings import Settings

    with _logged_errors(JOURNAL):
        run(Settings.load(), on_start=lambda: note("serving"))


def coordinator_command() -> None:
    """Run the coordinator, configured by RIFFLE_COORDINATOR_* variables."""
    from riffle.coordinator.app import run
    from riffle.coordinator.metrics import JOURNAL, note
    from riffle.coordinator.settings import Settings

    with _logged_errors(JOURNAL):
        run(Settings.load(), on_start=lambda: note("serving"))


def node_command() -> None:
    """Run one node for each credential, configured by RIFFLE_NODE_* variables."""
    from riffle.node_client.main import run
    from riffle.node_client.settings import JOURNAL, Settings

    with _logged_errors(JOURNAL):
        run(Settings.load(), on_start=lambda: JOURNAL.note("serving"))


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
        detail = f"{url} does not answer: {failure_reason(error)}"
        raise LocalError("unavailable", detail) from error
    document = {"url": url, "ready": answer.is_success, "status": answer.status_code}
    emit(document, output, lambda: None)
    if answer.is_error:
        fail(f"{url} answers {answer.status_code}: {answer.text}", Exit.NO)


@one_line_errors
def doctor_command(
    out: Annotated[Path, typer.Option(help="folder for results")] = Path("runs"),
    port: Annotated[list[int] | None, typer.Option(help="port to be used; repeatable")] = None,
    network: Annotated[Path | None, typer.Option(help="folder of a network's secrets")] = None,
    url: Annotated[list[str] | None, typer.Option(help="service to ask; repeatable")] = None,
    output: Output = "text",
) -> None:
    """Check this machine and, if given, a network and its services.

    Exit code 1 if something is wrong.
    """
    from riffle.deploy.network.doctor import examine

    findings = examine(out, port or [], network, url or [])
    well = all(finding.ok for finding in findings)
    rows = [("ok" if f.ok else "WRONG", f.check, f.detail) for f in findings]
    document = {"ok": well, "findings": [asdict(finding) for finding in findings]}
    emit(document, output, lambda: table(("", "check", "detail"), rows))
    raise typer.Exit(Exit.DONE if well else Exit.NO)
