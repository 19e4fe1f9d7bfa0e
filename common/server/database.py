"""Databases of services: opening, schema versions, locks between replicas, notifications.

SQLAlchemy Core over SQLite, for one process, or PostgreSQL, for several replicas. On both:

- A commit returns only once its data is on disk, and the service answers nobody before that.
- Writing transactions run one after another. Each writing transaction takes the store's single
  writing lock when it begins. Therefore what a transaction has checked stays true until its commit,
  on all replicas, and no two writers can deadlock.
- A reading transaction sees one state of the store.

Opening an empty database creates the tables under the writing lock, so replicas may start together.
A service refuses a store of another schema version and leaves the store unchanged.

Replicas notify each other with PostgreSQL's LISTEN and NOTIFY. A notification only wakes waiters,
which then read the store. Waiters also check periodically, so a notification may be lost.

A store's head (`common.process.heads`) reveals an outdated database. The service writes the head
before it answers anybody.
"""

import asyncio
import hashlib
import logging
import os
import sqlite3
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy import Connection, Table, insert, select, update
from sqlalchemy.exc import DatabaseError, SQLAlchemyError

from riffle.common.process.heads import HeadFolder
from riffle.common.process.journal import Journal
from riffle.common.protocol.errors import LocalError

BUSY_SECONDS = 10
LOCK_SECONDS = 20
IDLE_SECONDS = 10
"""PostgreSQL ends a transaction that is idle for longer, and so frees a stalled replica's lock."""
CLAIM_SECONDS = 600
"""Seconds for which a transaction may be idle after `try_claim`: a permutation takes minutes."""
RECONNECT_SECONDS = 1.0

HEAD_KEY = "head"
CHANNEL = "riffle"

AUTHENTICATED = "authenticated"
"""Marks a column (in its ``info``) whose values are authenticated, and so need no checksum."""

_WRITES = "riffle_writes"
_POSTGRES_OPTIONS = {
    "synchronous_commit": "on",
    "lock_timeout": f"{LOCK_SECONDS}s",
    "idle_in_transaction_session_timeout": f"{IDLE_SECONDS}s",
    # A replica whose network is cut must not hold the lock until TCP gives up.
    "tcp_keepalives_idle": "10",
    "tcp_keepalives_interval": "5",
    "tcp_keepalives_count": "4",
}
_POSTGRES_ARGUMENTS = {
    "isolation_level": "REPEATABLE READ",
    "pool_pre_ping": True,  # notices a restarted server immediately
    "connect_args": {
        "connect_timeout": 5,
        "options": " ".join(f"-c {name}={value}" for name, value in _POSTGRES_OPTIONS.items()),
    },
}


@dataclass(frozen=True, slots=True)
class Schema:
    """The tables of a service's store, and a version that changes whenever a table changes."""

    service: str
    version: int
    metadata: sa.MetaData

    def prepare(self, connection: sa.Connection) -> None:
        """Creates the tables in an empty database.

        Raises LocalError ``unavailable`` if the database has tables of another version.
        """
        tables, key = self.metadata.tables, f"{self.service} schema"
        present = tables.keys() & sa.inspect(connection).get_table_names()
        meta = tables["meta"]
        if not present:
            shared = is_shared(connection)
            (self.metadata if shared else _with_checksums(self.metadata)).create_all(connection)
            write_number(connection, meta, key, self.version)
            return
        found = read_number(connection, meta, key) if "meta" in present else None
        if found != self.version:
            pre = "tables of a pre-release or another service"
            raise LocalError(
                "unavailable",
                f"it has {pre if found is None else f'schema version {found}'}, this program is a "
                f"{self.service} of schema version {self.version}; finish its runs with the "
                "program that made it, or use another data directory or database",
            )


def meta_table(metadata: sa.MetaData) -> sa.Table:
    """Returns the table of named numbers that every store has."""
    return sa.Table(
        "meta",
        metadata,
        sa.Column("key", sa.String(32), primary_key=True),
        sa.Column("value", sa.BigInteger, nullable=False),
    )


def writer(engine: sa.Engine) -> sa.Engine:
    """Returns the engine for transactions that write. They first take the store's writing lock."""
    if engine.dialect.name == "postgresql":
        # After the wait for the lock, a read must see the last writer's changes.
        engine = engine.execution_options(isolation_level="READ COMMITTED")
    return engine.execution_options(**{_WRITES: True})


def is_shared(database: sa.Engine | sa.Connection) -> bool:
    """Returns whether other processes may write to the database. Only one may write to SQLite."""
    return database.dialect.name != "sqlite"


def read_number(connection: Connection, meta: Table, key: str) -> int | None:
    """Returns a named number of a store, or None if the store has no number of this name."""
    number: int | None = connection.scalar(select(meta.c.value).where(meta.c.key == key))
    return number


def write_number(connection: Connection, meta: Table, key: str, value: int) -> None:
    """Writes a named number of a store."""
    change = update(meta).where(meta.c.key == key).values(value=value)
    if connection.execute(change).rowcount == 0:
        connection.execute(insert(meta).values(key=key, value=value))


