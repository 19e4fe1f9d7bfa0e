"""Opening a database: durable pragmas, locks, versions, damage, and what is said of each."""

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Column, Engine, Integer, MetaData, Table, func, insert, select, update
from sqlalchemy.exc import OperationalError

from common.database import meta_table, open_database, writer
from common.errors import LocalError

metadata = MetaData()
meta = meta_table(metadata)
things = Table("things", metadata, Column("thing", Integer, primary_key=True))


def url(directory: Path) -> str:
    return f"sqlite:///{directory / 'a.sqlite'}"


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    found = open_database(url(tmp_path), metadata, 3)
    yield found
    found.dispose()


def refusal(address: str, version: int = 3) -> LocalError:
    with pytest.raises(LocalError) as caught:
        open_database(address, metadata, version)
    return caught.value


def test_every_connection_syncs_each_commit(engine: Engine) -> None:
    for _ in range(2):
        with engine.connect() as connection:
            pragmas = {
                name: connection.exec_driver_sql(f"PRAGMA {name}").scalar_one()
                for name in ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")
            }
        expected = {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1}
        assert pragmas == expected | {"busy_timeout": 10_000}


def test_what_was_written_is_there_when_it_is_opened_again(tmp_path: Path, engine: Engine) -> None:
    with writer(engine).begin() as connection:
        connection.execute(insert(things).values(thing=7))
    again = open_database(url(tmp_path), metadata, 3)
    with again.connect() as connection:
        assert connection.scalars(select(things.c.thing)).all() == [7]
        assert connection.scalar(select(func.count()).select_from(meta)) == 1
    again.dispose()


def test_a_writer_takes_its_lock_when_it_begins(tmp_path: Path, engine: Engine) -> None:
    other = sqlite3.connect(tmp_path / "a.sqlite", timeout=0)
    with writer(engine).begin(), pytest.raises(sqlite3.OperationalError, match="locked"):
        other.execute("INSERT INTO things VALUES (1)")
    other.close()


def test_a_reader_takes_none(tmp_path: Path, engine: Engine) -> None:
    other = sqlite3.connect(tmp_path / "a.sqlite", timeout=0)
    with engine.connect() as connection:
        connection.execute(select(things))
        other.execute("INSERT INTO things VALUES (1)")
        other.commit()
    other.close()


def test_values_stay_out_of_error_texts(engine: Engine) -> None:
    with (
        pytest.raises(OperationalError) as caught,
        writer(engine).begin() as connection,
    ):
        connection.exec_driver_sql("INSERT INTO nothing VALUES (?)", ("a secret id",))
    assert "a secret id" not in str(caught.value)


@pytest.mark.parametrize("version", [2, 4])
def test_another_version_is_refused(tmp_path: Path, engine: Engine, version: int) -> None:
    with writer(engine).begin() as connection:
        connection.execute(update(meta).values(value=version))
    error = refusal(url(tmp_path))
    assert error.slug == "unavailable"
    assert f"schema version {version}, this program knows 3" in error.detail
    assert "a.sqlite" in error.detail


def test_a_file_that_is_no_database_is_told(tmp_path: Path) -> None:
    (tmp_path / "a.sqlite").write_bytes(b"this is not a database, whatever its name " * 200)
    assert "not a database or is damaged" in refusal(url(tmp_path)).detail


def test_a_damaged_page_is_told(tmp_path: Path) -> None:
    path = tmp_path / "a.sqlite"
    open_database(url(tmp_path), metadata, 3).dispose()
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA journal_mode=DELETE")
    connection.close()
    data = bytearray(path.read_bytes())
    data[4096:8192] = b"\xff" * 4096
    path.write_bytes(data)
    error = refusal(url(tmp_path))
    assert error.slug == "unavailable"
    assert "cannot be used" in error.detail


def test_a_database_out_of_reach_is_told_in_one_line(tmp_path: Path) -> None:
    error = refusal(url(tmp_path / "nowhere"))
    assert error.slug == "unavailable"
    assert "nowhere" in error.detail
    assert "\n" not in error.detail


@pytest.mark.parametrize("address", ["nonsense", "nosuchdialect://h/d", "sqlite+nodriver:///x"])
def test_a_url_that_is_none_is_told(address: str) -> None:
    assert refusal(address).slug == "invalid-spec"


def test_a_password_is_never_shown() -> None:
    assert "sesame" not in refusal("nosuchdialect://user:sesame@host/riffle").detail
