"""Grants: the leases that one request was given, in one row.

Leases of one request are of one batch, node and expiry. So they share a row, and an upload changes
that row alone: no row or index of single users or leases, of which a commit would write a page
each. A lease's id is its slot, then the grant's id. A node knows its slots, and nobody else is told
an id, so nothing is given away.
"""

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

import numpy as np
from sqlalchemy import Connection, bindparam, delete, func, insert, literal_column, select, update

from riffle.common.server.statements import execute_rows, is_one_of, unindexed
from riffle.shuffler.rules import Standing
from riffle.shuffler.store.schema import batches, grants

HELD, REPORTED, VOID, LOST, FORGOTTEN = "hrvlf"
"""A lease holds its slot; has reported; may report no more and holds its slot until another takes
it, since its user has a newer lease; lost its slot to another; was unused when its batch ended."""

USER_BYTES, DIGEST_BYTES, ID_BYTES = 16, 32, 8
EXPIRED_AT_ONCE = 32
_SLOT = np.dtype("<u4")

_COLUMNS = (
    grants.c.grant_id,
    grants.c.batch_id,
    grants.c.node_id,
    grants.c.expires_at,
    grants.c.slots,
    grants.c.states,
    grants.c.users,
    grants.c.digests,
)
_OF_UPLOAD = (
    select(*_COLUMNS)
    .where(
        is_one_of(grants.c.grant_id, "named"),
        unindexed(grants.c.batch_id) == bindparam("batch"),
        grants.c.node_id == bindparam("node"),
    )
    .with_for_update()
)
_WITH_STATE = (
    select(*_COLUMNS, batches.c.state)
    .join(batches, batches.c.batch_id == grants.c.batch_id)
    .where(is_one_of(grants.c.grant_id, "named"))
)
PENDING = grants.c.pending > literal_column("0")
"""As the index of pending leases says it: with a parameter for the 0 it would not be used."""

_EXPIRED = (
    select(*_COLUMNS)
    .where(
        grants.c.batch_id == bindparam("batch"), PENDING, grants.c.expires_at <= bindparam("now")
    )
    .order_by(grants.c.expires_at)
    .limit(EXPIRED_AT_ONCE)
)
_UNUSED = (grants.c.batch_id == bindparam("batch")) & (grants.c.reports == 0)
_PARTLY_UNUSED = select(*_COLUMNS).where(
    grants.c.batch_id == bindparam("batch"), grants.c.reports < func.length(grants.c.states)
)
_REPORTED = select(grants.c.users, grants.c.slots, grants.c.states).where(
    grants.c.batch_id == bindparam("batch"), grants.c.reports > 0
)
_NEW = insert(grants)
_CHANGING = ("grant_id", "pending", "reports", "states", "users", "digests")
_PARAMETERS = tuple(f"new_{name}" for name in _CHANGING)
_SAVE = (
    update(grants)
    .where(grants.c.grant_id == bindparam("new_grant_id"))
    .values({name: bindparam(f"new_{name}") for name in _CHANGING[1:]})
)


@dataclass(slots=True)
class Grant:
    """k leases: ``slots`` (k,) ascending, ``states`` (k,), ``users`` 16 k and ``digests`` (SHA-256
    of reports, zero before) 32 k bytes."""

    grant_id: str
    batch_id: str
    node_id: str
    expires_at: int
    slots: list[int]
    states: list[str]
    users: bytearray
    digests: bytearray
    _places: dict[int, int] = field(init=False)

    def __post_init__(self) -> None:
        self._places = {slot: place for place, slot in enumerate(self.slots)}

    @classmethod
    def stored(
        cls,
        grant_id: str,
        batch_id: str,
        node_id: str,
        expires_at: int,
        slots: bytes,
        states: str,
        users: bytes,
        digests: bytes,
    ) -> "Grant":
        """From a row, its values in the order of `_COLUMNS`."""
        return cls(
            grant_id,
            batch_id,
            node_id,
            expires_at,
            read_slots(slots),
            list(states),
            bytearray(users),
            bytearray(digests),
        )

    @classmethod
    def fresh(
        cls,
        grant_id: str,
        batch_id: str,
        node_id: str,
        expires_at: int,
        people: Sequence[str],
        slots: Sequence[int],
    ) -> "Grant":
        """Leases of ``people`` on ``slots``."""
        users, digests = bytearray.fromhex("".join(people)), bytearray(DIGEST_BYTES * len(slots))
        states = [HELD] * len(slots)
        return cls(grant_id, batch_id, node_id, expires_at, list(slots), states, users, digests)

    def row(self) -> dict[str, object]:
        """The row that it is stored in."""
        return {
            "grant_id": self.grant_id,
            "batch_id": self.batch_id,
            "node_id": self.node_id,
            "expires_at": self.expires_at,
            "pending": self.states.count(HELD) + self.states.count(VOID),
            "reports": self.states.count(REPORTED),
            "slots": write_slots(self.slots),
            "states": "".join(self.states),
            "users": bytes(self.users),
            "digests": bytes(self.digests),
        }

    def lease(self, slot: int) -> str:
        """The id of the lease of a slot."""
        return f"{slot:016x}{self.grant_id}"

    def leases(self) -> list[str]:
        """The ids of all its leases."""
        return [self.lease(slot) for slot in self.slots]

    def user(self, place: int) -> str:
        """Whose lease it is."""
        return self.users[place * USER_BYTES : (place + 1) * USER_BYTES].hex()

    def digest(self, place: int) -> bytes:
        """SHA-256 of a lease's report."""
        return bytes(self.digests[place * DIGEST_BYTES : (place + 1) * DIGEST_BYTES])

    def find(self, lease: str) -> int | None:
        """The place of a lease of this grant; None when it has none of this id."""
        place = self._places.get(slot(lease))
        return None if place is None or self.states[place] == FORGOTTEN else place

    def standing(self, place: int, now: int) -> Standing:
        """Whether a lease has reported, may report at ``now``, or may not any more."""
        state = self.states[place]
        if state == HELD and now < self.expires_at:
            return "live"
        return "reported" if state == REPORTED else "over"

    def reported(self, place: int) -> bool:
        """Whether a lease has reported."""
        return self.states[place] == REPORTED

    def all_live(self, now: int) -> bool:
        """Whether every lease that has not reported may do so at ``now``."""
        return now < self.expires_at and not {VOID, LOST, FORGOTTEN}.intersection(self.states)

    def report(self, place: int, digest: bytes) -> None:
        """Note a lease's report."""
        self.states[place] = REPORTED
        self.digests[place * DIGEST_BYTES : (place + 1) * DIGEST_BYTES] = digest

    def void(self, place: int) -> None:
        """Its user is about to get another lease: this one reports no more, whatever the time.

        A user reports once. Were it only for their times, two leases of one user could both be live
        for two replicas whose clocks differ.
        """
        if self.states[place] == HELD:
            self.states[place] = VOID

    def lose(self, most: int) -> list[int]:
        """Give up at most so many slots of leases without a report; returns them."""
        places = [i for i, state in enumerate(self.states) if state in (HELD, VOID)][:most]
        for place in places:
            self.states[place] = LOST
        return [self.slots[place] for place in places]

    def forget_unused(self) -> None:
        """Forget whose the leases without a report were."""
        for place, state in enumerate(self.states):
            if state != REPORTED:
                self.states[place] = FORGOTTEN
                self.users[place * USER_BYTES : (place + 1) * USER_BYTES] = bytes(USER_BYTES)


