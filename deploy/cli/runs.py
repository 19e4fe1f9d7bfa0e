"""``riffle list``, ``show``, ``log``, ``stop``, ``deploy``, ``conservation``: manage runs.

Commands take a run's id, the beginning of its id, or its name.
"""

import contextlib
import json
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from riffle.common.process.tables import flatten
from riffle.common.protocol.errors import LocalError, RiffleError
from riffle.deploy.cli.options import SECRETS, CoordinatorUrl, Network, whole
from riffle.deploy.network.processes import is_locked
from riffle.deploy.operator import FINISHED, Answer, Operator
from riffle.deploy.output import (
    Exit,
    Output,
    TableOutput,
    bar,
    emit,
    emit_rows,
    line,
    one_line_errors,
    progress,
    readable,
    table,
    utc,
)
from riffle.deploy.report import Table, rows_of


def _run_ids(context: typer.Context) -> list[str]:
    """Returns the runs' ids and names, for shell completion; [] if no coordinator answers."""
    network = context.params.get("network") or SECRETS
    with (
        contextlib.suppress(RiffleError),
        Operator.of(Path(network), context.params.get("coordinator_url")) as operator,
    ):
        return [text for run in operator.runs() for text in (run["id"], run["name"])]
    return []


Run = Annotated[
    str,
    typer.Argument(help="id of a run, its beginning, or the run's name", autocompletion=_run_ids),
]
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
WAITING = "waiting for the batch to fill and be counted"
UNLOGGED = {"run", "at", "policy", "timings", "constants", "spec"}
"""Fields of events that the text output of ``riffle log`` leaves out."""


@one_line_errors
def list_command(
    network: Network = SECRETS, coordinator_url: CoordinatorUrl = None, output: TableOutput = "text"
) -> None:
    """List all runs, oldest first, with trust model and progress."""
    with Operator.of(network, coordinator_url) as operator:
        runs = operator.runs()
    rows = [_listed(run) for run in runs]
    if output == "text":  # the beginning of an id identifies a run
        rows = [row | {"id": row["id"][:SHORT]} for row in rows]
    emit_rows({"runs": runs}, rows, output)


@one_line_errors
def show_command(
    run: Run,
    of: Annotated[
        Table | None, typer.Option("--table", help="show deployments, stages or ledger instead")
    ] = None,
    network: Network = SECRETS,
    coordinator_url: CoordinatorUrl = None,
    output: TableOutput = "text",
) -> None:
    """Show a run's state, result and cost, or one of its tables."""
    with Operator.of(network, coordinator_url) as operator:
        answer = operator.find(run)
        if of is not None:
            rows = rows_of(operator, answer["id"], of)
            emit_rows({of: rows}, rows, output)
            return
        result = operator.result(answer["id"])
    row = _listed(answer) | flatten(result)
    if output != "text":
        emit_rows({"run": answer, "result": result}, [row], output)
        return
    table(("quantity", "value"), [(name, readable(name, value)) for name, value in row.items()])
    for h, actions in enumerate(result["policy"] or []):
        typer.echo(f"policy, step {h}: {' '.join(map(str, actions))}")


@one_line_errors
def log_command(
    run: Run,
    follow: Annotated[
        bool, typer.Option("--follow", help="wait for more events until the run is over")
    ] = False,
    network: Network = SECRETS,
    coordinator_url: CoordinatorUrl = None,
    output: Output = "text",
) -> None:
    """Print a run's events, one a line.

    With --format json, every line is a document. With --follow, the exit code is 1 if the run
    failed or was stopped.
    """
    kind = ""
    with Operator.of(network, coordinator_url) as operator:
        for event in operator.events(operator.find(run)["id"], follow=follow):
            kind = event["kind"]
            typer.echo(json.dumps(event) if output == "json" else _line(event))
            sys.stdout.flush()
    if follow and kind != FINISHED:
        raise typer.Exit(Exit.NO)


@one_line_errors
def stop_command(
    run: Run,
    network: Network = SECRETS,
    coordinator_url: CoordinatorUrl = None,
    output: Output = "text",
) -> None:
    """Stop a run: abandon an open batch, still count a sealed one."""
    with Operator.of(network, coordinator_url) as operator:
        stopped = operator.stop(operator.find(run)["id"])
    emit(stopped, output, lambda: typer.echo(f"run {stopped['id']} is {stopped['state']}"))


