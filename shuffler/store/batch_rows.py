"""Batches in the store: deposit, state, status, hand-over, erasure.

Every function takes a connection inside a transaction; the caller commits. A function checks
everything before it changes anything, and is safe to repeat.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import sqlalchemy as sa

from riffle.common.protocol.descriptor import Context, Epoch, SignedDescriptor
from riffle.common.protocol.errors import LocalError, RemoteError
from riffle.common.protocol.hpke import LABEL_REPORT, OVERHEAD
from riffle.common.protocol.wire import DECLINE_SECONDS, BatchState, BatchStatus, OpenBatch
from riffle.common.server.database import notify, read_number, write_number
from riffle.shuffler.rules import coarse_slots
from riffle.shuffler.states import TRANSITIONS, Event, after
from riffle.shuffler.store.lease_rows import (
    LIVE,
    count_by_node,
    count_leased,
    forget_unused,
)
from riffle.shuffler.store.schema import batches, declined, dropped, lease_groups, meta, reports
from riffle.shuffler.store.users import add_failures

NEED_SECRET: tuple[BatchState, ...] = ("open", "sealed", "forwarded")


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch's row without its descriptor. ``report_bytes`` is the size of an uploaded report.

    ``word_bits`` is None if the aggregation is ``messages``. ``episode_seconds`` is 0 if the
    descriptor does not state it.
    """

    batch_id: str
    digest: bytes
    batch_key: str
    n: int
    owner_slots: int
    expires_at: int
    episode_seconds: int
    epoch_seconds: int | None
    report_bytes: int
    message_bytes: int
    word_bits: int | None
    state: BatchState
    reports: int
    next_slot: int
    messages_sha256: str | None

    @property
    def epoch(self) -> Epoch | None:
        """The epoch in which the batch's reports count."""
        return Epoch.of(self.expires_at, self.epoch_seconds)

    @property
    def L(self) -> int:
        """The number of messages in one report."""
        return (self.report_bytes - OVERHEAD) // self.message_bytes

    @property
    def report_info(self) -> bytes:
        """The HPKE ``info`` of this batch's outer seals."""
        return LABEL_REPORT + self.digest


@dataclass(frozen=True, slots=True)
class OpenBatches:
    """The batches that are open at ``now``, oldest first.

    ``next_expiry`` is when the first batch or live lease expires. No notification announces this.
    """

    batches: list[OpenBatch]
    now: int
    next_expiry: int | None

    def changes_within(self, seconds: float, lease_seconds: int) -> bool:
        """Returns whether a batch or a lease (even a new one) may expire within ``seconds``."""
        if self.next_expiry is None:
            return False
        # One second more, because the clock counts whole seconds.
        return min(self.next_expiry - self.now, lease_seconds) <= seconds + 1


_COLUMNS = [batches.c[field.name] for field in fields(Batch)]
_FIND = sa.select(*_COLUMNS).where(batches.c.batch_id == sa.bindparam("batch"))
_FIND_LOCKED = _FIND.with_for_update()

_OPEN = (
    sa.select(
        batches.c.batch_id,
        batches.c.n - batches.c.reports - sa.func.coalesce(sa.func.sum(lease_groups.c.pending), 0),
        batches.c.n,
        batches.c.expires_at,
        sa.func.min(lease_groups.c.expires_at),
    )
    .select_from(
        batches.outerjoin(lease_groups, (lease_groups.c.batch_id == batches.c.batch_id) & LIVE)
    )
    .where(batches.c.state == "open", batches.c.expires_at > sa.bindparam("now"))
    .group_by(batches.c.batch_id)
    .order_by(batches.c.deposited)
)

_SHORT = sa.and_(batches.c.state == "open", batches.c.expires_at <= sa.bindparam("now"))
_UNTAKEN = sa.and_(
    batches.c.state.in_(("sealed", "forwarded")),
    batches.c.sealed_at <= sa.bindparam("retire_before"),
)
_UNCLEAN = sa.and_(batches.c.state.in_(("acknowledged", "abandoned")), batches.c.clean.is_(False))
_DUE = sa.select(batches.c.batch_id).where(sa.or_(_SHORT, _UNTAKEN, _UNCLEAN)).limit(1)
_ENDS: tuple[tuple[Event, sa.Select[Any]], ...] = (
    ("expire", sa.select(*_COLUMNS).where(_SHORT).with_for_update()),
    ("retire", sa.select(*_COLUMNS).where(_UNTAKEN).with_for_update()),
)


def insert_batch(
    connection: sa.Connection, data: bytes, context: Context, signed: SignedDescriptor
) -> None:
    """Stores a new batch in the state ``open``."""
    d = context.descriptor
    highest = connection.scalar(sa.select(sa.func.max(batches.c.deposited)))
    connection.execute(
        sa.insert(batches).values(
            batch_id=d.batch_id,
            deposited=(highest or 0) + 1,
            descriptor=data,
            digest=context.digest,
            **signed.model_dump(exclude={"descriptor"}),
            n=d.n,
            owner_slots=d.owner_slots,
            expires_at=d.expires_at,
            episode_seconds=d.episode_seconds or 0,
            epoch_seconds=d.epoch_seconds,
            report_bytes=d.report_bytes,
            message_bytes=d.message_bytes,
            word_bits=d.word_bits,
            state="open",
        )
    )
    notify(connection, d.batch_id)


