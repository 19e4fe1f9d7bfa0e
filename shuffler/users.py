"""Users: whose they are, and the newest lease of each.

A user reports once, over all batches and runs. What says that it has is its newest lease, which is
never replaced once it has reported; so a user's row and that lease outlive their batch.
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, bindparam, insert, select, update

from riffle.common.statements import execute_rows, is_one_of
from riffle.shuffler import grants
from riffle.shuffler.grants import Grant
from riffle.shuffler.schema import nodes, users

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
