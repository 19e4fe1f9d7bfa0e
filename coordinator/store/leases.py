"""Who drives a run: one replica at a time, for a while, and under a number.

A lease is a row with its holder, the time until which it is held, and a fence: a number that grows
by one whenever the lease goes to somebody else. Every transaction of a driver begins with `check`,
so one that was held up (a pause, a cut network) beyond its time, while another took over, can
change nothing any more. Its calls to the shuffler may still arrive: all of them repeat harmlessly.

Clocks of replicas need to agree within the lease's time for runs to stay where they are, and not at
all for this to be safe. Functions here are inside the caller's transaction.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from sqlalchemy import CompoundSelect, Connection, insert, select, true, update

from riffle.common.protocol.errors import LocalError
from riffle.common.server.database import is_shared
from riffle.coordinator.store import schema
from riffle.coordinator.store.schema import drivers


@dataclass(frozen=True, slots=True)
class Replica:
    """A coordinator by name, and for how many seconds it holds leases without a sign of life."""

    name: str
    lease_seconds: float


@dataclass(frozen=True, slots=True)
class RunLease:
    """The right to drive a run, good until its fence is no longer the row's."""

    run_id: str
    fence: int


class LeaseLostError(LocalError):
    """Another replica drives the run now."""

    def __init__(self, run_id: str) -> None:
        super().__init__("wrong-state", f"run {run_id} is driven by another replica now")


def grant(connection: Connection, run_id: str, holder: str, until: float) -> RunLease:
    """The first lease of a new run."""
    row = {"run_id": run_id, "holder": holder, "until": until, "fence": 1}
    connection.execute(insert(drivers).values(row))
    return RunLease(run_id, 1)


def take(
    connection: Connection,
    runs: CompoundSelect[str],
    holder: str,
    now: float,
    until: float,
    *,
    start: bool,
) -> list[RunLease]:
    """Leases of those ``runs`` that nobody drives, for ``holder``.

    ``start``: also those that this holder left behind when it was last ended; on SQLite, which one
    process has for itself, all.
    """
    free = drivers.c.until <= now
    if start:
        free = free | (drivers.c.holder == holder) if is_shared(connection.engine) else true()
    found = select(drivers.c.run_id, drivers.c.fence).where(drivers.c.run_id.in_(runs), free)
    # A row that another replica is just taking is not waited for.
    rows = connection.execute(found.with_for_update(skip_locked=True)).all()
    taken = [RunLease(row.run_id, row.fence + 1) for row in rows]
    for lease in taken:
        values = {"holder": holder, "until": until, "fence": lease.fence}
        connection.execute(update(drivers).where(drivers.c.run_id == lease.run_id).values(values))
    return taken


def hold(connection: Connection, leases: Iterable[RunLease], until: float) -> list[RunLease]:
    """Hold leases until another time, or give them up with a past one; returns those lost."""
    return [
        lease
        for lease in leases
        if connection.execute(
            update(drivers)
            .where(drivers.c.run_id == lease.run_id, drivers.c.fence == lease.fence)
            .values(until=until)
        ).rowcount
        == 0
    ]


def check(connection: Connection, lease: RunLease) -> None:
    """Raise LeaseLostError unless the lease is still good; it then is until the commit."""
    if connection.scalar(schema.FENCE, {"run_id": lease.run_id}) != lease.fence:
        raise LeaseLostError(lease.run_id)
