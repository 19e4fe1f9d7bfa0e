"""Tables of the shuffler's store, and how a database is opened.

SQLAlchemy Core over SQLite (write-ahead log, every commit synced) or any database it knows by URL.
The file carries a schema version; a newer one is refused, so that an old program never writes
into a store it does not understand.

A user's row outlives its batch: it is what makes a second report impossible over batches and runs.
"""

import sqlite3
from pathlib import Path

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Connection,
    Engine,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    UniqueConstraint,
    create_engine,
    event,
    insert,
    inspect,
    select,
)
from sqlalchemy.exc import DatabaseError, SQLAlchemyError

from common.errors import LocalError

SCHEMA_VERSION = 1
WRITE = "riffle_write"

metadata = MetaData()

meta = Table(
    "meta",
    metadata,
    Column("key", String(32), primary_key=True),
    Column("value", BigInteger, nullable=False),
)

nodes = Table(
    "nodes",
    metadata,
    Column("node_id", String(32), primary_key=True),
    Column("name", String(100), nullable=False),
    Column("token_hash", String(64), nullable=False, unique=True),
    Column("quota", BigInteger, nullable=False),
    Column("users", BigInteger, nullable=False, default=0),
    Column("revoked", Boolean, nullable=False, default=False),
)

users = Table(
    "users",
    metadata,
    Column("user", String(32), primary_key=True),
    Column("node_id", String(32), ForeignKey("nodes.node_id"), nullable=False),
    Column("reported", Boolean, nullable=False, default=False),
)

batches = Table(
    "batches",
    metadata,
    Column("batch_id", String(32), primary_key=True),
    Column("deposited", BigInteger, nullable=False, unique=True),
    Column("descriptor", LargeBinary, nullable=False),
    Column("coordinator_signature", String(128), nullable=False),
    Column("digest", LargeBinary(32), nullable=False),
    Column("batch_key", String(64), nullable=False),
    Column("shuffler_signature", String(128), nullable=False),
    Column("n", BigInteger, nullable=False),
    Column("expires_at", BigInteger, nullable=False),
    Column("report_bytes", Integer, nullable=False),
    Column("message_bytes", Integer, nullable=False),
    Column("state", String(16), nullable=False, index=True),
    Column("reports", BigInteger, nullable=False, default=0),
    Column("episodes", BigInteger, nullable=False, default=0),
    Column("next_slot", BigInteger, nullable=False, default=0),
    Column("messages_sha256", String(64)),
    # Secret destroyed and reports deleted; only then is an erased or abandoned batch done with.
    Column("clean", Boolean, nullable=False, default=False),
)

leases = Table(
    "leases",
    metadata,
    Column("lease", String(32), primary_key=True),
    Column("batch_id", String(32), ForeignKey("batches.batch_id"), nullable=False),
    Column("user", String(32), ForeignKey("users.user"), nullable=False, index=True),
    Column("node_id", String(32), ForeignKey("nodes.node_id"), nullable=False),
    # NULL once the lease expired and its slot went to another; two NULLs are not equal in SQL.
    Column("slot", BigInteger),
    Column("expires_at", BigInteger, nullable=False),
    Column("report_sha256", String(64)),
    UniqueConstraint("batch_id", "slot"),
)
Index(
    "pending",
    leases.c.batch_id,
    leases.c.expires_at,
    sqlite_where=leases.c.report_sha256.is_(None),
    postgresql_where=leases.c.report_sha256.is_(None),
)

reports = Table(
    "reports",
    metadata,
    Column("batch_id", String(32), ForeignKey("batches.batch_id"), primary_key=True),
    Column("slot", BigInteger, primary_key=True, autoincrement=False),
    Column("sealed", LargeBinary, nullable=False),
)

dropped = Table(
    "dropped",
    metadata,
    Column("batch_id", String(32), ForeignKey("batches.batch_id"), primary_key=True),
    Column("problem", String(32), primary_key=True),
    Column("frames", BigInteger, nullable=False),
)


def open_store(url: str) -> Engine:
    """Engine of the store at ``url``, its tables made if it is new.

    Raises:
        LocalError: the database is damaged, newer than this program, or out of reach.
    """
    # Parameters stay out of error texts: they hold node, user and lease ids.
    engine = create_engine(url, hide_parameters=True)
    if engine.dialect.name == "sqlite":
        _prepare_sqlite(engine)
    try:
        with engine.execution_options(**{WRITE: True}).begin() as connection:
            _check_integrity(connection)
            _check_version(connection)
            metadata.create_all(connection)
    except LocalError:
        engine.dispose()
        raise
    except SQLAlchemyError as error:
        engine.dispose()
        raise LocalError("unavailable", _explain(error, engine)) from error
    return engine


def sqlite_url(directory: Path) -> str:
    """The default store: one file in the data directory."""
    return f"sqlite:///{directory / 'shuffler.sqlite'}"


def not_usable(what: str, error: Exception) -> LocalError:
    """The error of a store that could not be read or written; the asker may try again.

    The database's own text may quote what was being written, so only its kind is told.
    """
    kind = type(getattr(error, "orig", None) or error).__name__
    failure = LocalError("unavailable", f"the store could not be {what} ({kind})", retry_after=1)
    failure.__cause__ = error
    return failure


def _prepare_sqlite(engine: Engine) -> None:
    """The one place with SQLite's own words."""

    @event.listens_for(engine, "connect")
    def connect(connection: sqlite3.Connection, _record: object) -> None:
        connection.isolation_level = None  # transactions begin where we say so, below
        for pragma in (
            "busy_timeout=10000",
            "journal_mode=WAL",
            "synchronous=FULL",  # NORMAL would not sync each commit
            "foreign_keys=ON",
        ):
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        # A writer takes its lock at once: upgrading a read transaction later can fail as busy.
        writes = connection.get_execution_options().get(WRITE, False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _check_integrity(connection: Connection) -> None:
    if connection.dialect.name != "sqlite":
        return
    found = connection.exec_driver_sql("PRAGMA quick_check(1)").scalar_one()
    if found != "ok":
        raise LocalError("unavailable", f"the store is damaged ({found}); restore it from a copy")


def _check_version(connection: Connection) -> None:
    if not inspect(connection).has_table("meta"):
        metadata.create_all(connection)
        connection.execute(insert(meta).values(key="schema", value=SCHEMA_VERSION))
        return
    version = connection.scalar(select(meta.c.value).where(meta.c.key == "schema"))
    if version is None or version > SCHEMA_VERSION:
        raise LocalError(
            "unavailable",
            f"the store has schema version {version}, this program knows {SCHEMA_VERSION}; "
            "run the newer program, or another data directory",
        )


def _explain(error: SQLAlchemyError, engine: Engine) -> str:
    cause = getattr(error, "orig", None) or error
    where = engine.url.render_as_string(hide_password=True)
    if isinstance(error, DatabaseError) and "file is not a database" in str(cause):
        return f"{where} is not a database or is damaged; restore it from a copy"
    return f"the store {where} cannot be used: {cause}"
