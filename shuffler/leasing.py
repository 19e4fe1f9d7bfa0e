"""Slots and who holds them.

A slot is one of the n places of a batch. A lease gives it to one user until it expires; then the
slot goes to another, and the lease that lost it stays as a row without a slot, so that a report
which comes after all is told that it is late.
"""

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, bindparam, insert, null, select, update

from common.errors import LocalError
from common.statements import execute_rows, is_one_of, unindexed
from common.wire import Lease, LeaseReply, Refusal
from shuffler import nodes as enrolled
from shuffler import store
from shuffler.rules import (
    LeaseView,
    Room,
    UserView,
    closed_problem,
    decide_lease,
    lowest_free,
    share_slots,
)
from shuffler.schema import batches, leases, nodes, users

VIEW = (leases.c.lease, leases.c.user, leases.c.slot, leases.c.expires_at, leases.c.report_sha256)
"""Columns of a `LeaseView`, in its order."""

_KNOWN = (
    select(users.c.user, users.c.node_id, users.c.reported, users.c.lease)
    .where(is_one_of(users.c.user, "wanted"))
    .with_for_update()
)
_LIVE = (
    select(leases.c.batch_id, *VIEW)
    .join(batches, batches.c.batch_id == leases.c.batch_id)
    .where(
        is_one_of(leases.c.lease, "newest"),
        leases.c.slot.is_not(None),
        leases.c.report_sha256.is_(None),
        leases.c.expires_at > bindparam("now"),
        unindexed(batches.c.state) == "open",
    )
)
_EXPIRED = (
    select(leases.c.slot)
    .where(
        leases.c.batch_id == bindparam("batch"),
        leases.c.report_sha256.is_(None),
        leases.c.slot.is_not(None),
        leases.c.expires_at <= bindparam("now"),
    )
    .order_by(leases.c.slot)
    .limit(bindparam("most"))
)
_TAKE_BACK = (
    update(leases)
    .where(leases.c.batch_id == bindparam("batch"), leases.c.slot == bindparam("taken"))
    .values(slot=null())
)
_GRANT = insert(leases)
_GRANTED = ("lease", "batch_id", "user", "node_id", "slot", "expires_at", "report_sha256")
_GROW_BATCH = (
    update(batches)
    .where(batches.c.batch_id == bindparam("batch"))
    .values(episodes=batches.c.episodes + bindparam("more"), next_slot=bindparam("next"))
)
_NEW_USER = insert(users)
_LEASE_AGAIN = (
    update(users).where(users.c.user == bindparam("whose")).values(lease=bindparam("newest"))
)
_GROW_NODE = (
    update(nodes)
    .where(nodes.c.node_id == bindparam("node"))
    .values(users=nodes.c.users + bindparam("more"))
)


@dataclass(frozen=True, slots=True)
class Terms:
    """What a lease is granted under: now, lease time in seconds, a node's share of a batch."""

    now: int
    seconds: int
    node_share: float


def lease(
    connection: Connection, batch_id: str, node_id: str, wanted: Sequence[str], terms: Terms
) -> LeaseReply:
    """A slot, or the reason for none, for each distinct user of ``wanted``.

    Raises:
        RemoteError: ``unauthorized`` for a revoked node, ``unknown-batch``.
    """
    node = enrolled.lock(connection, node_id)
    batch = store.find(connection, batch_id, lock=True)
    closed = closed_problem(batch.state, batch.expires_at, terms.now)
    room = _room(connection, batch, node, terms)
    kept: list[LeaseView] = []
    granted: list[UserView] = []
    refused: list[Refusal] = []
    for user in _views(connection, batch_id, wanted, terms.now):
        decision = decide_lease(user, node_id, closed, terms.now, room)
        if decision == "keep" and user.here is not None:
            kept.append(user.here)
        elif decision == "grant":
            granted.append(user)
            room = room.less(fresh_user=user.owner is None)
        else:
            refused.append(Refusal(user=user.user, problem=decision))
    fresh = _grant(connection, batch, node_id, granted, terms) if granted else []
    return LeaseReply(leases=tuple(map(_document, kept + fresh)), refused=tuple(refused))