def signed_descriptor(connection: sa.Connection, batch_id: str) -> SignedDescriptor | None:
    """Returns a batch's descriptor with both signatures, or None if there is no such batch."""
    query = sa.select(*(batches.c[name] for name in SignedDescriptor.model_fields))
    row = connection.execute(query.where(batches.c.batch_id == batch_id)).mappings().one_or_none()
    if row is None:
        return None
    return SignedDescriptor(**dict(row) | {"descriptor": bytes(row["descriptor"]).decode()})


def find(connection: sa.Connection, batch_id: str, *, lock: bool = False) -> Batch:
    """Returns a batch, or raises RemoteError ``unknown-batch``.

    ``lock`` keeps other writers from the batch until the transaction ends.
    """
    query = _FIND_LOCKED if lock else _FIND
    row = connection.execute(query, {"batch": batch_id}).one_or_none()
    if row is None:
        raise RemoteError("unknown-batch", "no batch has this id here")
    return Batch(*row)


def transition(
    connection: sa.Connection, batch: Batch, event: Event, **changes: object
) -> BatchState:
    """Moves a locked batch to the state that follows an event, and returns that state.

    Stores ``changes`` with the new state. Raises the errors of `after`.
    """
    target = after(batch.state, event)
    if target != batch.state:
        notify(connection, batch.batch_id)
        changes["state"] = target
        if target == "abandoned":  # a batch that ends before the hand-over drops all its reports
            changes |= {"discarded": count_stored(connection, batch.batch_id), "ended_by": event}
        _update(connection, batch.batch_id, **changes)
    return target


def _update(connection: sa.Connection, batch_id: str, **changes: object) -> None:
    connection.execute(sa.update(batches).where(batches.c.batch_id == batch_id).values(changes))


def open_ids(connection: sa.Connection, now: int) -> list[str]:
    """Returns the ids of all batches that are open at ``now``, sorted."""
    query = sa.select(batches.c.batch_id).where(is_open(now)).order_by(batches.c.batch_id)
    return list(connection.scalars(query))


def abandon(connection: sa.Connection, batch_id: str) -> None:
    """Abandons a batch with fewer than n reports, or raises RemoteError ``wrong-state``."""
    transition(connection, find(connection, batch_id, lock=True), "abandon")


def abandon_open(connection: sa.Connection) -> None:
    """Abandons all open batches of a store that is an older copy, so none is released twice."""
    for batch_id in open_ids(connection, 0):
        abandon(connection, batch_id)


def give_up(connection: sa.Connection, batch_id: str) -> BatchState:
    """Gives up a batch that has lost its secret, unless it has been handed over or has ended.

    Returns the previous state.
    """
    batch = find(connection, batch_id, lock=True)
    if (batch.state, "lost") in TRANSITIONS:
        transition(connection, batch, "lost")
    return batch.state


def end_due(connection: sa.Connection, now: int, retention: int) -> list[tuple[str, Event]]:
    """Expires overdue batches, and retires full batches that nobody acknowledged in time.

    Returns these batches and the events that ended them.
    """
    times = {"now": now, "retire_before": now - retention}
    ended: list[tuple[str, Event]] = []
    for event, query in _ENDS:
        for batch in [Batch(*row) for row in connection.execute(query, times)]:
            transition(connection, batch, event)
            ended.append((batch.batch_id, event))
    return ended


def mark_forwarded(connection: sa.Connection, batch_id: str, sha256: str, messages: int) -> None:
    """Records the digest of a hand-over before its first byte is sent.

    Raises RemoteError if the batch is not sealed, or is over. Raises LocalError if an earlier
    hand-over of the batch had other bytes.
    """
    batch = find(connection, batch_id, lock=True)
    if batch.messages_sha256 not in (None, sha256):
        # If the analyzer got two permutations of the same reports, it could compare them.
        raise LocalError("internal", "the store or the secret changed; nothing is handed over")
    transition(connection, batch, "forward")
    if batch.messages_sha256 is None:
        _update(connection, batch_id, messages_sha256=sha256, forwarded=messages)


def acknowledge(
    connection: sa.Connection, batch_id: str, sha256: str, failed: Sequence[int] = ()
) -> None:
    """Records that the analyzer has the messages, so that the batch will be erased.

    ``failed`` has the slot of each failed message. One transaction ends the batch and adds these
    messages to their nodes' failures, so no repetition adds them again. Raises RemoteError
    ``wrong-state`` if the digest does not match, or if the batch was not handed over.
    """
    batch = find(connection, batch_id, lock=True)
    if batch.messages_sha256 is not None and batch.messages_sha256 != sha256:
        raise RemoteError("wrong-state", "the digest is not that of the messages handed over")
    if batch.state == "forwarded":
        add_failures(connection, count_by_node(connection, batch_id, failed))
    transition(connection, batch, "acknowledge")


