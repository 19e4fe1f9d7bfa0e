"""The coordinator's tables. `common.server.database` opens the database.

Every change of a table must raise the version of the schema.
"""

from functools import partial
from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Float,
    ForeignKeyConstraint,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
)

from riffle.common.server.database import Schema, meta_table, open_database

metadata = MetaData()

SCHEMA = Schema("coordinator", 1, metadata)

meta = meta_table(metadata)

runs = Table(
    "runs",
    metadata,
    Column("id", String(32), primary_key=True),
    Column("spec", Text, nullable=False),
    Column("state", String(16), nullable=False),
    Column("message", Text, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("ended_at", Float),
    Column("summary", Text),
    Column("trouble", Text, nullable=False),
)

run_leases = Table(
    "run_leases",
    metadata,
    Column("run_id", String(32), primary_key=True),
    Column("holder", String(300), nullable=False),
    Column("until", Float, nullable=False),
    Column("fence", BigInteger, nullable=False),
    ForeignKeyConstraint(["run_id"], ["runs.id"]),
)


def _of_deployment(*columns: Column[Any]) -> tuple[Column[Any] | ForeignKeyConstraint, ...]:
    return (
        Column("run_id", String(32), primary_key=True),
        Column("index", Integer, primary_key=True),
        *columns,
        ForeignKeyConstraint(["run_id", "index"], ["deployments.run_id", "deployments.index"]),
    )


deployments = Table(
    "deployments",
    metadata,
    Column("run_id", String(32), primary_key=True),
    Column("index", Integer, primary_key=True),
    Column("step", Integer, nullable=False),
    Column("stage", Integer, nullable=False),
    Column("purpose", String(16), nullable=False),
    Column("n", BigInteger, nullable=False),
    Column("layer", Integer),
    Column("batch_id", String(32), nullable=False, unique=True),
    Column("descriptor", LargeBinary, nullable=False),
    Column("state", String(16), nullable=False),
    Column("acknowledged", Boolean, nullable=False),
    Column("messages_sha256", String(64)),
    # Positions of failed messages, kept from settlement until the shuffler knows them.
    Column("named", Text),
    Column("episodes_executed", BigInteger, nullable=False),
    Column("issued_at", Float, nullable=False),
    Column("opened_at", Float),
    Column("settled_at", Float),
    Column("timings", Text, nullable=False),
    ForeignKeyConstraint(["run_id"], ["runs.id"]),
)

# One row for each batch whose counts are used, so that no batch is counted twice.
counts = Table(
    "counts", metadata, *_of_deployment(Column("histogram", LargeBinary, nullable=False))
)

# One row, until settlement, for each batch whose noise the coordinator has drawn itself.
released = Table(
    "released",
    metadata,
    *_of_deployment(
        Column("histogram", LargeBinary, nullable=False),
        Column("opened", BigInteger, nullable=False),
        Column("failed", BigInteger, nullable=False),
        Column("messages_sha256", String(64), nullable=False),
        Column("named", Text, nullable=False),
    ),
)

# One row for each opened batch, whether or not its counts are used.
ledger = Table(
    "ledger",
    metadata,
    *_of_deployment(
        Column("epsilon_lower", Float, nullable=False),
        Column("epsilon_upper", Float, nullable=False),
        Column("beta", Float, nullable=False),
        Column("dishonest", BigInteger, nullable=False),
        Column("within_promise", Boolean, nullable=False),
        Column("messages", BigInteger, nullable=False),
        Column("opened", BigInteger, nullable=False),
        Column("failed", BigInteger, nullable=False),
        Column("recorded_at", Float, nullable=False),
        # The `batches.counts.CountCheck` of the counts, if they were tested.
        Column("test", String(16)),
        Column("deviation", Float),
        Column("chance", Float),
    ),
)

stages = Table("stages", metadata, *_of_deployment(Column("result", Text, nullable=False)))

# True values that an operator supplies; see `coordinator.learning.true_values`.
true_values = Table(
    "true_values",
    metadata,
    *_of_deployment(
        Column("optimal", Float, nullable=False), Column("value", Float, nullable=False)
    ),
)

events = Table(
    "events",
    metadata,
    Column("run_id", String(32), primary_key=True),
    Column("id", BigInteger, primary_key=True, autoincrement=False),
    Column("kind", String(32), nullable=False),
    Column("at", Float, nullable=False),
    Column("data", Text, nullable=False),
    ForeignKeyConstraint(["run_id"], ["runs.id"]),
)


open_store = partial(open_database, SCHEMA)
"""Opens the store at a URL; raises the errors of `common.server.database.open_database`."""
