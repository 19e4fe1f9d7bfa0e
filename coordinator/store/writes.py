"""Parts of the store's transactions. Each runs inside its caller's transaction."""

import json
from dataclasses import asdict

from sqlalchemy import Connection, bindparam, delete, func, insert, select, update

from riffle.common.protocol.errors import LocalError, RemoteError
from riffle.common.server.database import notify
from riffle.coordinator.batches.analyzer import OpenedBatch
from riffle.coordinator.batches.issue import Issue
from riffle.coordinator.batches.ledger import refuse_beyond
from riffle.coordinator.learning.learner import json_float, to_json
from riffle.coordinator.specs import RunSpec, TrueValueSpec
from riffle.coordinator.states import DEPLOYMENT, RUN, UNSETTLED, DeploymentEvent, RunEvent, after
from riffle.coordinator.store import schema
from riffle.coordinator.store.events import Event
from riffle.coordinator.store.queries import read_deployment, read_run
from riffle.coordinator.store.records import DeploymentRecord, RunRecord, Settlement, pack

_runs, _deployments, _events = schema.runs, schema.deployments, schema.events

LAST_EVENT = select(func.max(_events.c.id)).where(_events.c.run_id == bindparam("run_id"))
UPDATE = update(_deployments).where(
    # If a parameter had a column's name, its value would be written to that column.
    _deployments.c.run_id == bindparam("of_run"),
    _deployments.c["index"] == bindparam("at"),
)


def add_event(connection: Connection, run_id: str, now: float, event: Event) -> None:
    """Writes an event, numbered after the run's last one, and notifies the replicas."""
    kind, data = event
    last = connection.scalar(LAST_EVENT, {"run_id": run_id})
    row = {"run_id": run_id, "id": (last or 0) + 1, "kind": kind, "at": now}
    connection.execute(insert(_events), row | {"data": json.dumps(data)})
    notify(connection, run_id)


def end_run(
    connection: Connection, run_id: str, event: RunEvent, now: float, message: str = ""
) -> None:
    """Ends a run and writes the event of its end.

    Raises LocalError ``wrong-state`` if the run is over.
    """
    state = after(RUN, read_run(connection, run_id).state, event)
    row = {"state": state, "message": message, "ended_at": now, "trouble": ""}
    connection.execute(update(_runs).where(_runs.c.id == run_id).values(row))
    ends: dict[RunEvent, Event] = {
        "finish": ("run_finished", {}),
        "fail": ("run_failed", {"message": message}),
        "stop": ("run_stopped", {}),
    }
    add_event(connection, run_id, now, ends[event])


# -- deployments ---------------------------------------------------------------------------------


def add_deployment(
    connection: Connection,
    run_id: str,
    spec: RunSpec,
    issue: Issue,
    active_key: str | None,
    now: float,
) -> None:
    """Records an issued deployment, after two checks in the same transaction.

    ``active_key`` is the analyzer's active public key, or None if any key is allowed. Raises
    LocalError ``budget-exceeded`` if the batch would spend more than the run may. Raises LocalError
    ``unavailable`` if the batch's key was replaced after the descriptor was made.
    """
    if active_key is not None and issue.descriptor.analyzer_key != active_key:
        raise LocalError(
            "unavailable", "the analyzer's key was replaced while a batch was issued; try again"
        )
    refuse_beyond(spec.budget, issue.spend, seeded=spec.test_seed is not None)
    deployment, descriptor = issue.deployment, issue.descriptor
    wanted = {
        "index": issue.index,
        "step": issue.step,
        "stage": deployment.stage,
        "purpose": deployment.purpose,
        "n": deployment.n,
        "layer": deployment.layer,
    }
    row = {
        "run_id": run_id,
        "batch_id": descriptor.batch_id,
        "descriptor": issue.data,
        "state": "issued",
        "acknowledged": False,
        "episodes_executed": 0,
        "issued_at": now,
        "timings": "{}",
    }
    connection.execute(insert(_deployments), row | wanted)
    size = {"policies": len(descriptor.policies), "messages": descriptor.padding.messages}
    add_event(connection, run_id, now, ("deployment_issued", {**wanted, **size}))


def check_manual(run: RunRecord, rows: list[DeploymentRecord], issue: Issue) -> None:
    """Raises RemoteError ``wrong-state`` unless a manual deployment may be issued now."""
    if run.state != "running":
        raise RemoteError("wrong-state", f"run {run.id} is {run.state}")
    if rows and rows[-1].state in UNSETTLED:
        raise RemoteError(
            "wrong-state", f"deployment {rows[-1].index} is {rows[-1].state}; wait until it is over"
        )
    if issue.index != len(rows):
        raise RemoteError("wrong-state", "another deployment was issued meanwhile; ask again")
    used = sum(row.executed for row in rows)
    if used + issue.deployment.n > run.spec.episodes:
        raise RemoteError(
            "wrong-state",
            f"{used} of {run.spec.episodes} episodes were executed, also for batches that were not "
            f"counted; {issue.deployment.n} more are too many",
        )