@dataclass
class Head(HeadFolder):
    """The head of the store called ``name``. ``meta`` is the store's table of named numbers.

    ``accepted`` is the value of the operator's setting called ``variable``. If `start` accepts an
    older database, it calls ``on_accept`` with its ``connection``. ``forgotten`` says what an older
    database lacks, and ``url_variable`` is the setting that names the database. ``trouble`` says
    why nothing may be written any more.
    """

    meta: Table
    variable: str = ""
    url_variable: str = ""
    accepted: int | None = None
    forgotten: str = "what was answered"
    on_accept: Callable[[Connection], None] = lambda _: None
    older_accepted: bool = field(default=False, init=False)
    trouble: LocalError | None = field(default=None, init=False)

    def advance(self, connection: Connection) -> int:
        """Increments the database's number in this transaction; the caller must `write` the result.

        If the old number is below the number in the folder, this call and all later calls raise
        LocalError ``unavailable``.
        """
        number = self._read(connection)
        if self.trouble is None and number < self.written():
            self.trouble = LocalError(
                "unavailable",
                "the store was replaced by an older one while the service ran; restart the service",
            )
        if self.trouble is not None:
            raise self.trouble
        write_number(connection, self.meta, HEAD_KEY, number + 1)
        return number + 1

    def start(self, connection: Connection) -> int:
        """Returns a database's number when it is opened; the caller must `write` the number.

        If the number is below the number in the folder, raises LocalError ``unavailable``. But if
        ``accepted`` equals the number in the folder, gives the database the next number instead.
        So a value that the operator sets for ``accepted`` works only once.
        """
        number, head = self._read(connection), self.written()
        if number < head:
            if self.accepted != head:
                first = "." if number else f"; does {self.url_variable} name the right one?"
                raise LocalError(
                    "unavailable",
                    f"it is empty or an older copy: its head is {number}, and {head} in "
                    f"{self.folder}{first} It has forgotten {self.forgotten} since then. Restore "
                    f"the newest copy, or set {self.variable}={head} to go on without",
                )
            self.older_accepted, number = True, head + 1
            write_number(connection, self.meta, HEAD_KEY, number)
            self.on_accept(connection)
        return number

    def _read(self, connection: Connection) -> int:
        return read_number(connection, self.meta, HEAD_KEY) or 0


def open_database(schema: Schema, url: str, head: Head | None = None) -> sa.Engine:
    """Returns an engine of the database at ``url``; creates the tables if the database is empty.

    With ``head``, as at a service's start, also checks that the database is neither damaged nor
    older than the head. Raises LocalError ``unavailable`` if the database cannot be used, or
    ``invalid-spec`` if the URL is malformed or its driver is missing.
    """
    engine = _connectable(url)
    try:
        with writer(engine).begin() as connection:
            schema.prepare(connection)
            if head is not None:
                _check_integrity(connection, schema.metadata)
                number = head.start(connection)
        if head is not None:
            head.write(number)
    except (SQLAlchemyError, sqlite3.Error, UnicodeError, LocalError) as error:
        engine.dispose()
        raise _store_error(error, engine) from error
    return engine


def try_claim(connection: sa.Connection, name: str) -> bool:
    """Claims the work ``name`` for this transaction; returns False if another replica has it.

    The claim ends with the transaction, or with the connection of a replica that dies.
    """
    if connection.dialect.name != "postgresql":
        return True
    number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big", signed=True)
    claimed = bool(connection.scalar(sa.select(sa.func.pg_try_advisory_xact_lock(number))))
    limit = f"SET LOCAL idle_in_transaction_session_timeout = '{CLAIM_SECONDS}s'"
    connection.exec_driver_sql(limit)
    return claimed


def notify(connection: sa.Connection, message: str) -> None:
    """Notifies all replicas when this transaction commits."""
    if connection.dialect.name == "postgresql":
        connection.execute(sa.select(sa.func.pg_notify(CHANNEL, message)))


async def listen(engine: sa.Engine, receive: Callable[[str], None], journal: Journal) -> None:
    """Calls ``receive`` with every notification, and with "" if one may have been missed.

    Logs once if the database is out of reach, and once when it is back.
    """
    if engine.dialect.name != "postgresql":
        return
    from psycopg import AsyncConnection, Error  # noqa: PLC0415 -- loaded where it is needed

    _, parameters = engine.dialect.create_connect_args(engine.url)
    server = f"{parameters.get('host', 'localhost')}:{parameters.get('port', 5432)}"
    where, is_lost = f"{server}/{parameters.get('dbname', '')}", False
    while True:
        try:
            connection = await AsyncConnection.connect(**parameters, autocommit=True)
            async with connection:
                await connection.execute(f"LISTEN {CHANNEL}")
                receive("")
                if is_lost:
                    journal.note("database-back", database=where)
                is_lost = False
                async for notification in connection.notifies():
                    receive(notification.payload)
        except Error as error:
            if not is_lost:
                kind = type(error).__name__
                journal.note("database-lost", logging.WARNING, database=where, error=kind)
            is_lost = True
        await asyncio.sleep(RECONNECT_SECONDS)


