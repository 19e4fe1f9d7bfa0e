"""Users and nodes in the store.

A user belongs to the owner of the node that named the user. The store knows users by `user_key`, so
the same id at another owner is another user. Owners can therefore neither find nor lock out the
users of other owners.

A user has one row for all epochs. The newest lease shows whether the user has reported. Once the
newest lease has a report, only a lease of a later epoch replaces it. The row then keeps the end of
the report's epoch. The row and the newest lease outlive their batch.

A node's token has 256 random bits, and only its SHA-256 is kept. A revoked node stays in the store,
so its users cannot report twice.
"""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256

from sqlalchemy import Connection, bindparam, case, func, insert, select, update

from riffle.common.process.endpoint import hash_token
from riffle.common.protocol.descriptor import Epoch, bars_until
from riffle.common.protocol.errors import RemoteError
from riffle.common.protocol.wire import Enrolment, EnrolRequest, NodeList, NodeSummary
from riffle.common.server.database import notify
from riffle.common.server.statements import execute_rows, is_one_of
from riffle.shuffler.store.lease_rows import LeaseGroup, group_of, groups_of_leases
from riffle.shuffler.store.schema import lease_groups, nodes, users

_USERS = (
    select(users.c.user, users.c.lease, users.c.barred_until)
    .where(is_one_of(users.c.user, "wanted"))
    .with_for_update()
)
_INSERT = insert(users)
_SET_LEASE = (
    update(users)
    .where(users.c.user == bindparam("of_user"))
    .values(lease=bindparam("newest_lease"), barred_until=bindparam("until"))
)
_UPDATE = update(nodes).where(nodes.c.node_id == bindparam("node"))
_GROW_NODE = _UPDATE.values(
    users=nodes.c.users + bindparam("new"), leases=nodes.c.leases + bindparam("more")
)
_BLAME = _UPDATE.values(
    failed_messages=nodes.c.failed_messages + bindparam("more"),
    failed_batches=nodes.c.failed_batches + 1,
)
_BY_TOKEN = select(nodes.c.node_id).where(
    nodes.c.token_hash == bindparam("hash"), nodes.c.revoked_at.is_(None)
)
_LIVE = case((lease_groups.c.expires_at > bindparam("now"), lease_groups.c.pending), else_=0)
_REPORTS = func.coalesce(func.sum(lease_groups.c.reports), 0)
_LIST = (
    select(
        *(nodes.c[name] for name in ("node_id", "name", "owner", "enrolled_at", "revoked_at")),
        *(nodes.c[name] for name in ("failed_messages", "failed_batches")),
        nodes.c.quota.label("users"),
        (nodes.c.quota - nodes.c.users).label("users_left"),
        _REPORTS.label("reports"),
        (nodes.c.leases - _REPORTS - func.coalesce(func.sum(_LIVE), 0)).label("lapsed"),
    )
    .select_from(nodes.outerjoin(lease_groups))
    .group_by(nodes.c.node_id)
    .order_by(nodes.c.enrolled_at, nodes.c.node_id)
)
_LOCKED = select(nodes).where(nodes.c.node_id == bindparam("node")).with_for_update()


@dataclass(frozen=True, slots=True)
class UserRecord:
    """A user's newest lease, which is at ``index`` of ``group``.

    Once the lease is forgotten, ``index`` and ``group`` are None. ``open`` says whether the lease's
    batch is open; ``epoch`` is this batch's epoch. Until ``barred_before``, the user may not report
    again, because of reports under earlier leases.
    """

    lease: str
    barred_before: int = 0
    group: LeaseGroup | None = None
    index: int | None = None
    open: bool = False
    epoch: Epoch | None = None

    @property
    def reported(self) -> bool:
        """Returns whether the user has reported with the newest lease."""
        group, index = self.group, self.index
        return group is not None and index is not None and group.states[index] == "reported"

    @property
    def barred_until(self) -> int:
        """The time until which the user may not report again, as in `may_report`."""
        return bars_until(self.epoch) if self.reported else self.barred_before

    def live(self, now: int) -> LeaseGroup | None:
        """Returns the group of the newest lease if that lease may report at ``now``."""
        if self.group is None or self.index is None or not self.open:
            return None
        return self.group if self.group.standing(self.index, now) == "live" else None