def _room(connection: Connection, batch: store.Batch, node: enrolled.Node, terms: Terms) -> Room:
    leased = store.count_leased(connection, batch.batch_id, terms.now)
    share = share_slots(terms.node_share, batch.n)
    if share < batch.n:
        share -= store.count_held(connection, batch.batch_id, node.node_id, terms.now)
    return Room(quota=node.quota_left, free_slots=batch.n - batch.reports - leased, share=share)


def _views(
    connection: Connection, batch_id: str, wanted: Sequence[str], now: int
) -> list[UserView]:
    distinct = list(dict.fromkeys(wanted))
    rows = connection.execute(_KNOWN, {"wanted": distinct}).all()
    known = {row.user: (row.node_id, row.reported) for row in rows}
    newest = [row.lease for row in rows if row.lease is not None]
    here: dict[str, LeaseView] = {}
    elsewhere: set[str] = set()
    if newest:
        for row in connection.execute(_LIVE, {"newest": newest, "now": now}):
            if row.batch_id == batch_id:
                here[row.user] = LeaseView(*row[1:])
            else:
                elsewhere.add(row.user)
    return [
        UserView(
            user=user,
            owner=owner,
            reported=reported,
            here=here.get(user),
            elsewhere=user in elsewhere,
        )
        for user in distinct
        for owner, reported in (known.get(user, (None, False)),)
    ]


def _grant(
    connection: Connection,
    batch: store.Batch,
    node_id: str,
    granted: Sequence[UserView],
    terms: Terms,
) -> list[LeaseView]:
    slots = _take_slots(connection, batch, len(granted), terms.now)
    expires_at = min(terms.now + terms.seconds, batch.expires_at)
    fresh = [
        LeaseView(name, user.user, slot, expires_at, None)
        for user, slot, name in zip(granted, slots, _names(slots), strict=True)
    ]
    _mark_users(connection, node_id, granted, fresh)
    rows = [
        (one.lease, batch.batch_id, one.user, node_id, one.slot, one.expires_at, None)
        for one in fresh
    ]
    execute_rows(connection, _GRANT, _GRANTED, rows)
    next_slot = max(batch.next_slot, max(slots) + 1)
    grown = {"batch": batch.batch_id, "more": len(fresh), "next": next_slot}
    connection.execute(_GROW_BATCH, grown)
    return fresh


def _names(slots: Sequence[int]) -> Iterator[str]:
    """New leases' ids: each its slot, then 64 random bits.

    Ids in the order of slots fall on few pages of the index, and a commit writes fewer of them. A
    node knows its slots, and nobody else is told an id, so nothing is given away.
    """
    bits = secrets.token_hex(8 * len(slots))  # one call of the system for all
    return (f"{slot:016x}{bits[16 * i : 16 * (i + 1)]}" for i, slot in enumerate(slots))


def _take_slots(connection: Connection, batch: store.Batch, count: int, now: int) -> list[int]:
    """The lowest free slots; leases that held them before lose them."""
    expired = {"batch": batch.batch_id, "now": now, "most": count}
    returned = [int(slot) for slot in connection.scalars(_EXPIRED, expired)]
    taken = [(batch.batch_id, slot) for slot in returned]
    execute_rows(connection, _TAKE_BACK, ("batch", "taken"), taken)
    return lowest_free(returned, batch.next_slot, batch.n, count)


def _mark_users(
    connection: Connection, node_id: str, granted: Sequence[UserView], fresh: Sequence[LeaseView]
) -> None:
    """Note the newest leases. A user belongs to the node that first named it, and counts toward its
    quota once."""
    pairs = list(zip(granted, fresh, strict=True))
    again = [(one.lease, one.user) for user, one in pairs if user.owner is not None]
    new = [(one.user, node_id, False, one.lease) for user, one in pairs if user.owner is None]
    execute_rows(connection, _LEASE_AGAIN, ("newest", "whose"), again)
    execute_rows(connection, _NEW_USER, ("user", "node_id", "reported", "lease"), new)
    if new:
        connection.execute(_GROW_NODE, {"node": node_id, "more": len(new)})


def _document(held: LeaseView) -> Lease:
    if held.slot is None:
        raise LocalError("internal", "a lease without a slot was about to be given out")
    return Lease(user=held.user, slot=held.slot, lease=held.lease, expires_at=held.expires_at)
