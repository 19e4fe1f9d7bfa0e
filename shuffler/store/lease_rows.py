"""Leases in the store, with one row for all leases of a request.

The leases of one request have the same batch, node and expiry, and share one row, the *lease
group*. If each lease had its own row or index entry, a commit would write one page per lease.

A lease's id is its slot followed by the id of its group. Only the lease's node gets this id.
"""

import secrets
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np
from sqlalchemy import Connection, bindparam, case, delete, func, literal_column, select, update

from riffle.common.protocol.descriptor import Epoch
from riffle.common.server.statements import execute_rows, is_one_of, unindexed
from riffle.shuffler.rules import Standing
from riffle.shuffler.states import LeaseState, lease_after
from riffle.shuffler.store.schema import batches, lease_groups, nodes

LETTERS: dict[LeaseState, str] = {
    "held": "h",
    "reported": "r",
    "superseded": "v",
    "lost": "l",
    "forgotten": "f",
}
"""The stored form of a lease's state: one letter. A group stores its letters as one text."""
_STATES = {letter: state for state, letter in LETTERS.items()}

USER_BYTES, DIGEST_BYTES, ID_BYTES = 16, 32, 8
GROUPS_AT_ONCE = 32
_SLOT = np.dtype("<u4")

_READ = ("group_id", "batch_id", "node_id", "expires_at", "slots", "states", "users", "digests")
_COLUMNS = [lease_groups.c[name] for name in _READ]
_OF_UPLOAD = (
    select(*_COLUMNS)
    .where(
        is_one_of(lease_groups.c.group_id, "groups"),
        unindexed(lease_groups.c.batch_id) == bindparam("batch"),
        lease_groups.c.node_id == bindparam("node"),
    )
    .with_for_update()
)
_WITH_BATCH = (
    select(*_COLUMNS, batches.c.state, batches.c.expires_at, batches.c.epoch_seconds)
    .join(batches, batches.c.batch_id == lease_groups.c.batch_id)
    .where(is_one_of(lease_groups.c.group_id, "groups"))
)
PENDING = lease_groups.c.pending > literal_column("0")
"""The database uses the index `pending` only if the 0 is a literal, not a parameter."""

LIVE = PENDING & (lease_groups.c.expires_at > bindparam("now"))
_OF_BATCH = lease_groups.c.batch_id == bindparam("batch")
_LEASED = select(func.sum(lease_groups.c.pending)).where(_OF_BATCH, LIVE)
_OVER = lease_groups.c.expires_at <= bindparam("now")
_LAPSED = case((_OVER, lease_groups.c.leases - lease_groups.c.reports), else_=0)
_LAPSE = case((_LAPSED > 0, lease_groups.c.expires_at))
_HOLDING = select(
    func.sum(case((_OVER, 0), else_=lease_groups.c.pending)),
    func.sum(lease_groups.c.reports),
    func.sum(_LAPSED),
    func.min(_LAPSE),
    func.max(_LAPSE),
).where(
    _OF_BATCH,
    lease_groups.c.node_id.in_(select(nodes.c.node_id).where(nodes.c.owner == bindparam("owner"))),
)

_EXPIRED = (
    select(*_COLUMNS)
    .where(_OF_BATCH, PENDING, _OVER)
    .order_by(lease_groups.c.expires_at)
    .limit(GROUPS_AT_ONCE)
)
_UNUSED = _OF_BATCH & (lease_groups.c.reports == 0)
_PARTLY_UNUSED = select(*_COLUMNS).where(_OF_BATCH, lease_groups.c.reports < lease_groups.c.leases)
_REPORTED = select(*(lease_groups.c[n] for n in ("node_id", "users", "slots", "states"))).where(
    _OF_BATCH, lease_groups.c.reports > 0
)
_CHANGING = ("group_id", "pending", "reports", "states", "users", "digests")
_PARAMETERS = tuple(f"new_{name}" for name in _CHANGING)
_SAVE = (
    update(lease_groups)
    .where(lease_groups.c.group_id == bindparam("new_group_id"))
    .values({name: bindparam(f"new_{name}") for name in _CHANGING[1:]})
)