def _connectable(url: str) -> sa.Engine:
    try:
        own = _POSTGRES_ARGUMENTS if sa.make_url(url).get_backend_name() == "postgresql" else {}
        # Error texts must not show parameters: they hold ids of nodes, users and leases.
        engine = sa.create_engine(url, hide_parameters=True, **own)
    except (SQLAlchemyError, ImportError, ValueError) as error:
        # The message does not repeat the URL: a malformed one may show its password.
        reason = f"the store's URL cannot be used ({type(error).__name__}); say dialect://address"
        raise LocalError("invalid-spec", reason) from error
    (_prepare_postgres if is_shared(engine) else _prepare_sqlite)(engine)
    return engine


def _prepare_sqlite(engine: sa.Engine) -> None:
    """Sets SQLite's pragmas and transaction mode on every connection."""
    opened: list[os.stat_result] = []  # the file's status at the first connection

    @sa.event.listens_for(engine, "connect")
    def connect(connection: sqlite3.Connection, _record: object) -> None:
        connection.isolation_level = None  # `begin` below begins transactions instead
        connection.execute(f"PRAGMA busy_timeout={BUSY_SECONDS * 1000}")
        _write_ahead(connection)
        connection.execute("PRAGMA synchronous=FULL")  # NORMAL would not sync each commit
        # 16 MiB of log: a page that many commits change is copied to the database file only once.
        connection.execute("PRAGMA wal_autocheckpoint=4000")
        connection.execute("PRAGMA foreign_keys=ON")
        # Overwriting deleted data costs time and leaves a copy in the log. Data that must become
        # unreadable is encrypted, and its key is destroyed (`shuffler.store.vault`).
        connection.execute("PRAGMA secure_delete=OFF")
        connection.create_function("row_checksum", -1, _checksum, deterministic=True)
        if not opened and engine.url.database:
            opened.append(Path(engine.url.database).stat())

    @sa.event.listens_for(engine, "begin")
    def begin(connection: sa.Connection) -> None:
        # A writer takes the lock at once: SQLite may refuse it to a transaction that has read.
        writes = connection.get_execution_options().get(_WRITES, False)
        if writes and opened and not _is_in_place(str(engine.url.database), opened[0]):
            # SQLite would go on writing to the deleted file, and everything would be lost.
            detail = "the store's file was removed or replaced; restart the service"
            raise LocalError("unavailable", detail)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _is_in_place(path: str, opened: os.stat_result) -> bool:
    try:
        return os.path.samestat(Path(path).stat(), opened)
    except FileNotFoundError:
        return False


def _write_ahead(connection: sqlite3.Connection) -> None:
    """Sets WAL mode. Tries again if SQLite says "locked": another process opens the new file."""
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


def _prepare_postgres(engine: sa.Engine) -> None:
    @sa.event.listens_for(engine, "begin")
    def begin(connection: sa.Connection) -> None:
        if connection.get_execution_options().get(_WRITES, False):
            connection.exec_driver_sql("SELECT pg_advisory_xact_lock(0, 0)")


def _checksum(*values: object) -> int:
    """Returns a row's CRC-32, which detects damage but no deliberate change."""
    short = [zlib.crc32(value) if isinstance(value, bytes) else value for value in values]
    return zlib.crc32(repr(short).encode())


def _row_checksum(table: sa.Table) -> sa.ColumnElement[int]:
    return sa.func.row_checksum(*(c for c in table.columns if not c.info.get(AUTHENTICATED)))


@cache
def _with_checksums(metadata: sa.MetaData) -> sa.MetaData:
    """Returns copies of the tables with one more column: a row's checksum, computed by SQLite."""
    copies = sa.MetaData()
    for table in metadata.sorted_tables:
        copy = table.to_metadata(copies)
        checksum = sa.Computed(_row_checksum(copy), persisted=True)
        copy.append_column(sa.Column("checksum", sa.Integer, checksum))
    return copies


def _check_integrity(connection: sa.Connection, metadata: sa.MetaData) -> None:
    """Checks a SQLite file's pages and indices, then every row. PostgreSQL checks its own pages.

    Raises LocalError ``unavailable`` if the file is damaged.
    """
    if is_shared(connection):
        return
    damage = connection.exec_driver_sql("PRAGMA integrity_check(1)").scalar_one()
    for table in metadata.sorted_tables if damage == "ok" else ():
        differs = sa.literal_column("checksum").is_distinct_from(_row_checksum(table))
        if connection.scalar(sa.select(sa.func.count()).select_from(table).where(differs)):
            damage = f"rows of {table.name} are not what was written"
    if damage != "ok":
        raise LocalError("unavailable", f"it is damaged ({damage}); restore it from a copy")


def _store_error(error: Exception, engine: sa.Engine) -> LocalError:
    where = engine.url.render_as_string(hide_password=True)
    cause = getattr(error, "orig", None) or error
    if isinstance(error, DatabaseError) and "file is not a database" in str(cause):
        cause = "it is not a database or is damaged; restore it from a copy"
    reason = str(cause).splitlines()[0]
    return LocalError("unavailable", f"the store {where} cannot be used: {reason}")
