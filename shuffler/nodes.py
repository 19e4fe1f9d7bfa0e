"""Nodes and their credentials. Issued by whoever operates the shuffler, never by the coordinator.

A token has 256 random bits; only its SHA-256 is kept. A revoked node stays in the store, so that
its users stay marked.
"""

import secrets
from dataclasses import dataclass

from sqlalchemy import Connection, bindparam, insert, select, update

from riffle.common.endpoint import hash_token
from riffle.common.errors import RemoteError
from riffle.common.news import announce
from riffle.common.wire import Enrolment, EnrolRequest
from riffle.shuffler.schema import nodes

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
