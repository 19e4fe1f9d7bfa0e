"""The coordinator's durable state. Every public method is one transaction.

Those of a driver take its lease and are refused when another replica drives its run by then.

Validate first, then change: a method checks states (`coordinator.states`), budget and conflicts
inside its transaction and raises before it writes. Methods block; callers run them in threads.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection, Select, case, func, insert, select
from sqlalchemy.exc import SQLAlchemyError

from riffle.common.mechanism.counters import Ints
from riffle.common.process.tracing import in_span
from riffle.common.protocol.errors import LocalError, RemoteError
from riffle.common.server.database import is_shared, listen, notify, writer
from riffle.coordinator.batches.issue import Issue
from riffle.coordinator.learning.true_values import TrueRow
from riffle.coordinator.metrics import Census
from riffle.coordinator.specs import RunSpec, Truth
from riffle.coordinator.states import UNSETTLED
from riffle.coordinator.store import changes, leases, schema
from riffle.coordinator.store.events import STOPPED, Event
from riffle.coordinator.store.leases import RunLease
from riffle.coordinator.store.records import (
    DeploymentRecord,
    EventRecord,
    LedgerRecord,
    Released,
    RunRecord,
    Settlement,
    Tally,
    Timings,
    census,
    deployment_record,
    executed,
    ledger_record,
    run_record,
    unpack,
)

_runs, _deployments = schema.runs, schema.deployments


class Store:
    """Runs, deployments, counts, ledger, stages, events. New batches are sealed to ``active()``.

    ``shared``: other processes may write to it.
    """

    def __init__(self, url: str, active: Callable[[], str] | None = None) -> None:
        self._active = active
        self._engine = schema.open_store(url)
        self.shared = is_shared(self._engine)
        self._writer = writer(self._engine)

    def close(self) -> None:
        """Close all connections."""
        self._engine.dispose()

    async def listen(self, heard: Callable[[str], None]) -> None:
        """Pass on what any replica changes, for ever; see `common.server.statements`."""
        await listen(self._engine, heard)

    def check(self) -> None:
        """Raise LocalError ``unavailable`` unless the database can be written."""
        try:
            with self._writer.begin() as connection:
                connection.execute(select(schema.meta))
        except SQLAlchemyError as error:
            reason = str(error).splitlines()[0]
            raise LocalError("unavailable", f"the store cannot be used: {reason}") from error

    # -- reading ---------------------------------------------------------------------------------

    def runs(self) -> list[RunRecord]:
        """All runs, oldest first."""
        query = select(_runs).order_by(_runs.c.created_at, _runs.c.id)
        with self._engine.connect() as connection:
            return [run_record(row) for row in connection.execute(query)]

    def tallies(self, run_id: str | None = None) -> dict[str, Tally]:
        """How far every run (or this one) is that has deployments, without reading them."""
        columns = _deployments.c
        counted = func.sum(case((columns.state == "counted", columns.n), else_=0))
        query = select(columns.run_id, func.count(), counted).group_by(columns.run_id)
        if run_id is not None:
            query = query.where(columns.run_id == run_id)
        with self._engine.connect() as connection:
            return {row[0]: Tally(row[1], int(row[2])) for row in connection.execute(query)}

    def run(self, run_id: str) -> RunRecord:
        """One run.

        Raises:
            RemoteError: ``unknown-run``.
        """
        with self._engine.connect() as connection:
            return changes.find_run(connection, run_id)

    def deployments(self, run_id: str) -> list[DeploymentRecord]:
        """A run's deployments in order; a run that does not exist has none."""
        with self._engine.connect() as connection:
            return _list(connection, run_id)

    def newest(self, run_id: str) -> DeploymentRecord | None:
        """A run's deployment of the highest index."""
        with self._engine.connect() as connection:
            return _first(connection, schema.NEWEST, run_id)

    def next_work(self, run_id: str) -> tuple[RunRecord, DeploymentRecord | None]:
        """A run and its first deployment that needs a step, if any."""
        with self._engine.connect() as connection:
            row = _first(connection, schema.NEXT_WORK, run_id)
            return changes.find_run(connection, run_id), row

    def histograms(self, run_id: str) -> dict[int, Ints]:
        """Counted histograms of a run by deployment index."""
        with self._engine.connect() as connection:
            rows = connection.execute(schema.COUNTS, {"run_id": run_id})
            return {row._mapping["index"]: unpack(row.histogram) for row in rows}

    def ledger(self, run_id: str) -> list[LedgerRecord]:
        """What was spent, batch by batch."""
        with self._engine.connect() as connection:
            rows = connection.execute(schema.LEDGER, {"run_id": run_id})
            return [ledger_record(row) for row in rows]

    def stages(self, run_id: str) -> list[dict[str, Any]]:
        """Stage results in order, each with the deployment that ended it."""
        with self._engine.connect() as connection:
            rows = connection.execute(schema.STAGES, {"run_id": run_id})
            return [{"deployment": r._mapping["index"], **json.loads(r.result)} for r in rows]

    def events(self, run_id: str, after: int = 0) -> list[EventRecord]:
        """Events of a run with a number above ``after``."""
        with self._engine.connect() as connection:
            rows = connection.execute(schema.EVENTS, {"run_id": run_id, "after": after})
            return [EventRecord(r.id, r.kind, r.at, json.loads(r.data)) for r in rows]

    def census(self) -> Census:
        """What the store holds, for the metrics."""
        with self._engine.connect() as connection:
            return census(connection)

    def with_work(self) -> list[str]:
        """Runs that go on, or that left a batch at the shuffler to be settled."""
        with self._engine.connect() as connection:
            return sorted(connection.execute(schema.WITH_WORK).scalars())

    def unsettled(self) -> list[bytes]:
        """Descriptors, as bytes, of all batches that are still to be opened."""
        query = select(_deployments.c.descriptor).where(_deployments.c.state.in_(UNSETTLED))
        with self._engine.connect() as connection:
            return list(connection.execute(query).scalars())

    def needing_keys(self) -> list[bytes]:
        """Descriptors, as bytes, of all batches that are not over and acknowledged.

        An expired key that none of them names will never be needed: who issues a batch looks under
        the writing lock whether its key is active, so who saw it active has committed by now.
        """
        with self._writer.begin() as connection:
            return list(connection.execute(schema.NEEDING_KEYS).scalars())

    # -- who drives ------------------------------------------------------------------------------

    def take(self, holder: str, now: float, until: float, *, start: bool) -> list[RunLease]:
        """Leases of runs with work that nobody drives; see `coordinator.store.leases.take`."""
        with self._writer.begin() as connection:
            return leases.take(connection, schema.WITH_WORK, holder, now, until, start=start)

    def hold(self, held: Sequence[RunLease], until: float) -> list[RunLease]:
        """Hold leases until another time; returns those that others have taken."""
        if not held:
            return []
        with self._writer.begin() as connection:
            return leases.hold(connection, held, until)

    @contextmanager
    def _driving(self, lease: RunLease) -> Iterator[Connection]:
        """A transaction of a run's driver; raises LeaseLostError when it is that no more."""
        with self._writer.begin() as connection:
            leases.check(connection, lease)
            yield connection

    def _issue(
        self, connection: Connection, run_id: str, spec: RunSpec, issued: Issue, now: float
    ) -> None:
        """Record a deployment; raises as `changes.check_key` and `changes.issue`."""
        if self._active is not None:
            changes.check_key(issued, self._active())
        changes.issue(connection, run_id, spec, issued, now)

    # -- a run -----------------------------------------------------------------------------------

    def create_run(
        self, run_id: str, spec: RunSpec, first: Issue | None, now: float, holder: str, until: float
    ) -> RunLease | None:
        """Record a run with its first deployment; None when the same run is there already.

        ``holder`` drives it until ``until`` at first.

        Raises:
            RemoteError: ``wrong-state``, when the id has another spec.
            LocalError: ``budget-exceeded``; ``unavailable`` (`changes.check_key`).
        """
        values = {"spec": spec.model_dump_json(), "state": "running", "message": ""}
        with self._writer.begin() as connection:
            known = connection.execute(select(_runs.c.spec).where(_runs.c.id == run_id)).scalar()
            if known is not None:
                if known != values["spec"]:
                    raise RemoteError("wrong-state", f"run {run_id} exists with another spec")
                return None
            connection.execute(insert(_runs), {"id": run_id, "created_at": now, **values})
            started: Event = ("run_started", {"name": spec.name, "learner": spec.learner})
            changes.tell(connection, run_id, now, started)
            if first is not None:
                self._issue(connection, run_id, spec, first, now)
            return leases.grant(connection, run_id, holder, until)

    def issue_manual(self, run_id: str, issue: Issue, now: float) -> DeploymentRecord:
        """Record a deployment asked for by hand.

        Raises:
            RemoteError: ``wrong-state`` when the run is over, another deployment is under way or
                the run's episodes are used up.
            LocalError: ``budget-exceeded``; ``unavailable`` (`changes.check_key`).
        """
        with self._writer.begin() as connection:
            run, rows = changes.find_run(connection, run_id), _list(connection, run_id)
            changes.check_manual(run, rows, issue)
            self._issue(connection, run_id, run.spec, issue, now)
            return changes.find(connection, run_id, issue.index)

    def stop(self, run_id: str, now: float) -> None:
        """Stop a run, whoever drives it; its batches are settled afterwards.

        Raises:
            LocalError: ``wrong-state``, when the run is over.
        """
        with self._writer.begin() as connection:
            changes.end(connection, run_id, "stopped", "", now)
            notify(connection, STOPPED + run_id)

    # -- an operator's annotation ----------------------------------------------------------------

    def supply(self, run_id: str, truth: Truth) -> None:
        """Keep true values of deployments; those that are there already are left as they are.

        Raises:
            RemoteError: ``unknown-run``, ``unknown-deployment``; ``wrong-state`` when other values
                were supplied before.
        """
        with self._writer.begin() as connection:
            changes.find_run(connection, run_id)
            changes.supply(connection, run_id, truth)

    def truths(self, run_ids: Sequence[str]) -> dict[str, list[TrueRow]]:
        """True values of runs' deployments in order, where they were supplied."""
        found: dict[str, list[TrueRow]] = {run_id: [] for run_id in run_ids}
        table, columns = schema.truths, _deployments.c
        same = (table.c.run_id == columns.run_id) & (table.c["index"] == columns["index"])
        query = (
            select(table, columns.n, columns.state, columns.episodes_executed)
            .where(same, table.c.run_id.in_(run_ids))
            .order_by(table.c.run_id, table.c["index"])
        )
        with self._engine.connect() as connection:
            for run_id, index, optimal, value, n, state, episodes in connection.execute(query):
                count = executed(state, n, episodes)
                found[run_id].append(TrueRow(index, count, optimal, value))
        return found

    # -- what drivers do -------------------------------------------------------------------------

    def fail(self, lease: RunLease, message: str, now: float) -> None:
        """Fail a run; its batches are settled afterwards.

        Raises:
            LocalError: ``wrong-state``, when the run is over.
        """
        with self._driving(lease) as connection:
            changes.end(connection, lease.run_id, "failed", message, now)

    def opened(self, lease: RunLease, index: int, now: float) -> None:
        """The shuffler has the descriptor."""
        with self._driving(lease) as connection:
            changes.move(connection, lease.run_id, index, "open", opened_at=now)

    def sealed(
        self, lease: RunLease, index: int, episodes: int, timings: Timings, now: float
    ) -> None:
        """The batch holds n distinct reports; ``episodes`` were executed for it."""
        values = {"episodes_executed": episodes, "timings": json.dumps(dict(timings))}
        with self._driving(lease) as connection:
            row = changes.move(connection, lease.run_id, index, "sealed", **values)
            event: Event = ("batch_sealed", {"index": index, "n": row.n, "episodes": episodes})
            changes.tell(connection, lease.run_id, now, event)

    def released(self, run_id: str, index: int) -> Released | None:
        """What `release` committed of a batch that is not settled yet."""
        with self._engine.connect() as connection:
            return changes.released(connection, run_id, index)

    def release(self, lease: RunLease, index: int, drawn: Released) -> Released:
        """Commit a batch's counts with the coordinator's own noise; returns what is committed.

        Privacy of the central workflow rests on this line of events: noise is drawn, committed
        here, and only then seen by the learner, its errors, the log or anybody. Two draws on the
        same counts would spend epsilon twice, so the first one committed is the only one that is
        ever used: a crash before the commit loses a draw that nobody saw, after it the draw is
        found again, and of two coordinators that count the same batch one is told the other's.
        """
        with self._driving(lease) as connection:
            kept = changes.released(connection, lease.run_id, index)
            if kept is None:
                changes.release(connection, lease.run_id, index, drawn)
            return kept or drawn

    @in_span("store")
    def settle(self, lease: RunLease, settlement: Settlement, now: float) -> None:
        """Commit spend, counts, stage result, next deployment and events together.

        Raises:
            LocalError: ``wrong-state`` when the batch is settled already or the run is over;
                ``budget-exceeded`` when the next deployment may not be issued. Nothing is changed.
        """
        with self._driving(lease) as connection:
            run = changes.find_run(connection, lease.run_id)
            if settlement.goes_on and run.state != "running":
                raise LocalError("wrong-state", f"run {lease.run_id} is {run.state}")
            changes.record(connection, lease.run_id, settlement, now)
            if settlement.following is not None:
                self._issue(connection, lease.run_id, run.spec, settlement.following, now)
            elif settlement.failure is not None:
                changes.end(connection, lease.run_id, "failed", settlement.failure, now)
            elif settlement.finished:
                changes.end(connection, lease.run_id, "finished", "", now)

    def abandoned(
        self,
        lease: RunLease,
        index: int,
        episodes: int,
        now: float,
        *,
        again: Issue | None = None,
        failure: str | None = None,
    ) -> None:
        """The batch was given up or lost before it was counted; issue it again, or fail the run."""
        values = {"episodes_executed": episodes, "settled_at": now}
        with self._driving(lease) as connection:
            changes.move(connection, lease.run_id, index, "abandoned", **values)
            event: Event = ("batch_abandoned", {"index": index, "episodes": episodes})
            changes.tell(connection, lease.run_id, now, event)
            if again is not None:
                run = changes.find_run(connection, lease.run_id)
                self._issue(connection, lease.run_id, run.spec, again, now)
            elif failure is not None:
                changes.end(connection, lease.run_id, "failed", failure, now)

    def acknowledged(self, lease: RunLease, index: int, timings: Timings) -> None:
        """The shuffler knows that the batch is settled."""
        values = {"acknowledged": True, "timings": json.dumps(dict(timings))}
        with self._driving(lease) as connection:
            changes.change(connection, lease.run_id, index, **values)


def _list(connection: Connection, run_id: str) -> list[DeploymentRecord]:
    rows = connection.execute(schema.DEPLOYMENTS, {"run_id": run_id})
    return [deployment_record(row) for row in rows]


def _first(connection: Connection, query: Select[Any], run_id: str) -> DeploymentRecord | None:
    row = connection.execute(query, {"run_id": run_id}).first()
    return None if row is None else deployment_record(row)
