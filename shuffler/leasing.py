"""Slots and who holds them.

A slot is one of the n places of a batch. A lease gives it to one user until it expires; then the
slot goes to another, and the lease that lost it stays as a row without a slot, so that a report
which comes after all is told that it is late.
"""

import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from sqlalchemy import Connection, Row, Select, insert, select, update

from common.errors import LocalError
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


def view(row: Row[Any]) -> LeaseView:
    """A row of the leases' table as a value."""
    values = row._mapping
    return LeaseView(**{field.name: values[field.name] for field in fields(LeaseView)})


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
    known = {
        row.user: row
        for row in connection.execute(
            select(users).where(users.c.user.in_(distinct)).with_for_update()
        )
    }
    here: dict[str, LeaseView] = {}
    elsewhere: set[str] = set()
    for row in connection.execute(_live_leases(distinct, now)):
        if row.batch_id == batch_id:
            here[row.user] = view(row)
        else:
            elsewhere.add(row.user)
    return [
        UserView(
            user=user,
            owner=known[user].node_id if user in known else None,
            reported=user in known and known[user].reported,
            here=here.get(user),
            elsewhere=user in elsewhere,
        )
        for user in distinct
    ]


def _live_leases(wanted: Sequence[str], now: int) -> Select[Any]:
    return (
        select(leases)
        .join(batches, batches.c.batch_id == leases.c.batch_id)
        .where(
            leases.c.user.in_(wanted),
            leases.c.slot.is_not(None),
            leases.c.report_sha256.is_(None),
            leases.c.expires_at > now,
            batches.c.state == "open",
        )
    )


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
        LeaseView(secrets.token_hex(16), user.user, slot, expires_at, None)
        for user, slot in zip(granted, slots, strict=True)
    ]
    _mark_users(connection, node_id, [user.user for user in granted if user.owner is None])
    common = {"batch_id": batch.batch_id, "node_id": node_id}
    connection.execute(insert(leases), [common | asdict(one) for one in fresh])
    connection.execute(
        update(batches)
        .where(batches.c.batch_id == batch.batch_id)
        .values(
            episodes=batches.c.episodes + len(fresh),
            next_slot=max(batch.next_slot, max(slots) + 1),
        )
    )
    return fresh


def _take_slots(connection: Connection, batch: store.Batch, count: int, now: int) -> list[int]:
    """The lowest free slots; leases that held them before lose them."""
    expired = (
        select(leases.c.slot)
        .where(
            leases.c.batch_id == batch.batch_id,
            leases.c.report_sha256.is_(None),
            leases.c.slot.is_not(None),
            leases.c.expires_at <= now,
        )
        .order_by(leases.c.slot)
        .limit(count)
    )
    returned = [int(slot) for slot in connection.scalars(expired)]
    if returned:
        connection.execute(
            update(leases)
            .where(leases.c.batch_id == batch.batch_id, leases.c.slot.in_(returned))
            .values(slot=None)
        )
    return lowest_free(returned, batch.next_slot, batch.n, count)


def _mark_users(connection: Connection, node_id: str, fresh: Sequence[str]) -> None:
    """A user belongs to the node that first named it, and counts toward its quota once."""
    if not fresh:
        return
    connection.execute(insert(users), [{"user": user, "node_id": node_id} for user in fresh])
    connection.execute(
        update(nodes).where(nodes.c.node_id == node_id).values(users=nodes.c.users + len(fresh))
    )


def _document(held: LeaseView) -> Lease:
    if held.slot is None:
        raise LocalError("internal", "a lease without a slot was about to be given out")
    return Lease(user=held.user, slot=held.slot, lease=held.lease, expires_at=held.expires_at)
