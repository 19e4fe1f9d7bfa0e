"""Opening a database: durability, locks, versions, damage, and the errors of each."""

import asyncio
import json
import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from sqlalchemy import (
    Column,
    Connection,
    Engine,
    Integer,
    MetaData,
    Table,
    create_engine,
    delete,
    func,
    insert,
    inspect,
    select,
    text,
    update,
)
from sqlalchemy.exc import DBAPIError

from riffle.common.process.journal import Journal
from riffle.common.protocol.errors import LocalError
from riffle.common.server.database import (
    CLAIM_SECONDS,
    IDLE_SECONDS,
    Head,
    Schema,
    listen,
    meta_table,
    open_database,
    try_claim,
    writer,
)
from riffle.coordinator.store import schema as coordinator_schema
from riffle.shuffler.store import schema as shuffler_schema
from tests.postgres import Cluster

metadata = MetaData()
meta = meta_table(metadata)
things = Table("things", metadata, Column("thing", Integer, primary_key=True))

SCHEMA = Schema("thing", 1, metadata)


@pytest.fixture
def engine(url: str) -> Iterator[Engine]:
    found = open_database(SCHEMA, url)
    yield found
    found.dispose()


@pytest.fixture
def other(url: str, engine: Engine) -> Iterator[Engine]:
    """The same store as another replica has it open."""
    found = open_database(SCHEMA, url)
    yield found
    found.dispose()


SETTLED = {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1, "secure_delete": 0}
sqlite_only = pytest.mark.parametrize("url", ["sqlite"], indirect=True)
both_services = pytest.mark.parametrize(
    "schema", [shuffler_schema, coordinator_schema], ids=["shuffler", "coordinator"]
)
postgres_only = pytest.mark.parametrize("url", ["postgresql"], indirect=True)


def refusal(address: str) -> LocalError:
    with pytest.raises(LocalError) as caught:
        open_database(SCHEMA, address)
    return caught.value


@sqlite_only
def test_every_connection_syncs_each_commit(engine: Engine) -> None:
    for _ in range(2):
        with engine.connect() as connection:
            pragmas = {
                name: connection.exec_driver_sql(f"PRAGMA {name}").scalar_one()
                for name in (*SETTLED, "busy_timeout")
            }
        assert pragmas == SETTLED | {"busy_timeout": 10_000}


@postgres_only
def test_postgres_syncs_each_commit_and_limits_waits(engine: Engine) -> None:
    with writer(engine).begin() as connection:
        found = {
            name: connection.exec_driver_sql(f"SHOW {name}").scalar_one()
            for name in (
                "synchronous_commit",
                "lock_timeout",
                "idle_in_transaction_session_timeout",
                "transaction_isolation",
            )
        }
    assert list(found.values()) == ["on", "20s", "10s", "read committed"]


