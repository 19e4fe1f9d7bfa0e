"""Users: whose they are, and the newest lease of each.

A user reports once, over all batches and runs. What says that it has is its newest lease, which is
never replaced once it has reported; so a user's row and that lease outlive their batch.

Nodes and their credentials. Issued by whoever operates the shuffler, never by the coordinator.

A token has 256 random bits; only its SHA-256 is kept. A revoked node stays in the store, so that
its users stay marked.
"""

import secrets
from collections.abc import Container, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, bindparam, insert, select, update

from riffle.common.process.endpoint import hash_token
from riffle.common.protocol.errors import RemoteError
from riffle.common.protocol.messages import Enrolment, EnrolRequest
from riffle.common.server.statements import announce, execute_rows, is_one_of
from riffle.shuffler.store import leases as grants
from riffle.shuffler.store.leases import Grant
from riffle.shuffler.store.schema import nodes, users

_KNOWN = (
    select(users.c.user, users.c.node_id, users.c.lease)
    .where(is_one_of(users.c.user, "wanted"))
    .with_for_update()
)
_NEW = insert(users)
_AGAIN = update(users).where(users.c.user == bindparam("whose")).values(lease=bindparam("newest"))
_GROW_NODE = (
    update(nodes)
    .where(nodes.c.node_id == bindparam("node"))
    .values(users=nodes.c.users + bindparam("more"))
)


@dataclass(frozen=True, slots=True)
class Known:
    """A user: the node that first named it and its newest lease, if the store still has that one:
    ``place`` of ``grant``, which is of an ``open`` batch or of one that is closed."""

    owner: str
    lease: str | None
    grant: Grant | None = None
    place: int | None = None
    open: bool = False

    @property
    def reported(self) -> bool:
        """Whether it has reported, in any batch."""
        return self.grant is not None and self.place is not None and self.grant.reported(self.place)

    def live(self, now: int) -> Grant | None:
        """The grant of its newest lease, if that one may report at ``now``."""
        if self.grant is None or self.place is None or not self.open:
            return None
        return self.grant if self.grant.standing(self.place, now) == "live" else None


def known(connection: Connection, wanted: Sequence[str]) -> dict[str, Known]:
    """Those of the users that the store knows; locked until the end."""
    rows = connection.execute(_KNOWN, {"wanted": wanted}).all()
    of = grants.with_open(connection, (row.lease for row in rows if row.lease is not None))
    found: dict[str, Known] = {}
    for user, owner, lease in rows:
        grant, is_open = of.get(grants.grant_id(lease), (None, False)) if lease else (None, False)
        place = None if grant is None else grant.find(lease)
        found[user] = Known(owner, lease, grant, place, is_open)
    return found


def note(
    connection: Connection,
    node_id: str,
    leases: Sequence[tuple[str, str]],
    known: Container[str],
) -> None:
    """Note users' newest leases, given as (user, lease). One that was not ``known`` is the node's
    from now on, and counts toward its quota once."""
    again = [(lease, user) for user, lease in leases if user in known]
    new = [(user, node_id, lease) for user, lease in leases if user not in known]
    execute_rows(connection, _AGAIN, ("newest", "whose"), again)
    execute_rows(connection, _NEW, ("user", "node_id", "lease"), new)
    if new:
        connection.execute(_GROW_NODE, {"node": node_id, "more": len(new)})


_BY_TOKEN = select(nodes.c.node_id).where(
    nodes.c.token_hash == bindparam("hash"), nodes.c.revoked.is_(False)
)
_LOCKED = select(nodes).where(nodes.c.node_id == bindparam("node")).with_for_update()


@dataclass(frozen=True, slots=True)
class Node:
    """An enrolled node and how many more distinct users it may name."""

    node_id: str
    quota_left: int


def enrol(connection: Connection, request: EnrolRequest) -> Enrolment:
    """Enrol a node; the token is in the answer and nowhere else."""
    enrolment = Enrolment(node_id=secrets.token_hex(16), token=secrets.token_urlsafe(32))
    connection.execute(
        insert(nodes).values(
            node_id=enrolment.node_id,
            name=request.name,
            token_hash=hash_token(enrolment.token),
            quota=request.users,
        )
    )
    return enrolment


def revoke(connection: Connection, node_id: str) -> None:
    """Refuse a node from now on; revoking twice is the same as once.

    Raises:
        RemoteError: ``not-found``.
    """
    found = connection.execute(update(nodes).where(nodes.c.node_id == node_id).values(revoked=True))
    if found.rowcount == 0:
        raise RemoteError("not-found", "no node has this id")
    announce(connection, node_id)


def authenticate(connection: Connection, token: str) -> str:
    """Node id of a token.

    The token is looked up by its hash, so timing tells at most something about hashes.

    Raises:
        RemoteError: ``unauthorized``: unknown, or revoked.
    """
    node_id = connection.scalar(_BY_TOKEN, {"hash": hash_token(token)})
    if node_id is None:
        raise RemoteError("unauthorized", "this token is not that of an enrolled node")
    return str(node_id)


def lock(connection: Connection, node_id: str) -> Node:
    """The node, for the rest of the transaction; a revocation before it is seen.

    Raises:
        RemoteError: ``unauthorized``.
    """
    row = connection.execute(_LOCKED, {"node": node_id}).one_or_none()
    if row is None or row.revoked:
        raise RemoteError("unauthorized", "this node is not enrolled any more")
    return Node(node_id, row.quota - row.users)
