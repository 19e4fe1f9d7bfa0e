"""The leases of one request share a row, and so do the reports of one upload.

Each old lease becomes a row of its own. A lease id is its slot and 64 random bits; the oldest ids
were all random and get the slot now. A user's newest lease says whether the user has reported.
"""

from collections.abc import Iterator
from typing import Any

import sqlalchemy as sa
from alembic import op

from riffle.common.protocol.errors import LocalError

revision = "shuffler_3"
down_revision = "shuffler_2"

_AT_ONCE = 500
_NAME_REPORTED = """
UPDATE users SET lease = (
    SELECT leases.lease FROM leases
    WHERE leases."user" = users."user" AND leases.report_sha256 IS NOT NULL
)
WHERE reported
"""
_UNNAMED = "SELECT count(*) FROM users WHERE reported AND lease IS NULL"
_LEASES = "SELECT * FROM leases WHERE lease > :after ORDER BY lease LIMIT :most"
_REPORTS = """
SELECT * FROM old_reports WHERE (batch_id, slot) > (:batch, :slot)
ORDER BY batch_id, slot LIMIT :most
"""
_RENAME = 'UPDATE users SET lease = :new WHERE "user" = :user AND lease = :old'


def upgrade() -> None:
    """Keeps every lease and every report."""
    _name_the_reported()
    _make_grants()
    _make_reports()
    op.drop_table("leases")
    op.drop_column("users", "reported")


def _name_the_reported() -> None:
    op.create_index("whose", "leases", ["user"])
    op.execute(_NAME_REPORTED)
    if op.get_bind().scalar(sa.text(_UNNAMED)):
        raise LocalError("unavailable", "users have reported of whom no lease is stored")


def _make_grants() -> None:
    op.drop_index("pending", "leases")
    op.drop_index("shares", "leases")
    grants = op.create_table(
        "grants",
        sa.Column("grant_id", sa.String(length=16), nullable=False),
        sa.Column("batch_id", sa.String(length=32), nullable=False),
        sa.Column("node_id", sa.String(length=32), nullable=False),
        sa.Column("expires_at", sa.BigInteger(), nullable=False),
        sa.Column("pending", sa.Integer(), nullable=False),
        sa.Column("reports", sa.Integer(), nullable=False),
        sa.Column("slots", sa.LargeBinary(), nullable=False),
        sa.Column("states", sa.Text(), nullable=False),
        sa.Column("users", sa.LargeBinary(), nullable=False),
        sa.Column("digests", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["batch_id"], ["batches.batch_id"]),
        sa.ForeignKeyConstraint(["node_id"], ["nodes.node_id"]),
        sa.PrimaryKeyConstraint("grant_id"),
    )
    for leases in _pages(_LEASES, after=""):
        op.bulk_insert(grants, [_grant(row) for row in leases])
        renamed = [
            {"new": new, "user": row.user, "old": row.lease}
            for row in leases
            if (new := f"{_slot(row):016x}{row.lease[16:]}") != row.lease
        ]
        if renamed:
            op.get_bind().execute(sa.text(_RENAME), renamed)
    op.create_index("shares", "grants", ["batch_id", "node_id", "expires_at", "pending", "reports"])
    op.create_index(
        "pending",
        "grants",
        ["batch_id", "expires_at", "pending"],
        sqlite_where=sa.text("pending > 0"),
        postgresql_where=sa.text("pending > 0"),
    )


def _make_reports() -> None:
    op.rename_table("reports", "old_reports")
    reports = op.create_table(
        "reports",
        sa.Column("batch_id", sa.String(length=32), nullable=False),
        sa.Column("slot", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("held", sa.Integer(), nullable=False),
        sa.Column("slots", sa.LargeBinary(), nullable=False),
        sa.Column("sealed", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["batch_id"], ["batches.batch_id"]),
        sa.PrimaryKeyConstraint("batch_id", "slot"),
    )
    for rows in _pages(_REPORTS, batch="", slot=-1):
        each = [{"held": 1, "slots": _stored(row.slot), **row._mapping} for row in rows]
        op.bulk_insert(reports, each)
    op.drop_table("old_reports")


def _pages(query: str, **start: str | int) -> Iterator[list[sa.Row[Any]]]:
    """Yields the rows of a query in pages, each page after the last key of the one before."""
    key = dict(start)
    while rows := list(op.get_bind().execute(sa.text(query), {**key, "most": _AT_ONCE})):
        yield rows
        last = rows[-1]
        key = (
            {"after": last.lease} if "after" in key else {"batch": last.batch_id, "slot": last.slot}
        )


def _slot(row: sa.Row[Any]) -> int:
    """Returns a lease's slot; for a lease that lost it, the one in its id, which nothing reads."""
    if row.slot is not None:
        return int(row.slot)
    named = int(row.lease[:16], 16)
    return named if named < 1 << 32 else 0


def _grant(row: sa.Row[Any]) -> dict[str, object]:
    reported = row.report_sha256 is not None
    return {
        "grant_id": row.lease[16:],
        "batch_id": row.batch_id,
        "node_id": row.node_id,
        "expires_at": row.expires_at,
        "pending": int(row.slot is not None and not reported),
        "reports": int(reported),
        "slots": _stored(_slot(row)),
        "states": "r" if reported else "l" if row.slot is None else "h",
        "users": bytes.fromhex(row.user),
        "digests": bytes.fromhex(row.report_sha256) if reported else bytes(32),
    }


def _stored(slot: int) -> bytes:
    return slot.to_bytes(4, "little")
