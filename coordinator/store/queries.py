"""Reads of the store. Only `coordinator.store.transactions` changes the store.

The statements that drivers and followers execute at every turn are built only once. Building and
compiling a statement would take three quarters of a read's time.
"""

import json
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Select, Table, bindparam, case, func, select
from sqlalchemy.sql.elements import ColumnElement

from riffle.common.mechanism.counters import Ints
from riffle.common.protocol.descriptor import parse
from riffle.common.protocol.errors import RemoteError
from riffle.common.server.database import Head, is_shared, writer
from riffle.coordinator.batches.analyzer import OpenedBatch
from riffle.coordinator.batches.counts import FALSE_ALARM
from riffle.coordinator.learning.true_values import TrueRow
from riffle.coordinator.metrics import Census
from riffle.coordinator.states import TO_ACKNOWLEDGE, UNSETTLED
from riffle.coordinator.store import schema
from riffle.coordinator.store.records import (
    DeploymentRecord,
    EventRecord,
    LedgerRecord,
    RunRecord,
    Tally,
    deployment_record,
    executed_at_most,
    ledger_record,
    run_record,
    unpack,
)

_runs, _deployments, _events = schema.runs, schema.deployments, schema.events
_spends = schema.ledger.c


def _of_run(table: Table) -> Select[Any]:
    rows = select(table).where(table.c.run_id == bindparam("run_id"))
    return rows.order_by(table.c["index"])


def _at_index(table: Table) -> Select[Any]:
    return _of_run(table).where(table.c["index"] == bindparam("index"))


def _unfinished() -> ColumnElement[bool]:
    """Returns the condition for deployments that still need a step of the run's driver."""
    state = _deployments.c.state
    to_acknowledge = state.in_(TO_ACKNOWLEDGE) & _deployments.c.acknowledged.is_(False)
    return state.in_(UNSETTLED) | to_acknowledge


RUN = select(_runs).where(_runs.c.id == bindparam("run_id"))
DEPLOYMENTS, COUNTS, LEDGER, STAGES = map(
    _of_run, (_deployments, schema.counts, schema.ledger, schema.stages)
)
DEPLOYMENT, RELEASED = _at_index(_deployments), _at_index(schema.released)
NEWEST = DEPLOYMENTS.order_by(None).order_by(_deployments.c["index"].desc()).limit(1)
NEXT_WORK = DEPLOYMENTS.where(_unfinished()).limit(1)
KEYS_IN_USE = select(_deployments.c.descriptor).where(_unfinished())
RUNS_WITH_WORK = (
    select(_runs.c.id)
    .where(_runs.c.state == "running")
    .union(select(_deployments.c.run_id).where(_unfinished()))
)
EVENTS = (
    select(_events)
    .where(_events.c.run_id == bindparam("run_id"), _events.c.id > bindparam("after"))
    .order_by(_events.c.id)
)
_SUSPICIOUS = func.count(case((_spends.chance < FALSE_ALARM, 1))).label("suspicious")
_FINITE = _spends.epsilon_upper <= sys.float_info.max
SPENT = select(
    func.sum(_spends.opened).label("opened"),
    func.sum(_spends.failed).label("failed"),
    func.max(case((_FINITE, _spends.epsilon_upper))).label("epsilon"),
    func.count(case((~_FINITE, 1))).label("seeded"),
    _SUSPICIOUS,
)


