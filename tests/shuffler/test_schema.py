"""Opening a store: durable pragmas, versions, damage."""

import sqlite3
from pathlib import Path

import pytest
from sqlalchemy import func, select, update

from common.database import writer
from common.errors import LocalError
from shuffler.schema import SCHEMA_VERSION, meta, nodes, open_store, sqlite_url


def test_every_connection_syncs_each_commit(tmp_path: Path) -> None:
    engine = open_store(sqlite_url(tmp_path))
    with engine.connect() as connection:
        pragmas = {
            name: connection.exec_driver_sql(f"PRAGMA {name}").scalar_one()
            for name in ("journal_mode", "synchronous", "foreign_keys")
        }
    engine.dispose()
    assert pragmas == {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1}


def test_a_store_is_opened_again(tmp_path: Path) -> None:
    for _ in range(2):
        engine = open_store(sqlite_url(tmp_path))
        with engine.connect() as connection:
            assert connection.scalar(select(func.count()).select_from(nodes)) == 0
        engine.dispose()


def test_a_newer_store_is_refused(tmp_path: Path) -> None:
    engine = open_store(sqlite_url(tmp_path))
    with writer(engine).begin() as connection:
        connection.execute(update(meta).values(value=SCHEMA_VERSION + 1))
    engine.dispose()
    with pytest.raises(LocalError, match=f"schema version {SCHEMA_VERSION + 1}"):
        open_store(sqlite_url(tmp_path))


def test_a_file_that_is_no_database_is_told(tmp_path: Path) -> None:
    (tmp_path / "shuffler.sqlite").write_bytes(b"this is not a database, whatever its name " * 200)
    with pytest.raises(LocalError, match="not a database or is damaged"):
        open_store(sqlite_url(tmp_path))


def test_a_damaged_page_is_told(tmp_path: Path) -> None:
    path = tmp_path / "shuffler.sqlite"
    open_store(sqlite_url(tmp_path)).dispose()
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA journal_mode=DELETE")
    connection.close()
    data = bytearray(path.read_bytes())
    data[4096 * 2 : 4096 * 3] = b"\xff" * 4096
    path.write_bytes(data)
    with pytest.raises(LocalError) as caught:
        open_store(sqlite_url(tmp_path))
    assert caught.value.slug == "unavailable"


def test_a_store_out_of_reach_is_told(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match="cannot be used"):
        open_store(sqlite_url(tmp_path / "nowhere"))
