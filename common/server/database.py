"""Schemas of stores as Alembic revisions: a store is brought to the program's revision when it is
opened, inside the transaction that opens it.

The writer's lock is held meanwhile (`common.server.database`), so that of replicas that start
together one migrates and the others find it done. A store of a revision that the program does not
have is refused: no program writes into a store it does not understand.

How a service opens its database: durable, checked, and of a schema that it knows.

SQLAlchemy Core over SQLite, for one process, or PostgreSQL, for several replicas. On both

- a commit has returned only once it is on the disk, so nobody is answered before;
- transactions that write follow one another: each takes the store's one writing lock when it
  begins, so what it checks holds until it commits, whatever replica it runs on, and no two can
  deadlock. Group commits (`shuffler.store.committer`) share the lock's and the disk's cost;
- a transaction that reads sees one state of the store.

A replica that stops in the middle of a write loses its lock, and its transaction, after
`IDLE_SECONDS`. The schema is brought up to date at opening (`common.server.database`).
"""

import hashlib
import sqlite3
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from alembic import command, context
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy import (
    URL,
    BigInteger,
    Column,
    Connection,
    Engine,
    MetaData,
    String,
    Table,
    create_engine,
    event,
    func,
    inspect,
    select,
    text,
)
from sqlalchemy.exc import DatabaseError, SQLAlchemyError

from riffle.common.protocol.errors import LocalError

_ONE_AT_A_TIME = threading.Lock()  # Alembic keeps what it works on in globals of the process


@dataclass(frozen=True, slots=True)
class Schema:
    """A folder of Alembic revisions, and the revision that the program works with."""

    folder: Path
    head: str


def migrate(connection: Connection, schema: Schema) -> None:
    """Bring a store to ``schema.head``; nothing happens when it is there.

    Raises:
        LocalError: ``unavailable``: it has a revision that this program does not know.
    """
    found = revision(connection)
    if found == schema.head:
        return
    known = {script.revision for script in ScriptDirectory(str(schema.folder)).walk_revisions()}
    if found is not None and found not in known:
        raise LocalError(
            "unavailable",
            f"it has schema version {found}, this program knows {schema.head}; run the program "
            "that wrote it, or use another data directory or database",
        )
    config = Config()
    config.set_main_option("script_location", str(schema.folder).replace("%", "%%"))
    config.attributes["connection"] = connection
    with _ONE_AT_A_TIME:
        command.upgrade(config, schema.head)


def revision(connection: Connection) -> str | None:
    """The revision a store has; None for a new one."""
    if not inspect(connection).has_table("alembic_version"):
        return None
    return str(connection.scalar(text("SELECT version_num FROM alembic_version")))


def run_migrations() -> None:
    """What every ``env.py`` does: the steps, on the connection that `migrate` was given."""
    context.configure(connection=context.config.attributes["connection"])
    with context.begin_transaction():
        context.run_migrations()


BUSY_SECONDS = 10
LOCK_SECONDS = 20
IDLE_SECONDS = 10
CLAIM_SECONDS = 600
"""How long a claim may be held without a word to the server: permuting a large batch takes long."""

_WRITES = "riffle_writes"
_WRITING_LOCK = "SELECT pg_advisory_xact_lock(0, 0)"
_POSTGRES_OPTIONS = {
    "synchronous_commit": "on",
    "lock_timeout": f"{LOCK_SECONDS}s",
    "idle_in_transaction_session_timeout": f"{IDLE_SECONDS}s",
    # A replica whose network is cut must not hold the lock until TCP gives up by itself.
    "tcp_keepalives_idle": "10",
    "tcp_keepalives_interval": "5",
    "tcp_keepalives_count": "4",
}


def meta_table(metadata: MetaData) -> Table:
    """The table of named numbers that every store has."""
    return Table(
        "meta",
        metadata,
        Column("key", String(32), primary_key=True),
        Column("value", BigInteger, nullable=False),
    )


def writer(engine: Engine) -> Engine:
    """The same engine for transactions that write: each takes its lock when it begins."""
    if engine.dialect.name == "postgresql":
        # What is read after the wait for the lock must be what the last writer left.
        engine = engine.execution_options(isolation_level="READ COMMITTED")
    return engine.execution_options(**{_WRITES: True})


