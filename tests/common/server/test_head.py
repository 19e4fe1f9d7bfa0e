"""The head outside a store: older and emptied databases are refused, crashes are not."""

import re
import sqlite3
import subprocess
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import Engine

from riffle.common.protocol.errors import LocalError
from riffle.common.server.database import Head, writer
from riffle.shuffler.store.schema import meta, open_store
from tests.postgres import programs

both_engines = pytest.mark.parametrize("url", ["sqlite", "postgresql"], indirect=True)


def head(folder: Path, accepted: int | None = None, name: str = "a store") -> Head:
    folder.mkdir(exist_ok=True)
    return Head(folder, name, meta, "ACCEPT", "STORE_URL", accepted)


def change(engine: Engine, of: Head) -> int:
    """A transaction that moves the head, and what follows its commit."""
    with writer(engine).begin() as connection:
        number = of.advance(connection)
    of.write(number)
    return number


def reopen(url: str, of: Head) -> None:
    open_store(url, of).dispose()


@pytest.fixture
def emptied(url: str, tmp_path: Path, request: pytest.FixtureRequest) -> Callable[[], str]:
    """Makes the database as new: its file deleted, or its tables dropped."""

    def empty() -> str:
        if url.startswith("sqlite"):
            for file in tmp_path.glob("a.sqlite*"):
                file.unlink()
        else:
            engine = open_store(url)
            with writer(engine).begin() as connection:
                connection.exec_driver_sql("DROP SCHEMA public CASCADE")
                connection.exec_driver_sql("CREATE SCHEMA public")
            engine.dispose()
        return url

    return empty


def test_numbers_only_grow_whoever_writes_them(tmp_path: Path) -> None:
    first, second = head(tmp_path), head(tmp_path)
    for one, number in ((first, 9), (second, 11), (first, 10)):
        one.write(number)
    assert first.written() == second.written() == 11
    (tmp_path / "a%20store.head.x").touch()
    second.write(12)
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "a%20store.head.12",
        "a%20store.head.x",
    ]
    assert head(tmp_path, name="another store").written() == 0


@both_engines
def test_an_emptied_database_is_refused(
    url: str, tmp_path: Path, emptied: Callable[[], str]
) -> None:
    engine, of = open_store(url), head(tmp_path / "secrets")
    assert [change(engine, of) for _ in range(3)] == [1, 2, 3]
    engine.dispose()
    emptied()
    for _ in range(2):
        with pytest.raises(
            LocalError, match=r"and 3 in .*; does STORE_URL .* set ACCEPT=3"
        ) as caught:
            reopen(url, head(tmp_path / "secrets"))
        assert caught.value.slug == "unavailable"
        assert "\n" not in caught.value.detail


@both_engines
def test_an_older_database_is_accepted_once_by_its_number(
    url: str, tmp_path: Path, emptied: Callable[[], str]
) -> None:
    engine, folder = open_store(url), tmp_path / "secrets"
    change(engine, head(folder))
    engine.dispose()
    emptied()
    with pytest.raises(LocalError, match="older copy"):
        reopen(url, head(folder, accepted=2))
    accepting = head(folder, accepted=1)
    reopen(url, accepting)
    assert accepting.older_accepted
    again = head(folder, accepted=1)
    reopen(url, again)
    assert (again.older_accepted, again.written()) == (False, 2)
    emptied()
    with pytest.raises(LocalError, match="is 0, and 2 in"):
        reopen(url, head(folder, accepted=1))


@both_engines
def test_a_process_killed_before_the_head_is_written_starts_again(url: str, tmp_path: Path) -> None:
    """The database is ahead of the head then, never behind it."""
    engine, of = open_store(url), head(tmp_path / "secrets")
    change(engine, of)
    with writer(engine).begin() as connection:
        of.advance(connection)
    engine.dispose()
    assert of.written() == 1
    again = head(tmp_path / "secrets")
    reopen(url, again)
    assert (again.written(), again.older_accepted) == (2, False)


