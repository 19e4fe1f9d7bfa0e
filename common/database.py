"""How a service opens its database: durable, checked, and of a version that it knows.

SQLAlchemy Core over SQLite (write-ahead log, every commit synced, so that it is on the disk before
anyone is answered) or any database it knows by URL. A database carries its schema version; another
one than the program's is refused, so that no program writes into a store it does not understand.
"""

import sqlite3

from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    Engine,
    MetaData,
    String,
    Table,
    create_engine,
    event,
    insert,
    select,
)
from sqlalchemy.exc import DatabaseError, SQLAlchemyError

from common.errors import LocalError

_WRITES = "riffle_writes"
_VERSION = "schema"


def meta_table(metadata: MetaData) -> Table:
    """The table of named numbers that every store has; one of them is its schema version."""
    return Table(
        "meta",
        metadata,
        Column("key", String(32), primary_key=True),
        Column("value", BigInteger, nullable=False),
    )


def writer(engine: Engine) -> Engine:
    """The same engine for transactions that write: each takes its lock when it begins."""
    return engine.execution_options(**{_WRITES: True})


def open_database(url: str, metadata: MetaData, version: int) -> Engine:
    """Engine of the database at ``url``, its tables made if it is new.

    ``metadata`` has a `meta_table`; ``version`` is the schema's.

    Raises:
        LocalError: ``unavailable``: it is damaged, of another version, or out of reach;
            ``invalid-spec``: the URL is none, or names a driver that is not installed.
    """
    engine = _connectable(url)
    try:
        with writer(engine).begin() as connection:
            _check_integrity(connection)
            metadata.create_all(connection)
            _check_version(connection, metadata.tables["meta"], version)
    except (SQLAlchemyError, sqlite3.Error, LocalError) as error:
        engine.dispose()
        raise _explained(error, engine) from error
    return engine


def _connectable(url: str) -> Engine:
    try:
        # Parameters stay out of error texts: they hold the ids of nodes, users and leases.
        engine = create_engine(url, hide_parameters=True)
    except (SQLAlchemyError, ImportError, ValueError) as error:
        # The URL is not repeated: one that cannot be read may show its password.
        reason = f"the store's URL cannot be used ({type(error).__name__}); say dialect://address"
        raise LocalError("invalid-spec", reason) from error
    if engine.dialect.name == "sqlite":
        _prepare_sqlite(engine)
    return engine


def _prepare_sqlite(engine: Engine) -> None:
    """The one place with SQLite's own words, but for its check of integrity below."""

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
        writes = connection.get_execution_options().get(_WRITES, False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _check_integrity(connection: Connection) -> None:
    if connection.dialect.name != "sqlite":
        return
    found = connection.exec_driver_sql("PRAGMA quick_check(1)").scalar_one()
    if found != "ok":
        raise LocalError("unavailable", f"it is damaged ({found}); restore it from a copy")


def _check_version(connection: Connection, meta: Table, known: int) -> None:
    found = connection.scalar(select(meta.c.value).where(meta.c.key == _VERSION))
    if found is None:
        connection.execute(insert(meta).values(key=_VERSION, value=known))
    elif found != known:
        raise LocalError(
            "unavailable",
            f"it has schema version {found}, this program knows {known}; run the program that "
            "wrote it, or use another data directory",
        )


def _explained(error: Exception, engine: Engine) -> LocalError:
    where = engine.url.render_as_string(hide_password=True)
    cause = getattr(error, "orig", None) or error
    if isinstance(error, DatabaseError) and "file is not a database" in str(cause):
        cause = "it is not a database or is damaged; restore it from a copy"
    reason = str(cause).splitlines()[0]
    return LocalError("unavailable", f"the store {where} cannot be used: {reason}")
