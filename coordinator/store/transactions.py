"""The coordinator's durable state: every method that changes it is one transaction.

A method checks states (`coordinator.states`), budget and conflicts inside its transaction, and
raises before it writes. Methods block; callers run them in threads.

Run leases. Only one replica at a time drives a run. A lease has a fence: a number that grows by one
whenever a holder takes the run. Every transaction of a driver first checks the fence. So a driver
cannot change the store after another holder has taken the run. Until then, the driver may write and
renew the lease, even if the lease's time is over. A late driver's calls to the shuffler may still
arrive, but a repeated call does no harm. Safety does not depend on clocks.
"""

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from sqlalchemy import Connection, bindparam, insert, select, true, update
from sqlalchemy.exc import SQLAlchemyError

from riffle.common.process.tracing import span
from riffle.common.protocol.errors import LocalError, RemoteError
from riffle.common.server.database import Head, listen, notify
from riffle.coordinator.batches.analyzer import OpenedBatch
from riffle.coordinator.batches.issue import Issue
from riffle.coordinator.metrics import JOURNAL
from riffle.coordinator.specs import RunSpec, TrueValueSpec
from riffle.coordinator.store import queries, schema, writes
from riffle.coordinator.store.events import STOPPED, Event
from riffle.coordinator.store.records import (
    DeploymentRecord,
    LeaseLostError,
    NextStep,
    RunLease,
    Settlement,
    Timings,
)

_runs, _leases = schema.runs, schema.run_leases

FENCE = select(_leases.c.fence).where(_leases.c.run_id == bindparam("run_id")).with_for_update()