@dataclass(slots=True)
class LeaseGroup:
    """The k leases of one request, addressed by their index in the group.

    ``slots`` ascend. ``users`` has 16 bytes for each lease. ``digests`` has 32 bytes for each
    lease: the digest of the report's frame, or zeros before there is a report.
    """

    group_id: str
    batch_id: str
    node_id: str
    expires_at: int
    slots: list[int]
    states: list[LeaseState]
    users: bytearray
    digests: bytearray

    @classmethod
    def from_row(cls, row: Sequence[Any]) -> "LeaseGroup":
        """Returns the group that a row with the values of `_COLUMNS` describes."""
        group_id, batch_id, node_id, expires_at, slots, letters, users, digests = row
        states, packed = [_STATES[c] for c in letters], (bytearray(users), bytearray(digests))
        return cls(group_id, batch_id, node_id, expires_at, read_slots(slots), states, *packed)

    @classmethod
    def new(
        cls, batch_id: str, node_id: str, expires_at: int, slots: list[int], users: Sequence[str]
    ) -> "LeaseGroup":
        """Returns a group of new leases, all held, which give ``slots`` to ``users``."""
        k, group_id = len(slots), secrets.token_hex(ID_BYTES)
        packed, digests = bytearray.fromhex("".join(users)), bytearray(DIGEST_BYTES * k)
        return cls(group_id, batch_id, node_id, expires_at, slots, ["held"] * k, packed, digests)

    def row(self) -> dict[str, object]:
        """Returns the group's row."""
        return {
            "group_id": self.group_id,
            "batch_id": self.batch_id,
            "node_id": self.node_id,
            "expires_at": self.expires_at,
            "leases": len(self.slots),
            "pending": self.states.count("held") + self.states.count("superseded"),
            "reports": self.states.count("reported"),
            "slots": write_slots(self.slots),
            "states": "".join(map(LETTERS.__getitem__, self.states)),
            "users": bytes(self.users),
            "digests": bytes(self.digests),
        }

    def lease_id(self, slot: int) -> str:
        """Returns the id of the lease on a slot."""
        return f"{slot:016x}{self.group_id}"

    def user(self, index: int) -> str:
        """Returns the user of a lease."""
        return self.users[index * USER_BYTES : (index + 1) * USER_BYTES].hex()

    def digest(self, index: int) -> bytes:
        """Returns the digest of a lease's report."""
        return bytes(self.digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES])

    def index(self, lease: str) -> int | None:
        """Returns the index of a lease, or None if it is forgotten or not in the group."""
        index = bisect_left(self.slots, slot_of(lease))
        found = index < len(self.slots) and self.slots[index] == slot_of(lease)
        return index if found and self.states[index] != "forgotten" else None

    def standing(self, index: int, now: int) -> Standing:
        """Returns whether a lease has reported, may report at ``now``, or may no longer report."""
        state = self.states[index]
        if state == "held" and now < self.expires_at:
            return "live"
        return "reported" if state == "reported" else "over"

    def all_live(self, now: int) -> bool:
        """Returns whether every lease without a report may report at ``now``."""
        return now < self.expires_at and set(self.states) <= {"held", "reported"}

    def report(self, index: int, digest: bytes) -> None:
        """Marks a lease as reported."""
        self.states[index] = lease_after(self.states[index], "report")
        self.digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES] = digest

    def supersede(self, index: int) -> None:
        """Bars a lease from reporting, because its user gets a newer lease.

        Otherwise two replicas with different clocks could accept reports under both leases.
        """
        self.states[index] = lease_after(self.states[index], "supersede")

    def reassign(self, limit: int) -> list[int]:
        """Takes at most ``limit`` slots from leases without a report; returns the slots."""
        holders = [i for i, state in enumerate(self.states) if state in ("held", "superseded")]
        for index in holders[:limit]:
            self.states[index] = lease_after(self.states[index], "reassign")
        return [self.slots[index] for index in holders[:limit]]

    def forget_unused(self) -> None:
        """Deletes the users of leases without a report."""
        for index, state in enumerate(self.states):
            if state != "reported":
                self.states[index] = lease_after(state, "forget")
                self.users[index * USER_BYTES : (index + 1) * USER_BYTES] = bytes(USER_BYTES)


def group_of(lease: str) -> str:
    """Returns the group's id, the end of a lease's id. A group is the leases of one request."""
    return lease[16:]


def slot_of(lease: str) -> int:
    """Returns the slot that a lease was given."""
    return int(lease[:16], 16)


def write_slots(slots: Sequence[int]) -> bytes:
    """Returns slots in their stored form: four bytes each, little-endian."""
    return np.array(slots, dtype=_SLOT).tobytes()