@both_engines
def test_a_process_killed_before_the_commit_starts_again(url: str, tmp_path: Path) -> None:
    engine, of = open_store(url), head(tmp_path / "secrets")
    change(engine, of)
    with pytest.raises(KeyboardInterrupt), writer(engine).begin() as connection:
        of.advance(connection)
        raise KeyboardInterrupt
    assert change(engine, of) == 2
    engine.dispose()
    reopen(url, head(tmp_path / "secrets"))


@pytest.mark.parametrize("url", ["postgresql"], indirect=True)
@pytest.mark.parametrize("folders", [("a", "a"), ("a", "b")], ids=["shared", "own"])
def test_replicas_share_a_head_or_have_their_own(
    url: str, tmp_path: Path, emptied: Callable[[], str], folders: tuple[str, str]
) -> None:
    one, two = (head(tmp_path / folder) for folder in folders)
    engines = [open_store(url, each) for each in (one, two)]
    assert [change(engines[i], (one, two)[i]) for i in (0, 1, 1, 0)] == [1, 2, 3, 4]
    for engine in engines:
        engine.dispose()
    for folder in folders:
        reopen(url, head(tmp_path / folder))
    emptied()
    for folder in folders:
        with pytest.raises(LocalError, match="is 0, and 4 in"):
            reopen(url, head(tmp_path / folder))


@both_engines
def test_a_store_replaced_under_a_running_service_is_written_no_more(
    url: str, tmp_path: Path
) -> None:
    engine, of = open_store(url), head(tmp_path / "secrets")
    of.write(5)
    for _ in range(2):
        with pytest.raises(LocalError, match="replaced by an older one"):
            change(engine, of)
    assert of.written() == 5
    for file in of.folder.iterdir():
        file.unlink()
    with pytest.raises(LocalError, match="replaced by an older one"):
        change(engine, of)
    engine.dispose()


@pytest.mark.parametrize("how", ["deleted", "replaced"])
def test_a_file_that_is_not_the_one_opened_is_written_no_more(tmp_path: Path, how: str) -> None:
    file = tmp_path / "a.sqlite"
    engine = open_store(f"sqlite:///{file}")
    copy = tmp_path / "copy"
    with closing(sqlite3.connect(file)) as source, closing(sqlite3.connect(copy)) as target:
        source.backup(target)
    file.unlink()
    if how == "replaced":
        copy.rename(file)
    with (
        pytest.raises(LocalError, match="removed or replaced"),
        writer(engine).begin() as connection,
    ):
        connection.exec_driver_sql("DELETE FROM meta")
    engine.dispose()


def test_a_folder_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    of = Head(tmp_path / "absent", "a store", meta)
    for attempt in (of.written, lambda: of.write(1)):
        with pytest.raises(LocalError, match="the head: "):
            attempt()


@pytest.mark.parametrize("url", ["postgresql"], indirect=True)
def test_a_copy_of_postgresql_restored_as_documented_is_refused(url: str, tmp_path: Path) -> None:
    """The commands of docs/howto.md."""
    page = (Path(__file__).parents[3] / "docs/howto.md").read_text()
    written = re.findall(r"^\$ (pg_\w+ .*coordinator\.backup.*)$", page, re.MULTILINE)
    address = url.replace("+psycopg", "")
    dump, restore = (
        [str(programs() / name), *rest]
        for name, *rest in (
            re.sub(r"postgresql://\S+", lambda _: address, line).split() for line in written
        )
    )
    engine, of = open_store(url), head(tmp_path / "secrets")
    change(engine, of)
    subprocess.run(dump, cwd=tmp_path, check=True)
    change(engine, of)
    engine.dispose()
    subprocess.run(restore, cwd=tmp_path, check=True)
    with pytest.raises(LocalError, match="is 1, and 2 in") as caught:
        reopen(url, head(tmp_path / "secrets"))
    assert "STORE_URL" not in caught.value.detail
    reopen(url, head(tmp_path / "secrets", accepted=2))
