"""The coordinator's tables at the first release."""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "coordinator_1"
down_revision = None

_KEY = ["run_id", "index"]


def _column(name: str, kind: type[Any] | sa.String, *, nullable: bool = False) -> sa.Column[Any]:
    return sa.Column(name, kind, nullable=nullable)


def _of_deployment(name: str, *columns: sa.Column[Any]) -> None:
    """Makes a table with at most one row for each deployment."""
    op.create_table(
        name,
        _column("run_id", sa.String(32)),
        _column("index", sa.Integer),
        *columns,
        sa.ForeignKeyConstraint(_KEY, ["deployments.run_id", "deployments.index"]),
        sa.PrimaryKeyConstraint(*_KEY),
    )


def upgrade() -> None:
    """Makes all tables."""
    op.create_table(
        "meta",
        _column("key", sa.String(32)),
        _column("value", sa.BigInteger),
        sa.PrimaryKeyConstraint("key"),
    )
    op.create_table(
        "runs",
        _column("id", sa.String(32)),
        _column("spec", sa.Text),
        _column("state", sa.String(16)),
        _column("message", sa.Text),
        _column("created_at", sa.Float),
        _column("ended_at", sa.Float, nullable=True),
        _column("summary", sa.Text, nullable=True),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_table(
        "drivers",
        _column("run_id", sa.String(32)),
        _column("holder", sa.String(300)),
        _column("until", sa.Float),
        _column("fence", sa.BigInteger),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"]),
        sa.PrimaryKeyConstraint("run_id"),
    )
    op.create_table(
        "events",
        _column("run_id", sa.String(32)),
        sa.Column("id", sa.BigInteger, autoincrement=False, nullable=False),
        _column("kind", sa.String(32)),
        _column("at", sa.Float),
        _column("data", sa.Text),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"]),
        sa.PrimaryKeyConstraint("run_id", "id"),
    )
    _deployments()


def _deployments() -> None:
    op.create_table(
        "deployments",
        _column("run_id", sa.String(32)),
        _column("index", sa.Integer),
        _column("step", sa.Integer),
        _column("stage", sa.Integer),
        _column("purpose", sa.String(16)),
        _column("n", sa.BigInteger),
        _column("layer", sa.Integer, nullable=True),
        _column("batch_id", sa.String(32)),
        _column("descriptor", sa.LargeBinary),
        _column("state", sa.String(16)),
        _column("acknowledged", sa.Boolean),
        _column("messages_sha256", sa.String(64), nullable=True),
        _column("episodes_executed", sa.BigInteger),
        _column("issued_at", sa.Float),
        _column("opened_at", sa.Float, nullable=True),
        _column("settled_at", sa.Float, nullable=True),
        _column("timings", sa.Text),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"]),
        sa.PrimaryKeyConstraint(*_KEY),
        sa.UniqueConstraint("batch_id"),
    )
    _of_deployment("counts", _column("histogram", sa.LargeBinary))
    _of_deployment(
        "released",
        _column("histogram", sa.LargeBinary),
        _column("opened", sa.BigInteger),
        _column("failed", sa.BigInteger),
        _column("messages_sha256", sa.String(64)),
    )
    _of_deployment(
        "ledger",
        _column("epsilon_lower", sa.Float),
        _column("epsilon_upper", sa.Float),
        _column("beta", sa.Float),
        _column("dishonest", sa.BigInteger),
        _column("within_promise", sa.Boolean),
        _column("messages", sa.BigInteger),
        _column("opened", sa.BigInteger),
        _column("failed", sa.BigInteger),
        _column("recorded_at", sa.Float),
    )
    _of_deployment("stages", _column("result", sa.Text))
    _of_deployment("truths", _column("optimal", sa.Float), _column("value", sa.Float))
