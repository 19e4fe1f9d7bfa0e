"""Reports into the store, exactly once, and the seal.

All of an upload is one transaction: outcomes are decided, reports stored, users marked and, when
the n-th distinct report is among them, the batch sealed. A user is marked in the same transaction
that stores its report, so no crash lies between the two.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, bindparam, distinct, func, insert, select, update

from common.errors import LocalError
from common.statements import execute_rows, is_one_of, unindexed
from common.wire import UploadReply, UploadResult
from shuffler import leasing, store
from shuffler import nodes as enrolled
from shuffler.rules import Frame, LeaseView, closed_problem, judge_frame
from shuffler.schema import batches, leases, reports, users

_HELD = select(*leasing.VIEW).where(
    is_one_of(leases.c.lease, "sent"),
    unindexed(leases.c.batch_id) == bindparam("batch"),
    leases.c.node_id == bindparam("node"),
)
_REPORTED = (
    select(users.c.user, users.c.reported).where(is_one_of(users.c.user, "asked")).with_for_update()
)
_STORE = insert(reports)
_NOTE = (
    update(leases)
    .where(leases.c.lease == bindparam("key"))
    .values(report_sha256=bindparam("sha256"))
)
_MARK = update(users).where(is_one_of(users.c.user, "asked")).values(reported=True)
_GROW = (
    update(batches)
    .where(batches.c.batch_id == bindparam("batch"))
    .values(reports=batches.c.reports + bindparam("more"))
)


@dataclass(frozen=True, slots=True)
class Stored:
    """The answer to an upload, and whether it sealed the batch."""

    reply: UploadReply
    sealed: bool


def upload(
    connection: Connection, batch_id: str, node_id: str, frames: Sequence[Frame], now: int
) -> Stored:
    """Store what is accepted of ``frames``; count the rest by reason.

    Raises:
        RemoteError: ``unauthorized`` for a revoked node, ``unknown-batch``.
    """
    enrolled.lock(connection, node_id)
    batch = store.find(connection, batch_id, lock=True)
    held = _held(connection, batch_id, node_id, frames)
    reported = _reported(connection, held)
    accepting = closed_problem(batch.state, batch.expires_at, now) is None
    results: list[UploadResult] = []
    accepted: dict[str, Frame] = {}
    for frame in frames:
        lease = held.get(frame.lease)
        outcome = judge_frame(
            frame,
            lease,
            reported=lease is not None and lease.user in reported,
            accepting=accepting,
            now=now,
        )
        if outcome == "accepted" and lease is not None:
            accepted[frame.lease] = frame
            held[frame.lease] = lease.reported(frame.sha256)
            reported.add(lease.user)
        results.append(UploadResult(lease=frame.lease, outcome=outcome))
    _write(connection, batch, held, accepted)
    store.count_dropped(connection, batch_id, _not_accepted(results))
    sealed = _seal_if_full(connection, batch, len(accepted))
    return Stored(UploadReply(results=tuple(results)), sealed)


def _held(
    connection: Connection, batch_id: str, node_id: str, frames: Sequence[Frame]
) -> dict[str, LeaseView]:
    sent = [frame.lease for frame in frames]
    rows = connection.execute(_HELD, {"sent": sent, "batch": batch_id, "node": node_id})
    return {row.lease: LeaseView(*row) for row in rows}


def _reported(connection: Connection, held: dict[str, LeaseView]) -> set[str]:
    """Users of these leases who have reported, in whatever batch; locked until the end."""
    asked = [lease.user for lease in held.values()]
    return {user for user, reported in connection.execute(_REPORTED, {"asked": asked}) if reported}


def _write(
    connection: Connection,
    batch: store.Batch,
    held: dict[str, LeaseView],
    accepted: dict[str, Frame],
) -> None:
    if not accepted:
        return
    rows = [(held[lease], frame) for lease, frame in accepted.items()]
    stored = [(batch.batch_id, lease.slot, frame.sealed) for lease, frame in rows]
    execute_rows(connection, _STORE, ("batch_id", "slot", "sealed"), stored)
    noted = [(frame.sha256, lease.lease) for lease, frame in rows]
    execute_rows(connection, _NOTE, ("sha256", "key"), noted)
    connection.execute(_MARK, {"asked": [lease.user for lease, _ in rows]})
    connection.execute(_GROW, {"batch": batch.batch_id, "more": len(rows)})


def _not_accepted(results: Sequence[UploadResult]) -> dict[str, int]:
    return dict(Counter(result.outcome for result in results if result.outcome != "accepted"))


def _seal_if_full(connection: Connection, batch: store.Batch, added: int) -> bool:
    """Seal when the batch holds n reports of n distinct users, counted here and now.

    The running count only says when to count. What releases a batch is this count over stored
    rows: noise was calibrated for n people, and fewer behind n reports would get less of it.
    """
    if not added or batch.reports + added < batch.n:
        return False
    people = connection.scalar(
        select(func.count(distinct(leases.c.user)))
        .join(
            reports, (reports.c.batch_id == leases.c.batch_id) & (reports.c.slot == leases.c.slot)
        )
        .where(leases.c.batch_id == batch.batch_id, leases.c.report_sha256.is_not(None))
    )
    stored = store.count_stored(connection, batch.batch_id)
    if people != batch.n or stored != batch.n:
        raise LocalError("internal", "stored reports and distinct users disagree; not sealed")
    store.transition(connection, batch, "fill")
    return True
