"""The writing thread: grouped, isolated, answered only when durable."""

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from functools import partial
from pathlib import Path

import pytest
from sqlalchemy import Connection, Engine, func, insert, select
from sqlalchemy.exc import OperationalError

from riffle.common.protocol.errors import LocalError, RemoteError
from riffle.shuffler.store.committer import Committer
from riffle.shuffler.store.schema import meta, open_store, sqlite_url
from tests.shuffler.conftest import both_engines

pytestmark = both_engines


@pytest.fixture
def engine(tmp_path: Path, store_url: str | None) -> Iterator[Engine]:
    engine = open_store(store_url or sqlite_url(tmp_path))
    yield engine
    engine.dispose()


@pytest.fixture
def committer(engine: Engine) -> Iterator[Committer]:
    committer = Committer(engine)
    yield committer
    committer.close()


def put(key: str) -> Callable[[Connection], str]:
    def write(connection: Connection) -> str:
        connection.execute(insert(meta).values(key=key, value=1))
        return key

    return write


def stored(engine: Engine) -> int:
    with engine.connect() as connection:
        return connection.scalar(select(func.count()).select_from(meta)) or 0


class Gate:
    """A write that blocks the committer until it is released, so that others queue up."""

    def __init__(self) -> None:
        self.entered, self.leave = threading.Event(), threading.Event()

    def __call__(self, _: Connection) -> None:
        self.entered.set()
        assert self.leave.wait(10)


class Large:
    """The large argument of a write."""


def test_an_answered_write_leaves_nothing_in_memory(committer: Committer) -> None:
    """Even without garbage collection, which is rare, while uploads take megabytes."""
    large = Large()
    left = weakref.ref(large)
    gc.disable()
    try:
        assert committer.submit(partial(lambda carried, _: bool(carried), large)).result(10)
        del large
        deadline = time.monotonic() + 10
        while left() is not None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert left() is None
    finally:
        gc.enable()


def test_an_answered_write_is_stored(engine: Engine, committer: Committer) -> None:
    before = stored(engine)
    assert committer.submit(put("a")).result(10) == "a"
    assert stored(engine) == before + 1


def test_waiting_writes_share_a_transaction(engine: Engine, committer: Committer) -> None:
    begun: list[int] = []
    gate = Gate()
    committer.submit(gate)
    assert gate.entered.wait(10)

    def look(connection: Connection) -> None:
        begun.append(id(connection))

    futures = [committer.submit(look) for _ in range(20)]
    gate.leave.set()
    wait(futures, 10)
    assert len(begun) == 20
    assert len(set(begun)) == 1


def test_a_failing_write_undoes_itself_alone(engine: Engine, committer: Committer) -> None:
    gate, before = Gate(), stored(engine)
    committer.submit(gate)
    assert gate.entered.wait(10)

    def fail(connection: Connection) -> None:
        put("half")(connection)
        raise RemoteError("late", "too late")

    writes: list[Callable[[Connection], object]] = [put("a"), fail, put("b")]
    futures = [committer.submit(write) for write in writes]
    gate.leave.set()
    wait(futures, 10)
    assert isinstance(futures[1].exception(), RemoteError)
    assert stored(engine) == before + 2


def test_an_answer_is_of_the_run_that_counts(engine: Engine, committer: Committer) -> None:
    """A job in one group with a failing job runs twice."""
    gate, names = Gate(), iter("abcd")
    committer.submit(gate)
    assert gate.entered.wait(10)

    def fail(_: Connection) -> None:
        raise RemoteError("late", "too late")

    def put_next(connection: Connection) -> str:
        return put(next(names))(connection)

    future = committer.submit(put_next)
    committer.submit(fail)
    gate.leave.set()
    assert future.result(10) == "b"
    with engine.connect() as connection:
        keys = set(connection.scalars(select(meta.c.key)))
    assert "b" in keys
    assert "a" not in keys


def test_a_violated_constraint_fails_one_job(engine: Engine, committer: Committer) -> None:
    committer.submit(put("a")).result(10)
    failed, fine = committer.submit(put("a")), committer.submit(put("b"))
    assert failed.exception(10) is not None
    assert fine.result(10) == "b"


def test_a_failed_commit_answers_no_write(engine: Engine, committer: Committer) -> None:
    gate, before = Gate(), stored(engine)
    committer.submit(gate)
    assert gate.entered.wait(10)

    def disk_full(_: Connection) -> None:
        raise OperationalError("INSERT", {}, Exception("database or disk is full"))

    writes: list[Callable[[Connection], object]] = [put("a"), disk_full]
    futures = [committer.submit(write) for write in writes]
    gate.leave.set()
    for future in futures:
        error = future.exception(10)
        assert isinstance(error, LocalError)
        assert error.slug == "unavailable"
    assert stored(engine) == before
    assert committer.submit(put("a")).result(10) == "a"


def test_a_lost_connection_answers_no_write(engine: Engine, committer: Committer) -> None:
    """SQLite has no connection to lose: the file's handle stands for it."""
    gate, before = Gate(), stored(engine)
    committer.submit(gate)
    assert gate.entered.wait(10)

    def lose(connection: Connection) -> None:
        if connection.dialect.name == "postgresql":
            connection.exec_driver_sql("SELECT pg_terminate_backend(pg_backend_pid())")
        connection.invalidate()
        put("c")(connection)

    writes: list[Callable[[Connection], object]] = [put("a"), lose, put("b")]
    futures = [committer.submit(write) for write in writes]
    gate.leave.set()
    assert [type(future.exception(10)) for future in futures] == [LocalError] * 3
    assert stored(engine) == before
    assert committer.submit(put("a")).result(10) == "a"


def test_a_cancelled_write_does_not_happen(engine: Engine, committer: Committer) -> None:
    gate, before = Gate(), stored(engine)
    committer.submit(gate)
    assert gate.entered.wait(10)
    assert committer.submit(put("a")).cancel()
    gate.leave.set()
    committer.submit(put("b")).result(10)
    assert stored(engine) == before + 1


def test_closing_finishes_waiting_writes(engine: Engine) -> None:
    committer, before = Committer(engine), stored(engine)
    futures = [committer.submit(put(str(i))) for i in range(200)]
    committer.close()
    assert all(future.done() for future in futures)
    assert stored(engine) == before + 200


def test_too_many_waiting_writes_are_refused(engine: Engine) -> None:
    committer, gate = Committer(engine, max_waiting=2), Gate()
    committer.submit(gate)
    assert gate.entered.wait(10)
    committer.submit(put("a"))
    committer.submit(put("b"))
    with pytest.raises(LocalError) as caught:
        committer.submit(put("c"))
    assert (caught.value.slug, caught.value.retry_after) == ("too-many-requests", 1)
    gate.leave.set()
    committer.close()
