"""Slots and who holds them.

A slot is one of the n places of a batch. A lease gives it to one user until it expires; then the
slot goes to another, and the lease that lost it stays without one, so that a report which comes
after all is told that it is late. Of a user the newest lease alone may report.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat

from sqlalchemy import Connection, bindparam, update

from riffle.common.protocol.messages import Lease, LeaseReply, Refusal
from riffle.shuffler.rules import (
    STRANGER,
    Room,
    UserView,
    closed_problem,
    decide_lease,
    lowest_free,
    share_slots,
    strangers_granted,
)
from riffle.shuffler.store import leases as grants
from riffle.shuffler.store import records, users
from riffle.shuffler.store.schema import batches
from riffle.shuffler.store.users import Known

_GROW_BATCH = (
    update(batches)
    .where(batches.c.batch_id == bindparam("batch"))
    .values(episodes=batches.c.episodes + bindparam("more"), next_slot=bindparam("next"))
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
    node = users.lock(connection, node_id)
    batch = records.find(connection, batch_id, lock=True)
    closed = closed_problem(batch.state, batch.expires_at, terms.now)
    room = _room(connection, batch, node, terms)
    distinct = list(dict.fromkeys(wanted))
    known = users.known(connection, distinct)
    kept: list[Lease] = []
    granted = [] if known else distinct[: strangers_granted(closed, room)]
    room.take(len(granted), strangers=len(granted))
    refused: list[Refusal] = []
    for user in distinct[len(granted) :]:
        view = _view(user, known[user], batch_id, terms.now) if user in known else STRANGER
        decision = decide_lease(view, node_id, closed, room)
        if decision == "keep" and view.here is not None:
            kept.append(view.here)
        elif decision == "grant":
            granted.append(user)
            room.take(1, strangers=view.owner is None)
        else:
            refused.append(Refusal(user, decision))
    fresh = _grant(connection, batch, node_id, granted, known, terms) if granted else []
    return LeaseReply(leases=(*kept, *fresh), refused=tuple(refused))


def _room(connection: Connection, batch: records.Batch, node: users.Node, terms: Terms) -> Room:
    leased = records.count_leased(connection, batch.batch_id, terms.now)
    share = share_slots(terms.node_share, batch.n)
    if share < batch.n:
        share -= records.count_held(connection, batch.batch_id, node.node_id, terms.now)
    return Room(quota=node.quota_left, free_slots=batch.n - batch.reports - leased, share=share)


def _view(user: str, known: Known, batch_id: str, now: int) -> UserView:
    live, here = known.live(now), None
    if live is not None and live.batch_id == batch_id and known.lease is not None:
        here = Lease(user, grants.slot(known.lease), known.lease, live.expires_at)
    elsewhere = live is not None and here is None
    return UserView(known.owner, known.reported, here, elsewhere)


def _grant(
    connection: Connection,
    batch: records.Batch,
    node_id: str,
    people: Sequence[str],
    known: dict[str, Known],
    terms: Terms,
) -> list[Lease]:
    _supersede(connection, (known[user] for user in people if user in known))
    returned = grants.take_back(connection, batch.batch_id, terms.now, len(people))
    slots = lowest_free(returned, batch.next_slot, batch.n, len(people))
    expires_at = min(terms.now + terms.seconds, batch.expires_at)
    grant = grants.new(connection, batch.batch_id, node_id, expires_at, people, slots)
    leases = grant.leases()
    users.note(connection, node_id, list(zip(people, leases, strict=True)), known)
    next_slot = max(batch.next_slot, slots[-1] + 1)
    grown = {"batch": batch.batch_id, "more": len(slots), "next": next_slot}
    connection.execute(_GROW_BATCH, grown)
    return list(map(Lease, people, slots, leases, repeat(expires_at)))


def _supersede(connection: Connection, again: Iterable[Known]) -> None:
    """Leases of users who get another one report no more."""
    changed = {}
    for known in again:
        if known.grant is not None and known.place is not None:
            known.grant.void(known.place)
            changed[known.grant.grant_id] = known.grant
    grants.save(connection, changed.values())
