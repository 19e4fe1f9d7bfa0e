"""What the store's transactions are made of: one change each, inside the caller's transaction."""

import json
from dataclasses import asdict

from sqlalchemy import Connection, Table, delete, insert, select, update
from sqlalchemy.sql.elements import ColumnElement

from riffle.common.protocol.errors import LocalError, RemoteError
from riffle.common.server.database import notify
from riffle.coordinator.batches.issue import Issue
from riffle.coordinator.batches.ledger import refuse_beyond
from riffle.coordinator.learning.learner import json_float, to_json
from riffle.coordinator.specs import RunSpec, Truth
from riffle.coordinator.states import (
    UNSETTLED,
    DeploymentState,
    RunState,
    check_deployment,
    check_run,
)
from riffle.coordinator.store import schema
from riffle.coordinator.store.events import Event
from riffle.coordinator.store.records import (
    DeploymentRecord,
    Released,
    RunRecord,
    Settlement,
    deployment_record,
    pack,
    run_record,
    unpack,
)

_runs, _deployments = schema.runs, schema.deployments


def find_run(connection: Connection, run_id: str) -> RunRecord:
    """One run.

    Raises:
        RemoteError: ``unknown-run``.
    """
    # PostgreSQL takes no NUL, even to look for it.
    found = None if "\0" in run_id else connection.execute(schema.RUN, {"run_id": run_id})
    row = None if found is None else found.one_or_none()
    if row is None:
        raise RemoteError("unknown-run", f"there is no run {run_id[:32]}")
    return run_record(row)


def tell(connection: Connection, run_id: str, now: float, event: Event) -> None:
    """Write an event, numbered after the run's last one."""
    table, (kind, data) = schema.events, event
    last = connection.scalar(schema.LAST_EVENT, {"run_id": run_id})
    values = {"run_id": run_id, "id": (last or 0) + 1, "kind": kind, "at": now}
    connection.execute(insert(table), values | {"data": json.dumps(data)})
    notify(connection, run_id)


def check_key(issued: Issue, active: str) -> None:
    """Raise LocalError ``unavailable`` when the batch's key was replaced while it was planned."""
    if issued.descriptor.analyzer_key != active:
        raise LocalError(
            "unavailable", "the analyzer's key was replaced while a batch was planned; try again"
        )


def issue(connection: Connection, run_id: str, spec: RunSpec, issued: Issue, now: float) -> None:
    """Record a deployment, unless it would spend more than the run may (same transaction)."""
    refuse_beyond(spec.budget, issued.spend, seeded=spec.test_seed is not None)
    deployment, descriptor = issued.deployment, issued.descriptor
    asked = {
        "index": issued.index,
        "step": issued.step,
        "stage": deployment.stage,
        "purpose": deployment.purpose,
        "n": deployment.n,
        "layer": deployment.layer,
    }
    row = {
        "run_id": run_id,
        "batch_id": descriptor.batch_id,
        "descriptor": issued.data,
        "state": "issued",
        "acknowledged": False,
        "episodes_executed": 0,
        "issued_at": now,
        "timings": "{}",
    }
    connection.execute(insert(_deployments), row | asked)
    size = {"policies": len(descriptor.policies), "messages": descriptor.padding.messages}
    tell(connection, run_id, now, ("deployment_issued", {**asked, **size}))


def find(connection: Connection, run_id: str, index: int) -> DeploymentRecord:
    """A deployment that is there."""
    key = {"run_id": run_id, "index": index}
    return deployment_record(connection.execute(schema.DEPLOYMENT, key).one())


def change(connection: Connection, run_id: str, index: int, **values: object) -> None:
    """Change a deployment's columns."""
    connection.execute(schema.CHANGE, {"of_run": run_id, "at": index, **values})


def move(
    connection: Connection, run_id: str, index: int, to: DeploymentState, **values: object
) -> DeploymentRecord:
    """Change a deployment's state by the table of transitions."""
    row = find(connection, run_id, index)
    check_deployment(row.state, to)
    change(connection, run_id, index, state=to, **values)
    return row


def end(connection: Connection, run_id: str, to: RunState, message: str, now: float) -> None:
    """End a run by the table of transitions."""
    check_run(find_run(connection, run_id).state, to)
    values = {"state": to, "message": message, "ended_at": now}
    connection.execute(update(_runs).where(_runs.c.id == run_id).values(values))
    kinds: dict[str, Event] = {
        "finished": ("run_finished", {}),
        "failed": ("run_failed", {"message": message}),
        "stopped": ("run_stopped", {}),
    }
    tell(connection, run_id, now, kinds[to])


def released(connection: Connection, run_id: str, index: int) -> Released | None:
    """The counts of a batch whose noise was drawn here, while it is not settled."""
    key = {"run_id": run_id, "index": index}
    row = connection.execute(schema.RELEASED, key).one_or_none()
    if row is None:
        return None
    return Released(unpack(row.histogram), row.opened, row.failed, row.messages_sha256)