class Store(queries.Queries):
    """The reads of `Queries`, and all transactions that write.

    ``active_key`` returns the public key to which new batches must be sealed. By default, any key
    is allowed.
    """

    def __init__(self, url: str, head: Head, active_key: Callable[[], str] | None = None) -> None:
        super().__init__(url, head)
        self._head = head
        self._active_key = active_key
        if head.older_accepted:
            JOURNAL.note("older-store-accepted", logging.ERROR)

    async def listen(self, on_change: Callable[[str], None]) -> None:
        """Calls ``on_change`` with all notifications, as `common.server.database.listen` does."""
        await listen(self._engine, on_change, JOURNAL)

    def check(self) -> None:
        """Raises LocalError ``unavailable`` if the database cannot be written."""
        try:
            with self._for_good():
                pass
        except SQLAlchemyError as error:
            raise store_error(error) from error

    # -- runs, as callers change them ------------------------------------------------------------

    def create_run(
        self, run_id: str, spec: RunSpec, first: Issue | None, now: float, holder: str, until: float
    ) -> RunLease | None:
        """Records a run with its first deployment, and leases it to ``holder`` until ``until``.

        Returns the lease, or None if the same run exists already. Raises RemoteError
        ``wrong-state`` if a run with this id has another spec. Also raises the LocalErrors of
        `writes.add_deployment`.
        """
        row = {"spec": spec.model_dump_json(), "state": "running", "message": "", "trouble": ""}
        with self._for_good() as connection:
            known = connection.execute(select(_runs.c.spec).where(_runs.c.id == run_id)).scalar()
            if known is not None:
                if known != row["spec"]:
                    raise RemoteError("wrong-state", f"run {run_id} exists with another spec")
                return None
            connection.execute(insert(_runs), {"id": run_id, "created_at": now, **row})
            started: Event = ("run_started", {"name": spec.name, "learner": spec.learner})
            writes.add_event(connection, run_id, now, started)
            if first is not None:
                self._add_deployment(connection, run_id, spec, first, now)
            lease = {"run_id": run_id, "holder": holder, "until": until, "fence": 1}
            connection.execute(insert(_leases).values(lease))
            return RunLease(run_id, 1)

    def issue_manual(self, run_id: str, issue: Issue, now: float) -> DeploymentRecord:
        """Records a manual deployment.

        Raises RemoteError ``unknown-run``. Raises RemoteError ``wrong-state`` if the run is over,
        another deployment is under way, or too few episodes are left. Also raises the LocalErrors
        of `writes.add_deployment`.
        """
        with self._for_good() as connection:
            run = queries.read_run(connection, run_id)
            writes.check_manual(run, queries.read_deployments(connection, run_id), issue)
            self._add_deployment(connection, run_id, run.spec, issue, now)
            return queries.read_deployment(connection, run_id, issue.index)

    def stop(self, run_id: str, now: float) -> None:
        """Stops a run, whoever drives it. The driver then settles or abandons the run's batch.

        Raises LocalError ``wrong-state`` if the run is over.
        """
        with self._for_good() as connection:
            writes.end_run(connection, run_id, "stop", now)
            notify(connection, STOPPED + run_id)

    def add_true_values(self, run_id: str, supplied: TrueValueSpec) -> None:
        """Adds true values of deployments. Repeated values change nothing.

        Raises RemoteError ``unknown-run``, ``unknown-deployment``, or ``wrong-state`` if other
        values are recorded.
        """
        with self._writer.begin() as connection:
            queries.read_run(connection, run_id)
            writes.add_true_values(connection, run_id, supplied)

    # -- run leases ------------------------------------------------------------------------------

    def take_leases(self, holder: str, now: float, until: float, *, start: bool) -> list[RunLease]:
        """Gives ``holder`` the leases of all runs that have work and that nobody drives.

        With ``start``, also gives the leases that this holder still held when it last ended. A
        SQLite store belongs to one process, so there ``start`` gives all leases of runs with work.
        """
        free = _leases.c.until <= now
        if start:
            free = free | (_leases.c.holder == holder) if self.shared else true()
        query = select(_leases.c.run_id, _leases.c.fence).where(
            _leases.c.run_id.in_(queries.RUNS_WITH_WORK), free
        )
        with self._writer.begin() as connection:
            # Skips rows that another replica is taking right now.
            rows = connection.execute(query.with_for_update(skip_locked=True)).all()
            taken = [RunLease(row.run_id, row.fence + 1) for row in rows]
            for lease in taken:
                row = {"holder": holder, "until": until, "fence": lease.fence}
                change = update(_leases).where(_leases.c.run_id == lease.run_id)
                connection.execute(change.values(row))
        return taken

    def renew_leases(self, leases: Sequence[RunLease], until: float) -> list[RunLease]:
        """Sets the time when leases end (a past time releases them). Returns the lost leases."""
        if not leases:
            return []
        with self._writer.begin() as connection:
            return [
                lease
                for lease in leases
                if connection.execute(
                    update(_leases)
                    .where(_leases.c.run_id == lease.run_id, _leases.c.fence == lease.fence)
                    .values(until=until)
                ).rowcount
                == 0
            ]

    # -- the steps of a driver -------------------------------------------------------------------

    def record_deposit(self, lease: RunLease, index: int, now: float) -> None:
        """Records that the shuffler has the descriptor."""
        with self._driving(lease) as connection:
            writes.move_deployment(connection, lease.run_id, index, "deposit", opened_at=now)

    def record_seal(
        self, lease: RunLease, index: int, episodes: int, timings: Timings, now: float
    ) -> None:
        """Records that the batch holds n reports, for which ``episodes`` were executed."""
        values = {"episodes_executed": episodes, "timings": json.dumps(dict(timings))}
        with self._driving(lease) as connection:
            row = writes.move_deployment(connection, lease.run_id, index, "seal", **values)
            event: Event = ("batch_sealed", {"index": index, "n": row.n, "episodes": episodes})
            writes.add_event(connection, lease.run_id, now, event)

    def release(self, lease: RunLease, index: int, opened: OpenedBatch) -> OpenedBatch:
        """Commits a batch's counts with the coordinator's own noise; returns what is committed.

        Two draws of noise on the same counts would spend epsilon twice. So the first draw is
        committed before anything but the analyzer sees the noisy counts. After a crash, and on
        every replica, only the committed draw is used.
        """
        with self._driving(lease) as connection:
            first = queries.read_released(connection, lease.run_id, index)
            if first is None:
                writes.add_released(connection, lease.run_id, index, opened)
            return first or opened

    @span("store")
    def settle(self, lease: RunLease, settlement: Settlement, now: float) -> None:
        """Commits spend, counts, stage result, next deployment and events together.

        Raises LocalError ``wrong-state`` if the batch is settled already, or if the settlement has
        a next step although the run is over. Also raises the errors of `writes.add_deployment`.
        """
        with self._driving(lease) as connection:
            run = queries.read_run(connection, lease.run_id)
            if settlement.next != NextStep() and run.state != "running":
                raise LocalError("wrong-state", f"run {lease.run_id} is {run.state}")
            writes.add_settlement(connection, lease.run_id, settlement, now)
            self._take_step(connection, lease.run_id, settlement.next, now)

    def abandon(
        self, lease: RunLease, index: int, episodes: int, step: NextStep, now: float
    ) -> None:
        """Records that an uncounted batch was given up or lost, and takes the run's next step."""
        values = {"episodes_executed": episodes, "settled_at": now}
        with self._driving(lease) as connection:
            writes.move_deployment(connection, lease.run_id, index, "abandon", **values)
            event: Event = ("batch_abandoned", {"index": index, "episodes": episodes})
            writes.add_event(connection, lease.run_id, now, event)
            self._take_step(connection, lease.run_id, step, now)

    def record_acknowledgement(self, lease: RunLease, index: int, timings: Timings) -> None:
        """Records that the shuffler has the acknowledgement of the batch."""
        values = {"acknowledged": True, "timings": json.dumps(dict(timings)), "named": None}
        with self._driving(lease) as connection:
            writes.move_deployment(connection, lease.run_id, index, "acknowledge", **values)

    def fail(self, lease: RunLease, message: str, now: float) -> None:
        """Fails a run. The driver then settles or abandons the run's batch.

        Raises LocalError ``wrong-state`` if the run is over.
        """
        with self._driving(lease) as connection:
            writes.end_run(connection, lease.run_id, "fail", now, message)

    def record_trouble(self, lease: RunLease, trouble: str) -> None:
        """Records why a run cannot go on, so that every replica shows it. "" clears the record."""
        with self._driving(lease) as connection:
            run = update(_runs).where(_runs.c.id == lease.run_id)
            connection.execute(run.values(trouble=trouble))

    # -- parts -----------------------------------------------------------------------------------

    @contextmanager
    def _driving(self, lease: RunLease) -> Iterator[Connection]:
        """Opens a transaction of a run's driver. Until the commit, nobody else can take the run.

        Raises LeaseLostError if another replica drives the run.
        """
        with self._for_good() as connection:
            self._check_fence(connection, lease)
            yield connection

    @contextmanager
    def _for_good(self) -> Iterator[Connection]:
        """Opens a transaction that advances the head. The head later reveals an older database."""
        with self._writer.begin() as connection:
            number = self._head.advance(connection)
            yield connection
        self._head.write(number)

    def _check_fence(self, connection: Connection, lease: RunLease) -> None:
        if connection.scalar(FENCE, {"run_id": lease.run_id}) != lease.fence:
            raise LeaseLostError(lease.run_id)

    def _take_step(self, connection: Connection, run_id: str, step: NextStep, now: float) -> None:
        if step.issue is not None:
            spec = queries.read_run(connection, run_id).spec
            self._add_deployment(connection, run_id, spec, step.issue, now)
        elif step.failure is not None:
            writes.end_run(connection, run_id, "fail", now, step.failure)
        elif step.finished:
            writes.end_run(connection, run_id, "finish", now)

    def _add_deployment(
        self, connection: Connection, run_id: str, spec: RunSpec, issue: Issue, now: float
    ) -> None:
        active = None if self._active_key is None else self._active_key()
        writes.add_deployment(connection, run_id, spec, issue, active, now)


def store_error(error: SQLAlchemyError) -> LocalError:
    """Returns the error that reports a failure of the database."""
    kind = type(getattr(error, "orig", None) or error).__name__
    return LocalError("unavailable", f"the store cannot be used ({kind})")