def move_deployment(
    connection: Connection, run_id: str, index: int, event: DeploymentEvent, **values: object
) -> DeploymentRecord:
    """Moves a deployment to its state after ``event``, sets ``values``, and returns the old row.

    Raises LocalError ``wrong-state`` if the event is not possible in the deployment's state.
    """
    row = read_deployment(connection, run_id, index)
    state = after(DEPLOYMENT, row.state, event)
    connection.execute(UPDATE, {"of_run": run_id, "at": index, "state": state, **values})
    return row


# -- opened batches ------------------------------------------------------------------------------


def add_released(connection: Connection, run_id: str, index: int, opened: OpenedBatch) -> None:
    """Stores an opened batch's counts until the batch is settled."""
    row = asdict(opened) | {"histogram": pack(opened.histogram), "named": json.dumps(opened.named)}
    connection.execute(insert(schema.released), {"run_id": run_id, "index": index, **row})


def add_settlement(connection: Connection, run_id: str, settlement: Settlement, now: float) -> None:
    """Records a settled batch: spend, counts, stage result, learner's summary, and the event."""
    index, opened, spend = settlement.index, settlement.opened, settlement.spend
    row = move_deployment(
        connection,
        run_id,
        index,
        settlement.event,
        settled_at=now,
        messages_sha256=opened.messages_sha256,
        named=json.dumps(opened.named) if opened.named else None,
        timings=json.dumps(dict(settlement.timings)),
    )
    released = schema.released.c
    settled = (released.run_id == run_id) & (released["index"] == index)
    connection.execute(delete(schema.released).where(settled))
    counts = {"messages": opened.opened + opened.failed, "failed": opened.failed}
    check = {} if settlement.check is None else asdict(settlement.check)
    entry = asdict(spend) | counts | {"opened": opened.opened, "recorded_at": now} | check
    connection.execute(insert(schema.ledger), {"run_id": run_id, "index": index, **entry})
    data = {
        "index": index,
        "n": row.n,
        **counts,
        "epsilon": json_float(spend.epsilon_upper),
        "beta": spend.beta,
        "dishonest": spend.dishonest,
    }
    if settlement.check is not None:
        data |= check | {"suspicious": settlement.check.suspicious}
    if settlement.event == "reject":
        add_event(connection, run_id, now, ("batch_rejected", data))
        return
    if settlement.estimate is not None:
        data |= {"value": settlement.estimate.value, "radius": settlement.estimate.radius}
    add_event(connection, run_id, now, ("batch_counted", data))
    _add_counts(connection, run_id, settlement, now)


def _add_counts(connection: Connection, run_id: str, settlement: Settlement, now: float) -> None:
    key = {"run_id": run_id, "index": settlement.index}
    histogram = {"histogram": pack(settlement.opened.histogram)}
    connection.execute(insert(schema.counts), key | histogram)
    if settlement.stage is not None:
        result = to_json(settlement.stage)
        connection.execute(insert(schema.stages), key | {"result": result})
        add_event(connection, run_id, now, ("stage_finished", json.loads(result)))
    if settlement.summary is not None:
        summary = to_json(settlement.summary)
        connection.execute(update(_runs).where(_runs.c.id == run_id).values(summary=summary))


def add_true_values(connection: Connection, run_id: str, supplied: TrueValueSpec) -> None:
    """Adds the true values that are not recorded yet.

    Raises RemoteError ``unknown-deployment``, or ``wrong-state`` if a value contradicts a record.
    """
    table, missing = schema.true_values, {each.deployment: each.value for each in supplied.values}
    query = select(_deployments.c["index"]).where(_deployments.c.run_id == run_id)
    unknown = missing.keys() - set(connection.execute(query).scalars())
    if unknown:
        raise RemoteError("unknown-deployment", f"run {run_id} has no deployment {min(unknown)}")
    recorded = connection.execute(select(table).where(table.c.run_id == run_id)).all()
    for _, index, optimal, value in recorded:
        if (optimal, missing.pop(index, value)) != (supplied.optimal_value, value):
            raise RemoteError("wrong-state", f"deployment {index} has another true value already")
    rows = [
        {"run_id": run_id, "index": index, "optimal": supplied.optimal_value, "value": value}
        for index, value in missing.items()
    ]
    if rows:
        connection.execute(insert(table), rows)