def release(connection: Connection, run_id: str, index: int, drawn: Released) -> None:
    """Keep them."""
    values = asdict(drawn) | {"histogram": pack(drawn.histogram)}
    connection.execute(insert(schema.released), {"run_id": run_id, "index": index, **values})


def record(connection: Connection, run_id: str, settlement: Settlement, now: float) -> None:
    """Spend, counts, stage result and learner's summary of one opened batch, with events."""
    key = {"run_id": run_id, "index": settlement.index}
    row = move(
        connection,
        run_id,
        settlement.index,
        settlement.state,
        settled_at=now,
        messages_sha256=settlement.released.messages_sha256,
        timings=json.dumps({**settlement.timings}),
    )
    connection.execute(delete(schema.released).where(_here(schema.released, run_id, row.index)))
    connection.execute(insert(schema.ledger), key | _entry(settlement, now))
    spend = settlement.spend
    data = {
        "index": settlement.index,
        "n": row.n,
        "messages": settlement.released.opened + settlement.released.failed,
        "failed": settlement.released.failed,
        "epsilon": json_float(spend.epsilon_upper),
        "beta": spend.beta,
        "dishonest": spend.dishonest,
    }
    if settlement.state == "rejected":
        tell(connection, run_id, now, ("batch_rejected", data))
        return
    if settlement.estimate is not None:
        data |= {"value": settlement.estimate.value, "radius": settlement.estimate.radius}
    tell(connection, run_id, now, ("batch_counted", data))
    _record_counts(connection, run_id, settlement, now)


def _record_counts(connection: Connection, run_id: str, settlement: Settlement, now: float) -> None:
    key = {"run_id": run_id, "index": settlement.index}
    histogram = {"histogram": pack(settlement.released.histogram)}
    connection.execute(insert(schema.counts), key | histogram)
    if settlement.stage is not None:
        result = to_json(settlement.stage)
        connection.execute(insert(schema.stages), key | {"result": result})
        tell(connection, run_id, now, ("stage_finished", json.loads(result)))
    if settlement.summary is not None:
        summary = to_json(settlement.summary)
        connection.execute(update(_runs).where(_runs.c.id == run_id).values(summary=summary))


def _entry(settlement: Settlement, now: float) -> dict[str, object]:
    spend = settlement.spend
    return {
        "epsilon_lower": spend.epsilon_lower,
        "epsilon_upper": spend.epsilon_upper,
        "beta": spend.beta,
        "dishonest": spend.dishonest,
        "within_promise": spend.within_promise,
        "messages": settlement.released.opened + settlement.released.failed,
        "opened": settlement.released.opened,
        "failed": settlement.released.failed,
        "recorded_at": now,
    }


def supply(connection: Connection, run_id: str, truth: Truth) -> None:
    """Add true values that are not there yet, unless they contradict what is."""
    table, wanted = schema.truths, {one.deployment: one.value for one in truth.values}
    query = select(_deployments.c["index"]).where(_deployments.c.run_id == run_id)
    unknown = wanted.keys() - set(connection.execute(query).scalars())
    if unknown:
        raise RemoteError("unknown-deployment", f"run {run_id} has no deployment {min(unknown)}")
    known = connection.execute(select(table).where(table.c.run_id == run_id)).all()
    for _, index, optimal, value in known:
        if (optimal, wanted.pop(index, value)) != (truth.optimal_value, value):
            raise RemoteError("wrong-state", f"deployment {index} has another true value already")
    rows = [
        {"run_id": run_id, "index": index, "optimal": truth.optimal_value, "value": value}
        for index, value in wanted.items()
    ]
    if rows:
        connection.execute(insert(table), rows)


def check_manual(run: RunRecord, rows: list[DeploymentRecord], issued: Issue) -> None:
    """Raise RemoteError ``wrong-state`` unless a deployment by hand may be issued now."""
    if run.state != "running":
        raise RemoteError("wrong-state", f"run {run.id} is {run.state}")
    if rows and rows[-1].state in UNSETTLED:
        raise RemoteError(
            "wrong-state", f"deployment {rows[-1].index} is {rows[-1].state}; wait until it is over"
        )
    if issued.index != len(rows):
        raise RemoteError("wrong-state", "another deployment was issued meanwhile; ask again")
    used = sum(row.executed for row in rows)
    if used + issued.deployment.n > run.spec.episodes:
        raise RemoteError(
            "wrong-state",
            f"{used} of {run.spec.episodes} episodes were executed, also for batches that were not "
            f"counted; {issued.deployment.n} more are too many",
        )


def _here(table: Table, run_id: str, index: int) -> ColumnElement[bool]:
    return (table.c.run_id == run_id) & (table.c["index"] == index)