def to_clean(connection: sa.Connection) -> list[str]:
    """Returns the ids of batches that are over but may still have a secret or reports."""
    return list(connection.scalars(sa.select(batches.c.batch_id).where(_UNCLEAN)))


def mark_clean(connection: sa.Connection, batch_id: str) -> None:
    """Records that secret and reports are gone; an acknowledged batch becomes ``erased``.

    Also deletes leases without a report, and the reasons that nodes gave for declining the batch.
    """
    batch = find(connection, batch_id, lock=True)
    if batch.state == "acknowledged":
        transition(connection, batch, "erase")
    unclean = sa.update(batches).where(batches.c.batch_id == batch_id, batches.c.clean.is_(False))
    if connection.execute(unclean.values(clean=True)).rowcount:
        forget_unused(connection, batch_id)
        connection.execute(sa.delete(declined).where(declined.c.batch_id == batch_id))


def holding_secrets(connection: sa.Connection) -> set[str]:
    """Returns the ids of the batches that still need their secret, because they are not over."""
    query = sa.select(batches.c.batch_id).where(batches.c.state.in_(NEED_SECRET))
    return set(connection.scalars(query))


def status(connection: sa.Connection, batch_id: str, now: int) -> BatchStatus:
    """Returns the whole status, for the operator; raises RemoteError ``unknown-batch``."""
    batch = find(connection, batch_id)
    counts = connection.execute(sa.select(dropped).where(dropped.c.batch_id == batch_id))
    fresh = (declined.c.batch_id == batch_id) & (declined.c.at > now - 3 * DECLINE_SECONDS)
    reasons = connection.scalars(sa.select(declined.c.reason).where(fresh)).all()
    return BatchStatus(
        batch_id=batch_id,
        state=batch.state,
        n=batch.n,
        declined=tuple(sorted(reasons)) if batch.state == "open" else (),
        reports=batch.reports,
        leased=count_leased(connection, batch_id, now) if batch.state == "open" else 0,
        episodes=batch.n if batch.next_slot else 0,
        dropped={row.problem: row.frames for row in counts if row.problem != "replayed"},
    )


def decline(connection: sa.Connection, batch_id: str, reason: str, now: int) -> None:
    """Records why a node declines an open batch, but not which node."""
    if find(connection, batch_id, lock=True).state == "open":
        row = (declined.c.batch_id == batch_id) & (declined.c.reason == reason)
        if connection.execute(sa.update(declined).where(row).values(at=now)).rowcount == 0:
            connection.execute(sa.insert(declined).values(batch_id=batch_id, reason=reason, at=now))


def open_batches(connection: sa.Connection, now: int) -> OpenBatches:
    """Returns the batches that are open at ``now``."""
    rows = connection.execute(_OPEN, {"now": now}).all()
    listing = [OpenBatch(batch_id=row[0], free_slots=coarse_slots(*row[1:3])) for row in rows]
    expiries = (expiry for row in rows for expiry in row[3:] if expiry is not None)
    return OpenBatches(listing, now, min(expiries, default=None))


def anything_due(connection: sa.Connection, now: int, retention: int) -> bool:
    """Returns whether any batch has to be ended or erased."""
    return connection.scalar(_DUE, {"now": now, "retire_before": now - retention}) is not None


def count_dropped(connection: sa.Connection, batch_id: str, frames: Mapping[str, int]) -> None:
    """Counts a batch's frames that were not accepted, by problem."""
    for problem, amount in frames.items():
        row = (dropped.c.batch_id == batch_id) & (dropped.c.problem == problem)
        grown = sa.update(dropped).where(row).values(frames=dropped.c.frames + amount)
        if connection.execute(grown).rowcount == 0:
            connection.execute(sa.insert(dropped).values((batch_id, problem, amount)))


def bind_to_vault(connection: sa.Connection, identity: int) -> None:
    """Records which vault has this store's secrets.

    Raises LocalError ``unavailable`` if another vault is recorded. With the wrong vault, every
    batch would seem to have lost its secret, and would be given up.
    """
    bound = read_number(connection, meta, "vault")
    if bound is None:
        write_number(connection, meta, "vault", identity)
    elif bound != identity:
        raise LocalError(
            "unavailable",
            f"the data directory has the batch secrets number {identity}, the store belongs to "
            f"number {bound}: all replicas must share one directory. If its secrets are lost for "
            f"good, write {bound} into secrets.id; the batches that need them are given up then",
        )


def count_stored(connection: sa.Connection, batch_id: str) -> int:
    """Returns how many reports of a batch are in the store."""
    query = sa.select(sa.func.sum(reports.c.held)).where(reports.c.batch_id == batch_id)
    return int(connection.scalar(query) or 0)


def is_open(now: int) -> sa.ColumnElement[bool]:
    """Returns the condition that a batch is open at ``now``."""
    return (batches.c.state == "open") & (batches.c.expires_at > now)
