"""The coordinator's tables at the first release."""

import sqlalchemy as sa
from alembic import op

revision = "coordinator_1"
down_revision = None


def upgrade() -> None:
    """Make all tables."""
    _meta()
    _runs()
    _drivers()
    _deployments()
    _events()
    _counts()
    _released()
    _ledger()
    _stages()
    _truths()


def _meta() -> None:
    op.create_table(
        "meta",
        sa.Column("key", sa.String(length=32), nullable=False),
        sa.Column("value", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("key"),
    )


def _runs() -> None:
    op.create_table(
        "runs",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("spec", sa.Text(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("ended_at", sa.Float(), nullable=True),
        sa.Column("summary", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("id"),
    )


def _drivers() -> None:
    op.create_table(
        "drivers",
        sa.Column("run_id", sa.String(length=32), nullable=False),
        sa.Column("holder", sa.String(length=300), nullable=False),
        sa.Column("until", sa.Float(), nullable=False),
        sa.Column("fence", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"]),
        sa.PrimaryKeyConstraint("run_id"),
    )


def _deployments() -> None:
    op.create_table(
        "deployments",
        sa.Column("run_id", sa.String(length=32), nullable=False),
        sa.Column("index", sa.Integer(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("stage", sa.Integer(), nullable=False),
        sa.Column("purpose", sa.String(length=16), nullable=False),
        sa.Column("n", sa.BigInteger(), nullable=False),
        sa.Column("layer", sa.Integer(), nullable=True),
        sa.Column("batch_id", sa.String(length=32), nullable=False),
        sa.Column("descriptor", sa.LargeBinary(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("acknowledged", sa.Boolean(), nullable=False),
        sa.Column("messages_sha256", sa.String(length=64), nullable=True),
        sa.Column("episodes_executed", sa.BigInteger(), nullable=False),
        sa.Column("issued_at", sa.Float(), nullable=False),
        sa.Column("opened_at", sa.Float(), nullable=True),
        sa.Column("settled_at", sa.Float(), nullable=True),
        sa.Column("timings", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"]),
        sa.PrimaryKeyConstraint("run_id", "index"),
        sa.UniqueConstraint("batch_id"),
    )


def _events() -> None:
    op.create_table(
        "events",
        sa.Column("run_id", sa.String(length=32), nullable=False),
        sa.Column("id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("kind", sa.String(length=32), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("data", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"]),
        sa.PrimaryKeyConstraint("run_id", "id"),
    )


def _counts() -> None:
    op.create_table(
        "counts",
        sa.Column("run_id", sa.String(length=32), nullable=False),
        sa.Column("index", sa.Integer(), nullable=False),
        sa.Column("histogram", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["run_id", "index"], ["deployments.run_id", "deployments.index"]),
        sa.PrimaryKeyConstraint("run_id", "index"),
    )


def _released() -> None:
    op.create_table(
        "released",
        sa.Column("run_id", sa.String(length=32), nullable=False),
        sa.Column("index", sa.Integer(), nullable=False),
        sa.Column("histogram", sa.LargeBinary(), nullable=False),
        sa.Column("opened", sa.BigInteger(), nullable=False),
        sa.Column("failed", sa.BigInteger(), nullable=False),
        sa.Column("messages_sha256", sa.String(length=64), nullable=False),
        sa.ForeignKeyConstraint(["run_id", "index"], ["deployments.run_id", "deployments.index"]),
        sa.PrimaryKeyConstraint("run_id", "index"),
    )


def _ledger() -> None:
    op.create_table(
        "ledger",
        sa.Column("run_id", sa.String(length=32), nullable=False),
        sa.Column("index", sa.Integer(), nullable=False),
        sa.Column("epsilon_lower", sa.Float(), nullable=False),
        sa.Column("epsilon_upper", sa.Float(), nullable=False),
        sa.Column("beta", sa.Float(), nullable=False),
        sa.Column("dishonest", sa.BigInteger(), nullable=False),
        sa.Column("within_promise", sa.Boolean(), nullable=False),
        sa.Column("messages", sa.BigInteger(), nullable=False),
        sa.Column("opened", sa.BigInteger(), nullable=False),
        sa.Column("failed", sa.BigInteger(), nullable=False),
        sa.Column("recorded_at", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["run_id", "index"], ["deployments.run_id", "deployments.index"]),
        sa.PrimaryKeyConstraint("run_id", "index"),
    )


def _stages() -> None:
    op.create_table(
        "stages",
        sa.Column("run_id", sa.String(length=32), nullable=False),
        sa.Column("index", sa.Integer(), nullable=False),
        sa.Column("result", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["run_id", "index"], ["deployments.run_id", "deployments.index"]),
        sa.PrimaryKeyConstraint("run_id", "index"),
    )


def _truths() -> None:
    op.create_table(
        "truths",
        sa.Column("run_id", sa.String(length=32), nullable=False),
        sa.Column("index", sa.Integer(), nullable=False),
        sa.Column("optimal", sa.Float(), nullable=False),
        sa.Column("value", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["run_id", "index"], ["deployments.run_id", "deployments.index"]),
        sa.PrimaryKeyConstraint("run_id", "index"),
    )
