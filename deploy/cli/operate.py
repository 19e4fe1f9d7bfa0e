"""``riffle list | show | log | stop | deploy | conservation``: the operator's words for runs.

A run is named by its id, the beginning of its id, or its name.
"""

import contextlib
import json
import shlex
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from riffle.common.process.tables import flatten
from riffle.common.protocol.errors import LocalError, RiffleError
from riffle.deploy.cli.options import SECRETS, CoordinatorUrl, Network
from riffle.deploy.network.processes import is_locked
from riffle.deploy.operator import FINISHED, Answer, Operator
from riffle.deploy.output import (
    Exit,
    Format,
    Output,
    TableFormat,
    bar,
    emit,
    emit_rows,
    line,
    one_line_errors,
    progress,
    table,
    told,
    utc,
)
from riffle.deploy.report import rows_of


def _run_ids(context: typer.Context) -> list[str]:
    """Ids and names, for a shell to complete; none when there is no answer."""
    network = context.params.get("network") or SECRETS
    with (
        contextlib.suppress(RiffleError),
        Operator.of(Path(network), context.params.get("coordinator_url")) as operator,
    ):
        return [text for run in operator.runs() for text in (run["id"], run["name"])]
    return []


Run = Annotated[
    str,
    typer.Argument(help="id of a run, how it begins, or the run's name", autocompletion=_run_ids),
]
Rows = Annotated[TableFormat, typer.Option("--format", help="text, json or csv")]
SPECIFIED = ("learner", "environment", "trust")
LISTED = ("id", "name", "state", *SPECIFIED, "episodes", "of", "stage", "trouble")
ACCOUNTED = (
    "deployment",
    "state",
    "expected",
    *(f"shuffler_messages_{name}" for name in ("accepted", "held", "forwarded", "dropped")),
    "opened",
    "failed",
    "balanced",
)
SHORT = 12
HIDDEN = {"policy", "timings", "constants", "spec"}


class TableName(StrEnum):
    """The tables of a run."""

    deployments = "deployments"
    stages = "stages"
    ledger = "ledger"


@one_line_errors
def list_command(
    network: Network = SECRETS,
    coordinator_url: CoordinatorUrl = None,
    output: Rows = TableFormat.text,
) -> None:
    """List all runs, oldest first, with trust model and progress."""
    with Operator.of(network, coordinator_url) as operator:
        runs = operator.runs()
    rows = [_listed(run) for run in runs]
    if output is TableFormat.text:
        rows = [
            row | {"id": row["id"][:SHORT]} for row in rows
        ]  # how it begins is enough to name it
    emit_rows({"runs": runs}, rows, output)


@one_line_errors
def show_command(
    run: Run,
    of: Annotated[
        TableName | None, typer.Option("--table", help="deployments, stages or ledger instead")
    ] = None,
    network: Network = SECRETS,
    coordinator_url: CoordinatorUrl = None,
    output: Rows = TableFormat.text,
) -> None:
    """Show a run's state, result and cost, or one of its tables."""
    with Operator.of(network, coordinator_url) as operator:
        found = operator.find(run)
        if of is not None:
            rows = rows_of(operator, found["id"], of.value)
            emit_rows({of.value: rows}, rows, output)
            return
        result = operator.result(found["id"])
    row = _listed(found) | flatten(result)
    if output is not TableFormat.text:
        emit_rows({"run": found, "result": result}, [row], output)
        return
    table(("quantity", "value"), [(name, told(name, value)) for name, value in row.items()])
    for h, actions in enumerate(result["policy"] or []):
        typer.echo(f"policy, step {h}: {' '.join(map(str, actions))}")


@one_line_errors
def log_command(
    run: Run,
    follow: Annotated[
        bool, typer.Option("--follow", help="wait for more until it is over")
    ] = False,
    network: Network = SECRETS,
    coordinator_url: CoordinatorUrl = None,
    output: Output = Format.text,
) -> None:
    """Print a run's events, one a line.

    As json, every line is a document. With --follow the exit code is 1 when the run failed or was
    stopped.
    """
    kind = ""
    with Operator.of(network, coordinator_url) as operator:
        for event in operator.events(operator.find(run)["id"], follow=follow):
            kind = event["kind"]
            typer.echo(json.dumps(event) if output is Format.json else _line(event))
            sys.stdout.flush()
    if follow and kind != FINISHED:
        raise typer.Exit(Exit.NO)


@one_line_errors
def stop_command(
    run: Run,
    network: Network = SECRETS,
    coordinator_url: CoordinatorUrl = None,
    output: Output = Format.text,
) -> None:
    """Stop a run: abandon its open batch, count a sealed one."""
    with Operator.of(network, coordinator_url) as operator:
        stopped = operator.stop(operator.find(run)["id"])
    emit(stopped, output, lambda: typer.echo(f"run {stopped['id']} is {stopped['state']}"))