class Queries:
    """Reads runs, deployments, counts, ledger, stages, events. Its methods block the thread.

    ``shared`` says whether other processes may write to the store.
    """

    def __init__(self, url: str, head: Head) -> None:
        self._engine = schema.open_store(url, head)
        self.shared = is_shared(self._engine)
        self._writer = writer(self._engine)

    def close(self) -> None:
        """Closes all connections."""
        self._engine.dispose()

    def _rows(self, query: Select[Any], **parameters: object) -> Sequence[Any]:
        with self._engine.connect() as connection:
            return connection.execute(query, parameters).all()

    # -- runs ------------------------------------------------------------------------------------

    def runs(self) -> list[RunRecord]:
        """Returns all runs, oldest first."""
        query = select(_runs).order_by(_runs.c.created_at, _runs.c.id)
        return [run_record(row) for row in self._rows(query)]

    def run(self, run_id: str) -> RunRecord:
        """Returns one run; raises RemoteError ``unknown-run``."""
        with self._engine.connect() as connection:
            return read_run(connection, run_id)

    def tallies(self, run_id: str | None = None) -> dict[str, Tally]:
        """Returns the progress of every run that has deployments, or only of ``run_id``."""
        columns = _deployments.c
        counted = func.sum(case((columns.state == "counted", columns.n), else_=0))
        same = (_spends.run_id == columns.run_id) & (_spends["index"] == columns["index"])
        query = (
            select(columns.run_id, func.count(), counted, _SUSPICIOUS)
            .select_from(_deployments.outerjoin(schema.ledger, same))
            .group_by(columns.run_id)
        )
        if run_id is not None:
            query = query.where(columns.run_id == run_id)
        return {row[0]: Tally(row[1], int(row[2]), row[3]) for row in self._rows(query)}

    def batch_ids(self) -> set[str]:
        """Returns the ids of all batches of all runs."""
        return {row.batch_id for row in self._rows(select(_deployments.c.batch_id))}

    def next_work(self, run_id: str) -> tuple[RunRecord, DeploymentRecord | None]:
        """Returns a run and its first deployment that needs a step, if any."""
        with self._engine.connect() as connection:
            row = connection.execute(NEXT_WORK, {"run_id": run_id}).first()
            return read_run(connection, run_id), None if row is None else deployment_record(row)

    # -- deployments -----------------------------------------------------------------------------

    def deployments(self, run_id: str) -> list[DeploymentRecord]:
        """Returns a run's deployments in order; an empty list if there is no such run."""
        return [deployment_record(row) for row in self._rows(DEPLOYMENTS, run_id=run_id)]

    def newest(self, run_id: str) -> DeploymentRecord | None:
        """Returns a run's deployment with the highest index, if any."""
        rows = self._rows(NEWEST, run_id=run_id)
        return deployment_record(rows[0]) if rows else None

    def unsettled_descriptors(self) -> list[bytes]:
        """Returns the descriptors, as bytes, of all batches that are still to be opened."""
        query = select(_deployments.c.descriptor).where(_deployments.c.state.in_(UNSETTLED))
        return [row.descriptor for row in self._rows(query)]

    def keys_in_use(self) -> set[str]:
        """Returns the analyzer's public keys of all batches that still need a step.

        A batch is issued under the write lock, and only if its key is active. This read takes the
        same lock, so it sees every batch of an expired key. If an expired key is not returned, it
        is never needed again.
        """
        with self._writer.begin() as connection:
            descriptors = list(connection.execute(KEYS_IN_USE).scalars())
        return {parse(data).descriptor.analyzer_key for data in descriptors}

    def histograms(self, run_id: str) -> dict[int, Ints]:
        """Returns a run's counted histograms; the keys are indices of deployments."""
        rows = self._rows(COUNTS, run_id=run_id)
        return {row._mapping["index"]: unpack(row.histogram) for row in rows}

    def released(self, run_id: str, index: int) -> OpenedBatch | None:
        """Returns the counts that `Store.release` committed, if any; settlement deletes them."""
        with self._engine.connect() as connection:
            return read_released(connection, run_id, index)

    # -- results ---------------------------------------------------------------------------------

    def ledger(self, run_id: str) -> list[LedgerRecord]:
        """Returns a run's spends, batch by batch."""
        return [ledger_record(row) for row in self._rows(LEDGER, run_id=run_id)]

    def run_records(
        self, run_id: str
    ) -> tuple[RunRecord, list[DeploymentRecord], list[LedgerRecord]]:
        """Returns a run, its deployments and its spends, read in this order.

        Raises RemoteError ``unknown-run``.
        """
        return self.run(run_id), self.deployments(run_id), self.ledger(run_id)

    def stages(self, run_id: str) -> list[dict[str, Any]]:
        """Returns stage results in order, each with the index of the stage's last deployment."""
        rows = self._rows(STAGES, run_id=run_id)
        return [{"deployment": r._mapping["index"], **json.loads(r.result)} for r in rows]

    def events(self, run_id: str, after: int = 0) -> list[EventRecord]:
        """Returns a run's events from number ``after`` + 1 on."""
        rows = self._rows(EVENTS, run_id=run_id, after=after)
        return [EventRecord(r.id, r.kind, r.at, json.loads(r.data)) for r in rows]

    def true_values(self, run_ids: Sequence[str]) -> dict[str, list[TrueRow]]:
        """Returns the true values of each run's deployments, as an operator supplied them."""
        rows: dict[str, list[TrueRow]] = {run_id: [] for run_id in run_ids}
        table, columns = schema.true_values, _deployments.c
        same = (table.c.run_id == columns.run_id) & (table.c["index"] == columns["index"])
        query = (
            select(table, columns.n, columns.state, columns.episodes_executed)
            .where(same, table.c.run_id.in_(run_ids))
            .order_by(table.c.run_id, table.c["index"])
        )
        for run_id, index, optimal, value, n, state, reported in self._rows(query):
            episodes = executed_at_most(state, n, reported)
            rows[run_id].append(TrueRow(index, episodes, optimal, value))
        return rows

    def census(self) -> Census:
        """Counts what the store holds, for the metrics."""
        runs = select(_runs.c.state, func.count()).group_by(_runs.c.state)
        waiting = select(func.count()).where(_runs.c.trouble != "")
        batches = select(_deployments.c.state, func.count()).group_by(_deployments.c.state)
        with self._engine.connect() as connection:
            spent = connection.execute(SPENT).one()
            return Census(
                runs=Counter({row[0]: row[1] for row in connection.execute(runs)}),
                waiting=connection.execute(waiting).scalar_one(),
                batches=Counter({row[0]: row[1] for row in connection.execute(batches)}),
                opened=int(spent.opened or 0),
                failed=int(spent.failed or 0),
                epsilon=spent.epsilon or 0.0,
                seeded=spent.seeded,
                suspicious=spent.suspicious,
            )