def user_key(owner: str, user: str) -> str:
    """Returns the id by which the store knows an owner's user."""
    return sha256(sha256(owner.encode()).digest() + bytes.fromhex(user)).hexdigest()[:32]


def find_users(connection: Connection, wanted: Sequence[str]) -> dict[str, UserRecord]:
    """Returns the users that the store already has, and locks their rows."""
    rows = connection.execute(_USERS, {"wanted": wanted}).all()
    groups = groups_of_leases(connection, (row.lease for row in rows))
    records: dict[str, UserRecord] = {}
    for user, lease, until in rows:
        group, is_open, epoch = groups.get(group_of(lease), (None, False, None))
        index = None if group is None else group.index(lease)
        records[user] = UserRecord(lease, until, group, index, is_open, epoch)
    return records


def set_newest_leases(
    connection: Connection,
    node_id: str,
    leases: Sequence[tuple[str, str]],
    existing: Mapping[str, UserRecord],
) -> None:
    """Stores the newest lease of each user, given as (user, lease).

    A user who is not in ``existing`` counts once toward the node's quota.
    """
    known = [
        (lease, existing[user].barred_until, user) for user, lease in leases if user in existing
    ]
    new = [(user, node_id, lease) for user, lease in leases if user not in existing]
    execute_rows(connection, _SET_LEASE, ("newest_lease", "until", "of_user"), known)
    execute_rows(connection, _INSERT, ("user", "node_id", "lease"), new)
    connection.execute(_GROW_NODE, {"node": node_id, "new": len(new), "more": len(leases)})


def enrol(connection: Connection, request: EnrolRequest, now: int) -> Enrolment:
    """Enrols a node. The returned token is stored nowhere."""
    enrolment = Enrolment(
        node_id=secrets.token_hex(16), owner=request.owner, token=secrets.token_urlsafe(32)
    )
    connection.execute(
        insert(nodes).values(
            node_id=enrolment.node_id,
            name=request.name,
            owner=request.owner,
            token_hash=hash_token(enrolment.token),
            quota=request.users,
            enrolled_at=now,
        )
    )
    return enrolment


def revoke(connection: Connection, node_id: str, now: int) -> None:
    """Revokes a node for good; safe to repeat. Raises RemoteError ``not-found``."""
    at = func.coalesce(nodes.c.revoked_at, now)
    revoked = update(nodes).where(nodes.c.node_id == node_id).values(revoked_at=at)
    if connection.execute(revoked).rowcount == 0:
        raise RemoteError("not-found", "no node has this id")
    notify(connection, node_id)


def add_failures(connection: Connection, messages: Mapping[str, int]) -> None:
    """Adds one batch's failed messages to the counts of the nodes that sent them."""
    for node_id in sorted(messages):  # in a fixed order, so that two batches never deadlock
        connection.execute(_BLAME, {"node": node_id, "more": messages[node_id]})


def list_nodes(connection: Connection, now: int) -> NodeList:
    """Returns all nodes with their counts. Reads all leases, so only the operator may call it."""
    rows = connection.execute(_LIST, {"now": now}).mappings()
    return NodeList(nodes=tuple(NodeSummary(**row) for row in rows))


def authenticate(connection: Connection, token: str) -> str:
    """Returns a token's node id; raises RemoteError ``unauthorized`` if no enrolled node has it.

    The token is looked up by its hash, so timing reveals at most something about the hash.
    """
    node_id = connection.scalar(_BY_TOKEN, {"hash": hash_token(token)})
    if node_id is None:
        raise RemoteError(
            "unauthorized", "this token is not that of an enrolled node, or the node was revoked"
        )
    return str(node_id)


def lock_node(connection: Connection, node_id: str) -> tuple[str, int]:
    """Locks a node's row; returns its owner, and how many more distinct users the node may name.

    Because of the lock, every write after the node's revocation raises ``unauthorized``.
    """
    row = connection.execute(_LOCKED, {"node": node_id}).one_or_none()
    if row is None or row.revoked_at is not None:
        raise RemoteError("unauthorized", "this node is not enrolled any more")
    return str(row.owner), int(row.quota - row.users)