def is_shared(engine: Engine) -> bool:
    """Whether other processes may write to the same database: a file of SQLite's has one."""
    return engine.dialect.name != "sqlite"


def open_database(url: str, schema: Schema) -> Engine:
    """Engine of the database at ``url``, its tables made or migrated as ``schema`` says.

    Raises:
        LocalError: ``unavailable``: it is damaged, of another version, or out of reach;
            ``invalid-spec``: the URL is none, or names a driver that is not installed.
    """
    engine = _connectable(url)
    try:
        with writer(engine).begin() as connection:
            _check_integrity(connection)
            migrate(connection, schema)
    except (SQLAlchemyError, sqlite3.Error, LocalError) as error:
        engine.dispose()
        raise _explained(error, engine) from error
    return engine


def try_claim(connection: Connection, name: str) -> bool:
    """Whether work of this name is this transaction's until it ends, and no other replica's.

    The claim of a replica that dies ends with its connection.
    """
    if connection.dialect.name != "postgresql":
        return True
    number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big", signed=True)
    mine = bool(connection.scalar(select(func.pg_try_advisory_xact_lock(number))))
    limit = f"SET LOCAL idle_in_transaction_session_timeout = '{CLAIM_SECONDS}s'"
    connection.exec_driver_sql(limit)
    return mine


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
    if engine.dialect.name == "postgresql":
        return _prepared_postgres(engine.url)
    return engine


def _prepare_sqlite(engine: Engine) -> None:
    """SQLite's own words, but for its check of integrity below."""

    @event.listens_for(engine, "connect")
    def connect(connection: sqlite3.Connection, _record: object) -> None:
        connection.isolation_level = None  # transactions begin where we say so, below
        connection.execute(f"PRAGMA busy_timeout={BUSY_SECONDS * 1000}")
        _write_ahead(connection)
        connection.execute("PRAGMA synchronous=FULL")  # NORMAL would not sync each commit
        # 16 MiB of log: pages that many commits change go into the file once for all of them.
        connection.execute("PRAGMA wal_autocheckpoint=4000")
        connection.execute("PRAGMA foreign_keys=ON")
        # Some builds write zeros over what is deleted, page by page, before the log has even left
        # the disk. What must be unreadable is under a key that is destroyed
        # (`shuffler.store.vault`).
        connection.execute("PRAGMA secure_delete=OFF")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        # A writer takes its lock at once: upgrading a read transaction later can fail as busy.
        writes = connection.get_execution_options().get(_WRITES, False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _write_ahead(connection: sqlite3.Connection) -> None:
    """WAL mode. Of two that open a new file at once SQLite refuses one without waiting."""
    deadline = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.02)
        else:
            return


def _prepared_postgres(url: URL) -> Engine:
    """PostgreSQL's own words."""
    options = " ".join(f"-c {name}={value}" for name, value in _POSTGRES_OPTIONS.items())
    engine = create_engine(
        url,
        hide_parameters=True,
        isolation_level="REPEATABLE READ",
        pool_pre_ping=True,  # a server that was started again is found at once
        connect_args={"connect_timeout": 5, "options": options},
    )

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        if connection.get_execution_options().get(_WRITES, False):
            connection.exec_driver_sql(_WRITING_LOCK)

    return engine


def _check_integrity(connection: Connection) -> None:
    if connection.dialect.name != "sqlite":
        return
    found = connection.exec_driver_sql("PRAGMA quick_check(1)").scalar_one()
    if found != "ok":
        raise LocalError("unavailable", f"it is damaged ({found}); restore it from a copy")


def _explained(error: Exception, engine: Engine) -> LocalError:
    where = engine.url.render_as_string(hide_password=True)
    cause = getattr(error, "orig", None) or error
    if isinstance(error, DatabaseError) and "file is not a database" in str(cause):
        cause = "it is not a database or is damaged; restore it from a copy"
    reason = str(cause).splitlines()[0]
    return LocalError("unavailable", f"the store {where} cannot be used: {reason}")