@postgres_only
def test_a_lost_database_is_logged_once_and_once_when_it_is_back(
    url: str,
    engine: Engine,
    cluster: Cluster,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("riffle.common.server.database.RECONNECT_SECONDS", 0.01)
    caplog.set_level("INFO", "riffle.test")
    heard: list[str] = []

    async def until_heard(times: int) -> None:
        async with asyncio.timeout(60):
            while len(heard) < times:
                await asyncio.sleep(0.01)

    async def scenario() -> None:
        listening = asyncio.create_task(listen(engine, heard.append, Journal("test", "database")))
        await until_heard(1)
        cluster.stop()
        await asyncio.sleep(0.2)  # for several tries
        cluster.restart()
        await until_heard(2)
        listening.cancel()

    asyncio.run(scenario())
    lost, back = [json.loads(message) for message in caplog.messages]
    where = f"{cluster.folder}:5432/{url.split('/')[3].split('?', maxsplit=1)[0]}"
    assert lost.pop("error") in ("AdminShutdown", "OperationalError", "CrashShutdown")
    assert lost == {"event": "database-lost", "database": where}
    assert back == {"event": "database-back", "database": where}


def test_a_reopened_database_has_what_was_written(url: str, engine: Engine) -> None:
    with writer(engine).begin() as connection:
        connection.execute(insert(things).values(thing=7))
    again = open_database(SCHEMA, url)
    with again.connect() as connection:
        assert connection.scalars(select(things.c.thing)).all() == [7]
    again.dispose()


def test_a_writer_takes_its_lock_when_it_begins(engine: Engine, other: Engine) -> None:
    """The second waits, and then sees what the first has left: no two add the same number."""
    begun = Event()

    def add_second() -> int:
        begun.set()
        with writer(other).begin() as connection:
            highest = connection.scalar(select(func.max(things.c.thing))) or 0
            connection.execute(insert(things).values(thing=highest + 1))
            return int(highest)

    with ThreadPoolExecutor(1) as thread:
        with writer(engine).begin() as connection:
            second = thread.submit(add_second)
            assert begun.wait(10)
            with pytest.raises(TimeoutError):
                second.result(0.2)
            connection.execute(insert(things).values(thing=1))
        assert second.result(10) == 1


def test_a_reader_takes_no_lock_and_sees_one_state(engine: Engine, other: Engine) -> None:
    with engine.connect() as connection:
        assert connection.scalars(select(things.c.thing)).all() == []
        with writer(other).begin() as writing:
            writing.execute(insert(things).values(thing=1))
        assert connection.scalars(select(things.c.thing)).all() == []
    with engine.connect() as connection:
        assert connection.scalars(select(things.c.thing)).all() == [1]


@postgres_only
def test_a_writer_that_stops_loses_its_lock(engine: Engine, other: Engine) -> None:
    with pytest.raises(DBAPIError), writer(engine).begin() as stopped:
        stopped.execute(insert(things).values(thing=1))
        stopped.exec_driver_sql("SET LOCAL idle_in_transaction_session_timeout = '100ms'")
        with writer(other).begin() as connection:  # waits until the server ended the other
            assert connection.scalars(select(things.c.thing)).all() == []
            connection.execute(insert(things).values(thing=2))
        stopped.execute(insert(things).values(thing=3))
    with engine.connect() as connection:
        assert connection.scalars(select(things.c.thing)).all() == [2]


@postgres_only
def test_a_claim_outlives_long_work(engine: Engine) -> None:
    """Permuting a large batch sends the server nothing for longer than a writer may wait."""
    limits = []
    with engine.connect() as connection:
        for work in ("something", None):
            assert work is None or try_claim(connection, work)
            shown = connection.exec_driver_sql("SHOW idle_in_transaction_session_timeout")
            limits.append(shown.scalar_one())
            connection.rollback()
    assert limits == [f"{CLAIM_SECONDS // 60}min", f"{IDLE_SECONDS}s"]


@postgres_only
def test_a_server_that_was_restarted_is_found_again(cluster: Cluster, engine: Engine) -> None:
    with writer(engine).begin() as connection:
        connection.execute(insert(things).values(thing=1))
    cluster.restart()
    with engine.connect() as connection:
        assert connection.scalars(select(things.c.thing)).all() == [1]


def test_values_stay_out_of_error_texts(engine: Engine) -> None:
    with (
        pytest.raises(DBAPIError) as caught,
        writer(engine).begin() as connection,
    ):
        statement = text("INSERT INTO nothing VALUES (:it)")
        connection.execute(statement, {"it": "a secret id"})
    assert "a secret id" not in str(caught.value)


def write_version(connection: Connection, schema: Any, version: int | None) -> None:
    of_schema = schema.meta.c.key == f"{schema.SCHEMA.service} schema"
    if version is None:
        connection.execute(delete(schema.meta).where(of_schema))
    else:
        connection.execute(update(schema.meta).where(of_schema).values(value=version))


@both_services
@pytest.mark.parametrize("version", [0, 2])
def test_a_store_of_another_version_is_refused_and_left_alone(
    url: str, schema: Any, version: int
) -> None:
    engine = schema.open_store(url)
    with writer(engine).begin() as connection:
        write_version(connection, schema, version)
        before = connection.execute(select(schema.meta)).all()
    with pytest.raises(LocalError) as caught:
        schema.open_store(url)
    assert caught.value.slug == "unavailable"
    assert f"it has schema version {version}, this program is a " in caught.value.detail
    assert engine.url.render_as_string(hide_password=True) in caught.value.detail
    with engine.connect() as connection:
        assert connection.execute(select(schema.meta)).all() == before
    engine.dispose()


@both_services
@pytest.mark.parametrize("meta_left", [True, False])
def test_the_store_of_a_pre_release_is_refused(url: str, schema: Any, meta_left: bool) -> None:
    """Its tables are there without a version, as Alembic, which pre-releases used, left them."""
    engine = schema.open_store(url)
    with writer(engine).begin() as connection:
        connection.execute(text("CREATE TABLE alembic_version (version_num VARCHAR(32))"))
        write_version(connection, schema, None)
        if not meta_left:
            connection.execute(text("DROP TABLE meta"))
        tables = inspect(connection).get_table_names()
    with pytest.raises(LocalError, match=r"tables of a pre-release.*use another data directory"):
        schema.open_store(url)
    with engine.connect() as connection:
        assert inspect(connection).get_table_names() == tables
    engine.dispose()


def test_the_store_of_another_service_is_refused(url: str) -> None:
    shuffler_schema.open_store(url).dispose()
    with pytest.raises(
        LocalError,
        match="another service, this program is a coordinator",
    ):
        coordinator_schema.open_store(url)


@both_services
def test_replicas_that_start_together_create_the_tables_once(url: str, schema: Any) -> None:
    with ThreadPoolExecutor(4) as threads:
        engines = list(threads.map(schema.open_store, [url] * 4))
    for engine in engines:
        with engine.connect() as connection:
            created = set(inspect(connection).get_table_names())
        assert created == schema.metadata.tables.keys()
        engine.dispose()


def test_a_creation_that_fails_leaves_nothing(url: str) -> None:
    """A table has the name of an index; other tables are created before, in one transaction."""
    engine = create_engine(url)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE pending (one INTEGER)"))
    with pytest.raises(LocalError, match="cannot be used"):
        shuffler_schema.open_store(url)
    with engine.connect() as connection:
        assert inspect(connection).get_table_names() == ["pending"]
    engine.dispose()


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.sqlite").write_bytes(b"this is not a database, whatever its name " * 200)
    error = refusal(f"sqlite:///{tmp_path / 'a.sqlite'}")
    assert "not a database or is damaged" in error.detail


def test_a_damaged_page_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.sqlite"
    open_database(SCHEMA, f"sqlite:///{path}").dispose()
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA journal_mode=DELETE")
    connection.close()
    data = bytearray(path.read_bytes())
    data[4096:8192] = b"\xff" * 4096
    path.write_bytes(data)
    for head in (None, Head(tmp_path, "things", meta)):
        with pytest.raises(LocalError, match="cannot be used") as caught:
            open_database(SCHEMA, f"sqlite:///{path}", head)
        assert caught.value.slug == "unavailable"


@pytest.mark.parametrize("dialect", ["sqlite", "postgresql"])
def test_an_unreachable_database_is_reported_in_one_line(tmp_path: Path, dialect: str) -> None:
    nowhere = tmp_path / "nowhere"
    address = f"sqlite:///{nowhere}/a" if dialect == "sqlite" else f"postgresql:///?host={nowhere}"
    error = refusal(address)
    assert error.slug == "unavailable"
    assert "nowhere" in error.detail
    assert "\n" not in error.detail


@pytest.mark.parametrize("address", ["nonsense", "nosuchdialect://h/d", "sqlite+nodriver:///x"])
def test_a_malformed_url_is_refused(address: str) -> None:
    assert refusal(address).slug == "invalid-spec"


def test_a_password_is_never_shown() -> None:
    assert "sesame" not in refusal("nosuchdialect://user:sesame@host/riffle").detail
    unreachable = refusal("postgresql://user:sesame@127.0.0.1:1/riffle")
    assert "sesame" not in unreachable.detail