# -- inside a transaction ------------------------------------------------------------------------


def read_run(connection: Connection, run_id: str) -> RunRecord:
    """Reads one run; raises RemoteError ``unknown-run``."""
    # PostgreSQL refuses NUL in any parameter.
    row = None if "\0" in run_id else connection.execute(RUN, {"run_id": run_id}).one_or_none()
    if row is None:
        raise RemoteError("unknown-run", f"there is no run {run_id[:32]}")
    return run_record(row)


def read_deployments(connection: Connection, run_id: str) -> list[DeploymentRecord]:
    """Reads a run's deployments in order."""
    rows = connection.execute(DEPLOYMENTS, {"run_id": run_id})
    return [deployment_record(row) for row in rows]


def read_deployment(connection: Connection, run_id: str, index: int) -> DeploymentRecord:
    """Reads a deployment, which must exist."""
    key = {"run_id": run_id, "index": index}
    return deployment_record(connection.execute(DEPLOYMENT, key).one())


def read_released(connection: Connection, run_id: str, index: int) -> OpenedBatch | None:
    """Reads the counts that `Store.release` committed, if any; settlement deletes them."""
    row = connection.execute(RELEASED, {"run_id": run_id, "index": index}).one_or_none()
    if row is None:
        return None
    histogram, named = unpack(row.histogram), tuple(json.loads(row.named))
    return OpenedBatch(histogram, row.opened, row.failed, row.messages_sha256, named)