def grant_id(lease: str) -> str:
    """The grant of a lease."""
    return lease[16:]


def slot(lease: str) -> int:
    """The slot that a lease was given."""
    return int(lease[:16], 16)


def write_slots(slots: Sequence[int]) -> bytes:
    """Slots as they are stored: four bytes each."""
    return np.array(slots, dtype=_SLOT).tobytes()


def read_slots(stored: bytes) -> list[int]:
    """What `write_slots` wrote."""
    return [int(slot) for slot in np.frombuffer(stored, dtype=_SLOT).tolist()]


def new(
    connection: Connection,
    batch_id: str,
    node_id: str,
    expires_at: int,
    people: Sequence[str],
    slots: Sequence[int],
) -> Grant:
    """Store the leases of ``people`` on ``slots``."""
    name = secrets.token_hex(ID_BYTES)
    grant = Grant.fresh(name, batch_id, node_id, expires_at, people, slots)
    connection.execute(_NEW, grant.row())
    return grant


def of_upload(
    connection: Connection, batch_id: str, node_id: str, leases: Iterable[str]
) -> dict[str, Grant]:
    """The grants of these leases, as far as they are of this batch and node."""
    named = list({grant_id(lease) for lease in leases})
    rows = connection.execute(_OF_UPLOAD, {"named": named, "batch": batch_id, "node": node_id})
    return {row.grant_id: Grant.stored(*row) for row in rows}


def with_open(connection: Connection, leases: Iterable[str]) -> dict[str, tuple[Grant, bool]]:
    """The grants of these leases, and whether their batches are open."""
    named = list({grant_id(lease) for lease in leases})
    if not named:
        return {}
    rows = connection.execute(_WITH_STATE, {"named": named})
    return {row[0]: (Grant.stored(*row[:-1]), row[-1] == "open") for row in rows}


def save(connection: Connection, changed: Iterable[Grant]) -> None:
    """Store what became of the leases of some grants."""
    rows = [itemgetter(*_CHANGING)(grant.row()) for grant in changed]
    execute_rows(connection, _SAVE, _PARAMETERS, rows)


def take_back(connection: Connection, batch_id: str, now: int, count: int) -> list[int]:
    """At most ``count`` slots of expired leases, which lose them; the oldest first."""
    slots: list[int] = []
    while len(slots) < count:
        rows = connection.execute(_EXPIRED, {"batch": batch_id, "now": now})
        expired = [Grant.stored(*row) for row in rows]
        if not expired:
            break
        for grant in expired:
            slots += grant.lose(count - len(slots))
        save(connection, expired)
    return slots


def forget_unused(connection: Connection, batch_id: str) -> None:
    """Forget the leases of a batch that never reported.

    The others stay, to know a late repetition for what it is, and that their users have reported.
    """
    connection.execute(delete(grants).where(_UNUSED), {"batch": batch_id})
    rows = connection.execute(_PARTLY_UNUSED, {"batch": batch_id})
    mixed = [Grant.stored(*row) for row in rows]
    for grant in mixed:
        grant.forget_unused()
    save(connection, mixed)


def reported(connection: Connection, batch_id: str) -> tuple[set[bytes], list[int]]:
    """Distinct users who have reported to a batch, and the slots of their reports."""
    people: set[bytes] = set()
    slots: list[int] = []
    for users, held, states in connection.execute(_REPORTED, {"batch": batch_id}):
        places = [i for i, state in enumerate(states) if state == REPORTED]
        people.update(bytes(users[USER_BYTES * i : USER_BYTES * (i + 1)]) for i in places)
        stored = read_slots(held)
        slots += [stored[i] for i in places]
    return people, slots
