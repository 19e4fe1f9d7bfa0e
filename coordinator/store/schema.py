"""The coordinator's tables. How its database is opened: `common.server.database`.

A change here needs a revision in ``migrations``; a test compares the two.

What drivers and followers ask of the store at every turn, as statements that are built once.

Built anew each time, what a driver asks before a step took 0.8 ms, 0.6 of them to build and to
compile it again. Parameters: ``run_id``, ``index``, ``after`` (an event's number); those of an
update's row are ``of_run`` and ``at``, as its own columns keep their names for what they become.
"""

from pathlib import Path
from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Engine,
    Float,
    ForeignKeyConstraint,
    Integer,
    LargeBinary,
    MetaData,
    Select,
    String,
    Table,
    Text,
    bindparam,
    func,
    select,
    update,
)
from sqlalchemy.sql.elements import ColumnElement

from riffle.common.server.database import Schema, meta_table, open_database
from riffle.coordinator.states import TO_ACKNOWLEDGE, UNSETTLED

SCHEMA = Schema(Path(__file__).with_name("migrations"), "coordinator_1")

metadata = MetaData()

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
)


drivers = Table(
    "drivers",
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
    Column("episodes_executed", BigInteger, nullable=False),
    Column("issued_at", Float, nullable=False),
    Column("opened_at", Float),
    Column("settled_at", Float),
    Column("timings", Text, nullable=False),
    ForeignKeyConstraint(["run_id"], ["runs.id"]),
)

# One row a batch whose counts are used, so that no batch is counted twice.
counts = Table(
    "counts", metadata, *_of_deployment(Column("histogram", LargeBinary, nullable=False))
)

# One row a batch whose noise the coordinator itself drew, from the draw until it is settled.
released = Table(
    "released",
    metadata,
    *_of_deployment(
        Column("histogram", LargeBinary, nullable=False),
        Column("opened", BigInteger, nullable=False),
        Column("failed", BigInteger, nullable=False),
        Column("messages_sha256", String(64), nullable=False),
    ),
)

# One row a batch that was opened, whether or not its counts are used.
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
    ),
)

stages = Table(
    "stages",
    metadata,
    *_of_deployment(Column("result", Text, nullable=False)),
)

# What the operator of a simulated environment supplies; see `coordinator.learning.true_values`.
truths = Table(
    "truths",
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


def open_store(url: str) -> Engine:
    """Engine of the store at ``url``; raises as `common.server.database.open_database` does."""
    return open_database(url, SCHEMA)


def _of_run(table: Table) -> Select[Any]:
    rows = select(table).where(table.c.run_id == bindparam("run_id"))
    return rows.order_by(table.c["index"])


def _one(table: Table) -> Select[Any]:
    return _of_run(table).where(table.c["index"] == bindparam("index"))


def _unsettled() -> ColumnElement[bool]:
    state = deployments.c.state
    to_acknowledge = state.in_(TO_ACKNOWLEDGE) & deployments.c.acknowledged.is_(False)
    return state.in_(UNSETTLED) | to_acknowledge


RUN = select(runs).where(runs.c.id == bindparam("run_id"))
DEPLOYMENTS, COUNTS, LEDGER, STAGES = map(_of_run, (deployments, counts, ledger, stages))
DEPLOYMENT, RELEASED = _one(deployments), _one(released)
NEWEST = DEPLOYMENTS.order_by(None).order_by(deployments.c["index"].desc()).limit(1)

NEXT_WORK = DEPLOYMENTS.where(_unsettled()).limit(1)
NEEDING_KEYS = select(deployments.c.descriptor).where(_unsettled())
WITH_WORK = (
    select(runs.c.id)
    .where(runs.c.state == "running")
    .union(select(deployments.c.run_id).where(_unsettled()))
)

_OF_RUN = events.c.run_id == bindparam("run_id")
EVENTS = select(events).where(_OF_RUN, events.c.id > bindparam("after")).order_by(events.c.id)
LAST_EVENT = select(func.max(events.c.id)).where(_OF_RUN)
FENCE = select(drivers.c.fence).where(drivers.c.run_id == bindparam("run_id")).with_for_update()

CHANGE = update(deployments).where(
    deployments.c.run_id == bindparam("of_run"), deployments.c["index"] == bindparam("at")
)