def read_slots(stored: bytes) -> list[int]:
    """Returns the slots that `write_slots` wrote."""
    return [int(slot) for slot in np.frombuffer(stored, dtype=_SLOT).tolist()]


def groups_of_upload(
    connection: Connection, batch_id: str, node_id: str, leases: Iterable[str]
) -> dict[str, LeaseGroup]:
    """Returns the groups of these leases, by id, if they belong to this batch and node."""
    groups = list({group_of(lease) for lease in leases})
    rows = connection.execute(_OF_UPLOAD, {"groups": groups, "batch": batch_id, "node": node_id})
    return {row[0]: LeaseGroup.from_row(row) for row in rows}


def groups_of_leases(
    connection: Connection, leases: Iterable[str]
) -> dict[str, tuple[LeaseGroup, bool, Epoch | None]]:
    """Returns the groups of these leases, by id, with a flag and an epoch.

    The flag tells whether the group's batch is open; the epoch is the epoch of this batch.
    """
    groups = list({group_of(lease) for lease in leases})
    if not groups:
        return {}
    rows = connection.execute(_WITH_BATCH, {"groups": groups})
    return {
        row[0]: (LeaseGroup.from_row(row[:-3]), row.state == "open", Epoch.of(*row[-2:]))
        for row in rows
    }


def save(connection: Connection, groups: Iterable[LeaseGroup]) -> None:
    """Stores the changed states, users and digests of groups."""
    rows = [itemgetter(*_CHANGING)(group.row()) for group in groups]
    execute_rows(connection, _SAVE, _PARAMETERS, rows)


def take_expired_slots(connection: Connection, batch_id: str, now: int, count: int) -> list[int]:
    """Takes at most ``count`` slots from expired leases, oldest first, and returns the slots."""
    slots: list[int] = []
    while len(slots) < count:
        rows = connection.execute(_EXPIRED, {"batch": batch_id, "now": now})
        expired = [LeaseGroup.from_row(row) for row in rows]
        if not expired:
            break
        for group in expired:
            slots += group.reassign(count - len(slots))
        save(connection, expired)
    return slots


def count_leased(connection: Connection, batch_id: str, now: int) -> int:
    """Returns the number of live leases without a report."""
    return int(connection.scalar(_LEASED, {"batch": batch_id, "now": now}) or 0)


def holding(connection: Connection, batch_id: str, owner: str, now: int) -> list[int]:
    """Returns five numbers about the leases of an owner's nodes in a batch.

    They are the numbers of live leases without a report, of reports and of lapsed leases, and the
    times of the first and the last lapse.
    """
    values = {"batch": batch_id, "owner": owner, "now": now}
    return [int(value or 0) for value in connection.execute(_HOLDING, values).one()]


def forget_unused(connection: Connection, batch_id: str) -> None:
    """Deletes those leases of a batch that have no report.

    The other leases show who has reported, and reveal whether a late upload repeats a report.
    """
    connection.execute(delete(lease_groups).where(_UNUSED), {"batch": batch_id})
    rows = connection.execute(_PARTLY_UNUSED, {"batch": batch_id})
    groups = [LeaseGroup.from_row(row) for row in rows]
    for group in groups:
        group.forget_unused()
    save(connection, groups)


def count_by_node(connection: Connection, batch_id: str, slots: Iterable[int]) -> Counter[str]:
    """Returns how many of these slots' reports each node sent; a slot listed twice counts twice."""
    wanted, nodes = Counter(slots), Counter[str]()
    for node_id, _, slot in _reports(connection, batch_id):
        nodes[node_id] += wanted[slot]
    return +nodes


def reporters(connection: Connection, batch_id: str) -> tuple[set[bytes], list[int]]:
    """Returns the distinct users with a report in a batch, and the slots of their reports."""
    found = list(_reports(connection, batch_id))
    return {user for _, user, _ in found}, [slot for _, _, slot in found]


def _reports(connection: Connection, batch_id: str) -> Iterator[tuple[str, bytes, int]]:
    """Yields node, user and slot of every report of a batch."""
    for node, users, slots, states in connection.execute(_REPORTED, {"batch": batch_id}):
        for index, slot in enumerate(read_slots(slots)):
            if states[index] == LETTERS["reported"]:
                yield node, bytes(users[USER_BYTES * index : USER_BYTES * (index + 1)]), slot