@one_line_errors
def deploy_command(
    run: Run,
    episodes: Annotated[int, whole("n, the number of users")],
    policy: Annotated[
        str | None,
        typer.Option(
            help="JSON or a file of JSON: H lists of X actions, or an object with policy, or with "
            "policies and probabilities, such as summary.json"
        ),
    ] = None,
    always: Annotated[int | None, typer.Option(min=0, help="always take this action")] = None,
    layer: Annotated[int | None, typer.Option(min=0, help="count this step only")] = None,
    wait: Annotated[bool, typer.Option("--wait", help="wait for the value estimate")] = False,
    network: Network = SECRETS,
    coordinator_url: CoordinatorUrl = None,
    output: Output = "text",
) -> None:
    """Deploy a policy or a mixture in a run whose learner is manual.

    The exit code is 1 if --wait ends without counts.
    """
    if (policy is None) == (always is None):
        raise ValueError("give either --policy or --always")
    with Operator.of(network, coordinator_url) as operator:
        answer = operator.find(run)
        spec = answer["spec"]
        body = (
            {"policy": [[always] * spec["states"]] * spec["horizon"]}
            if policy is None
            else _read_policies(policy)
        )
        body |= {"episodes": episodes, "layer": layer}
        deployment = operator.deploy(answer["id"], body)
        if wait:
            line(WAITING)
            with bar("") as shown:
                shown.add_task(WAITING, total=None)
                deployment = operator.wait(answer["id"], deployment["index"])
    emit(deployment, output, lambda: table(("quantity", "value"), _rows(deployment)))
    if not wait:
        last = answer["episodes"] + episodes >= spec["episodes"]
        progress.print(
            _next_step(run, network, coordinator_url, last=last), highlight=False, soft_wrap=True
        )
    elif deployment["state"] != "counted":
        raise typer.Exit(Exit.NO)


@one_line_errors
def conservation_command(
    run: Run,
    network: Network = SECRETS,
    coordinator_url: CoordinatorUrl = None,
    output: TableOutput = "text",
) -> None:
    """Account for every message of a run, at both services.

    The table has a row for each batch. The exit code is 1 if something does not add up, or is
    unknown because the shuffler does not answer.
    """
    with Operator.of(network, coordinator_url) as operator:
        answer = operator.conservation(operator.find(run)["id"])
    emit_rows(answer, [flatten(batch) for batch in answer["batches"]], output, ACCOUNTED)
    raise typer.Exit(Exit.DONE if answer["balanced"] is True else Exit.NO)


def _listed(run: Answer) -> Answer:
    spec = run["spec"]
    row = {**run, **{name: spec[name] for name in SPECIFIED}, "of": spec["episodes"]}
    return {name: row[name] for name in LISTED}


def _line(event: Answer) -> str:
    data = event["data"].items()
    words = " ".join(f"{key}={value}" for key, value in data if key not in UNLOGGED)
    return f"{utc(event['data']['at'])} {event['kind']} {words}".rstrip()


def _rows(deployment: Answer) -> list[tuple[str, Any]]:
    """Returns a deployment as rows of a table, without its long values."""
    rows = [
        (key, readable(key, value))
        for key, value in flatten(deployment).items()
        if key not in {"mixture", "noise", "counts", "spend"}
    ]
    estimate = deployment.get("value_estimate") or {}
    return rows + [(f"value_estimate.{key}", value) for key, value in estimate.items()]


def _next_step(run: str, network: Path, url: str | None, *, last: bool) -> str:
    """Returns the sentence that tells where to find a deployment's later results.

    ``last``: the run ends with this deployment. Then the network of ``riffle up`` may end, too.
    This command cannot tell whether ``riffle up`` created the run, so the sentence may name both
    the folder of ``riffle up`` and ``riffle show``.
    """
    words = ["riffle", "show", run, "--network", str(network)]
    show = shlex.join(words + ([] if url is None else ["--coordinator-url", url]))
    if not last:
        return f"once it is counted, {show} has the best value so far; --wait waits for it"
    where, folder = f"{show} has its result", network.parent
    if is_locked(folder):  # a command keeps the network up and writes results here
        where = (
            f"riffle up's own run writes its results into {folder} and, without --keep, ends the "
            f"network too; of any other, {show} has the result"
        )
    return f"these are the run's last episodes: once they are counted it ends; {where}"


def _read_policies(text: str) -> Answer:
    """Reads --policy (JSON, or a file of JSON) as the fields of a deployment."""
    source = text if text.lstrip().startswith(("[", "{")) else Path(text).read_bytes()
    try:
        document = json.loads(source)
    except (ValueError, RecursionError) as error:
        raise LocalError("invalid-spec", f"--policy is not JSON: {error}") from error
    if isinstance(document, list):
        return {"policy": document}
    names = document.keys() if isinstance(document, dict) else set()
    fields = {"policy", "policies", "probabilities"} & names
    if not fields:
        raise LocalError("invalid-spec", "--policy has neither policy nor policies")
    return {name: document[name] for name in fields}