@one_line_errors
def deploy_command(
    run: Run,
    episodes: Annotated[int, typer.Option(min=1, help="n, users who shall run it")],
    policy: Annotated[
        str | None,
        typer.Option(
            help="JSON, or a file of it: H lists of X actions; or an object with policy, or with "
            "policies and probabilities; summary.json is one"
        ),
    ] = None,
    always: Annotated[int | None, typer.Option(min=0, help="or: one action, always")] = None,
    layer: Annotated[int | None, typer.Option(min=0, help="count this step only")] = None,
    wait: Annotated[bool, typer.Option("--wait", help="until it is counted: its value")] = False,
    network: Network = SECRETS,
    coordinator_url: CoordinatorUrl = None,
    output: Output = Format.text,
) -> None:
    """Deploy a policy or a mixture in a run whose learner is manual.

    Exit code 1 when --wait ends without counts.
    """
    if (policy is None) == (always is None):
        raise ValueError("say either --policy or --always")
    with Operator.of(network, coordinator_url) as operator:
        found = operator.find(run)
        asked = _constant(found["spec"], always) if policy is None else _policies(policy)
        done = operator.deploy(found["id"], asked | {"episodes": episodes, "layer": layer})
        if wait:
            done = _wait(operator, found["id"], done["index"])
    hidden = {"mixture", "noise", "counts", "spend"}
    emit(done, output, lambda: table(("quantity", "value"), _shown(done, hidden)))
    if not wait:
        last = found["episodes"] + episodes >= found["spec"]["episodes"]
        say = _say_end if last else _say_where
        say(run, network, coordinator_url)
    elif done["state"] != "counted":
        raise typer.Exit(Exit.NO)


@one_line_errors
def conservation_command(
    run: Run,
    network: Network = SECRETS,
    coordinator_url: CoordinatorUrl = None,
    output: Rows = TableFormat.text,
) -> None:
    """Account for every message of a run, batch by batch, at both services.

    Exit code 1 when something does not add up.
    """
    with Operator.of(network, coordinator_url) as operator:
        found = operator.conservation(operator.find(run)["id"])
    emit_rows(found, [flatten(batch) for batch in found["batches"]], output, ACCOUNTED)
    raise typer.Exit(Exit.NO if found["balanced"] is False else Exit.DONE)


def _listed(run: Answer) -> Answer:
    spec = run["spec"]
    row = {**run, **{name: spec[name] for name in SPECIFIED}, "of": spec["episodes"]}
    return {name: row[name] for name in LISTED}


def _line(event: Answer) -> str:
    data = {key: value for key, value in event["data"].items() if key not in {"run", "at"}}
    words = " ".join(f"{key}={value}" for key, value in data.items() if key not in HIDDEN)
    return f"{utc(event['data']['at'])} {event['kind']} {words}".rstrip()


def _shown(row: Answer, hidden: set[str]) -> list[tuple[str, Any]]:
    return [(key, told(key, value)) for key, value in flatten(row).items() if key not in hidden] + [
        (f"value_estimate.{key}", value) for key, value in (row.get("value_estimate") or {}).items()
    ]


def _say_where(run: str, network: Path, url: str | None) -> None:
    """A deployment is counted later: how to see what came of it."""
    shown = _show(run, network, url)
    _note(f"once it is counted, {shown} has the best value so far; --wait waits for it")


def _say_end(run: str, network: Path, url: str | None) -> None:
    """With its last episodes a run ends, and the network of ``riffle up`` with its own run.

    Which run is its own nobody says, and others may run on its network: both are told then.
    """
    shown, folder = _show(run, network, url), network.parent
    where = f"{shown} has its result"
    if is_locked(folder):  # by a command that writes results beside its network
        where = (
            f"riffle up's own run writes its results into {folder} and, without --keep, ends the "
            f"network too; of any other, {shown} has the result"
        )
    _note(f"these are the run's last episodes: once they are counted it ends; {where}")


def _show(run: str, network: Path, url: str | None) -> str:
    words = ["riffle", "show", run, "--network", str(network)]
    return shlex.join(words + ([] if url is None else ["--coordinator-url", url]))


def _note(text: str) -> None:
    progress.print(text, highlight=False, soft_wrap=True)


def _constant(spec: Answer, action: int | None) -> Answer:
    return {"policy": [[action] * spec["states"]] * spec["horizon"]}


def _policies(text: str) -> Answer:
    """What --policy says, as the fields of a deployment.

    Raises:
        LocalError: ``invalid-spec``: it is no JSON, or holds no policy.
    """
    source = text if text.lstrip().startswith(("[", "{")) else Path(text).read_bytes()
    try:
        found = json.loads(source)
    except (ValueError, RecursionError) as error:
        raise LocalError("invalid-spec", f"--policy is not JSON: {error}") from error
    if isinstance(found, list):
        return {"policy": found}
    names = found.keys() if isinstance(found, dict) else set()
    fields = {"policy", "policies", "probabilities"} & names
    if not fields:
        raise LocalError("invalid-spec", "--policy has neither policy nor policies")
    return {name: found[name] for name in fields}


def _wait(operator: Operator, run_id: str, index: int) -> Answer:
    what = "waiting for the batch to fill and be counted"
    line(what)
    with bar("") as shown:
        shown.add_task(what, total=None)
        return operator.wait(run_id, index)
