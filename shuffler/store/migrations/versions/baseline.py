"""The shuffler's tables at the first release."""

import sqlalchemy as sa
from alembic import op

revision = "shuffler_1"
down_revision = None


def upgrade() -> None:
    """Make all tables."""
    _batches()
    _meta()
    _nodes()
    _dropped()
    _latencies()
    _reports()
    _users()
    _leases()


def _batches() -> None:
    op.create_table(
        "batches",
        sa.Column("batch_id", sa.String(length=32), nullable=False),
        sa.Column("deposited", sa.BigInteger(), nullable=False),
        sa.Column("descriptor", sa.LargeBinary(), nullable=False),
        sa.Column("coordinator_signature", sa.String(length=128), nullable=False),
        sa.Column("digest", sa.LargeBinary(length=32), nullable=False),
        sa.Column("batch_key", sa.String(length=64), nullable=False),
        sa.Column("shuffler_signature", sa.String(length=128), nullable=False),
        sa.Column("n", sa.BigInteger(), nullable=False),
        sa.Column("expires_at", sa.BigInteger(), nullable=False),
        sa.Column("report_bytes", sa.Integer(), nullable=False),
        sa.Column("message_bytes", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("reports", sa.BigInteger(), nullable=False),
        sa.Column("episodes", sa.BigInteger(), nullable=False),
        sa.Column("next_slot", sa.BigInteger(), nullable=False),
        sa.Column("messages_sha256", sa.String(length=64), nullable=True),
        sa.Column("forwarded", sa.BigInteger(), nullable=False),
        sa.Column("discarded", sa.BigInteger(), nullable=False),
        sa.Column("ended_by", sa.String(length=16), nullable=True),
        sa.Column("clean", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("batch_id"),
        sa.UniqueConstraint("deposited"),
    )
    op.create_index("ix_batches_state", "batches", ["state"])


def _meta() -> None:
    op.create_table(
        "meta",
        sa.Column("key", sa.String(length=32), nullable=False),
        sa.Column("value", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("key"),
    )


def _nodes() -> None:
    op.create_table(
        "nodes",
        sa.Column("node_id", sa.String(length=32), nullable=False),
        sa.Column("name", sa.String(length=100), nullable=False),
        sa.Column("token_hash", sa.String(length=64), nullable=False),
        sa.Column("quota", sa.BigInteger(), nullable=False),
        sa.Column("users", sa.BigInteger(), nullable=False),
        sa.Column("revoked", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("node_id"),
        sa.UniqueConstraint("token_hash"),
    )


def _dropped() -> None:
    op.create_table(
        "dropped",
        sa.Column("batch_id", sa.String(length=32), nullable=False),
        sa.Column("problem", sa.String(length=32), nullable=False),
        sa.Column("frames", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["batch_id"], ["batches.batch_id"]),
        sa.PrimaryKeyConstraint("batch_id", "problem"),
    )


def _reports() -> None:
    op.create_table(
        "reports",
        sa.Column("batch_id", sa.String(length=32), nullable=False),
        sa.Column("slot", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("sealed", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["batch_id"], ["batches.batch_id"]),
        sa.PrimaryKeyConstraint("batch_id", "slot"),
    )


def _users() -> None:
    op.create_table(
        "users",
        sa.Column("user", sa.String(length=32), nullable=False),
        sa.Column("node_id", sa.String(length=32), nullable=False),
        sa.Column("reported", sa.Boolean(), nullable=False),
        sa.ForeignKeyConstraint(["node_id"], ["nodes.node_id"]),
        sa.PrimaryKeyConstraint("user"),
    )


def _leases() -> None:
    op.create_table(
        "leases",
        sa.Column("lease", sa.String(length=32), nullable=False),
        sa.Column("batch_id", sa.String(length=32), nullable=False),
        sa.Column("user", sa.String(length=32), nullable=False),
        sa.Column("node_id", sa.String(length=32), nullable=False),
        sa.Column("slot", sa.BigInteger(), nullable=True),
        sa.Column("expires_at", sa.BigInteger(), nullable=False),
        sa.Column("report_sha256", sa.String(length=64), nullable=True),
        sa.ForeignKeyConstraint(["batch_id"], ["batches.batch_id"]),
        sa.ForeignKeyConstraint(["node_id"], ["nodes.node_id"]),
        sa.ForeignKeyConstraint(["user"], ["users.user"]),
        sa.PrimaryKeyConstraint("lease"),
        sa.UniqueConstraint("batch_id", "slot"),
    )
    op.create_index("ix_leases_user", "leases", ["user"])
    op.create_index("shares", "leases", ["batch_id", "node_id"])
    op.create_index(
        "pending",
        "leases",
        ["batch_id", "expires_at"],
        sqlite_where=sa.text("report_sha256 IS NULL"),
        postgresql_where=sa.text("report_sha256 IS NULL"),
    )


def _latencies() -> None:
    op.create_table(
        "latencies",
        sa.Column("batch_id", sa.String(length=32), nullable=False),
        sa.Column("bucket", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("uploads", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["batch_id"], ["batches.batch_id"]),
        sa.PrimaryKeyConstraint("batch_id", "bucket"),
    )
