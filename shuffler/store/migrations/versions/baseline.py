"""The shuffler's tables at the first release."""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "shuffler_1"
down_revision = None

ID, HASH, SIGNATURE, WORD = sa.String(32), sa.String(64), sa.String(128), sa.String(16)
BIG, INT, BYTES, FLAG = sa.BigInteger(), sa.Integer(), sa.LargeBinary(), sa.Boolean()


def upgrade() -> None:
    """Creates all tables."""
    _batches()
    _people()
    _leases()
    _of_batches()


def _columns(
    kind: sa.types.TypeEngine[Any], *names: str, nullable: bool = False
) -> list[sa.Column[Any]]:
    return [sa.Column(name, kind, autoincrement=False, nullable=nullable) for name in names]


def _batches() -> None:
    op.create_table(
        "batches",
        *_columns(ID, "batch_id"),
        *_columns(BIG, "deposited"),
        *_columns(BYTES, "descriptor"),
        *_columns(SIGNATURE, "coordinator_signature"),
        *_columns(sa.LargeBinary(length=32), "digest"),
        *_columns(HASH, "batch_key"),
        *_columns(SIGNATURE, "shuffler_signature"),
        *_columns(BIG, "n", "expires_at"),
        *_columns(INT, "report_bytes", "message_bytes"),
        *_columns(WORD, "state"),
        *_columns(BIG, "reports", "episodes", "next_slot"),
        *_columns(HASH, "messages_sha256", nullable=True),
        *_columns(BIG, "forwarded", "discarded"),
        *_columns(WORD, "ended_by", nullable=True),
        *_columns(FLAG, "clean"),
        sa.PrimaryKeyConstraint("batch_id"),
        sa.UniqueConstraint("deposited"),
    )
    op.create_index("ix_batches_state", "batches", ["state"])


def _people() -> None:
    op.create_table(
        "meta", *_columns(ID, "key"), *_columns(BIG, "value"), sa.PrimaryKeyConstraint("key")
    )
    op.create_table(
        "nodes",
        *_columns(ID, "node_id"),
        *_columns(sa.String(100), "name", "owner"),
        *_columns(HASH, "token_hash"),
        *_columns(BIG, "quota", "users"),
        *_columns(FLAG, "revoked"),
        sa.PrimaryKeyConstraint("node_id"),
        sa.UniqueConstraint("token_hash"),
    )
    op.create_index("ix_nodes_owner", "nodes", ["owner"])
    op.create_table(
        "users",
        *_columns(ID, "user", "node_id"),
        *_columns(FLAG, "reported"),
        _of("nodes", "node_id"),
        sa.PrimaryKeyConstraint("user"),
    )


def _leases() -> None:
    op.create_table(
        "leases",
        *_columns(ID, "lease", "batch_id", "user", "node_id"),
        *_columns(BIG, "slot", nullable=True),
        *_columns(BIG, "expires_at"),
        *_columns(HASH, "report_sha256", nullable=True),
        _of("batches", "batch_id"),
        _of("nodes", "node_id"),
        _of("users", "user"),
        sa.PrimaryKeyConstraint("lease"),
        sa.UniqueConstraint("batch_id", "slot"),
    )
    op.create_index("ix_leases_user", "leases", ["user"])
    op.create_index("shares", "leases", ["batch_id", "node_id"])
    pending = sa.text("report_sha256 IS NULL")
    of = ["batch_id", "expires_at"]
    op.create_index("pending", "leases", of, sqlite_where=pending, postgresql_where=pending)


def _of_batches() -> None:
    for name, key, count in (
        ("dropped", _columns(ID, "problem"), _columns(BIG, "frames")),
        ("reports", _columns(BIG, "slot"), _columns(BYTES, "sealed")),
        ("latencies", _columns(INT, "bucket"), _columns(BIG, "uploads")),
    ):
        batch = _columns(ID, "batch_id")
        constraints = _of("batches", "batch_id"), sa.PrimaryKeyConstraint("batch_id", key[0].name)
        op.create_table(name, *batch, *key, *count, *constraints)


def _of(table: str, name: str) -> sa.ForeignKeyConstraint:
    return sa.ForeignKeyConstraint([name], [f"{table}.{name}"])
