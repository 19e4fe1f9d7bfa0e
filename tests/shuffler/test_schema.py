"""Opening the shuffler's store; how a store is opened at all: tests/common/test_database.py."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Connection, create_engine, func, insert, select, text

from common.database import writer
from common.migrations import Schema, migrate
from shuffler.schema import SCHEMA, batches, leases, nodes, open_store, sqlite_url, users
from tests.shuffler.world import NOW


@pytest.fixture(params=["sqlite", "postgresql"])
def empty(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A database without tables."""
    if request.param == "sqlite":
        yield sqlite_url(tmp_path)
        return
    with request.getfixturevalue("cluster").database("") as url:
        yield url


def test_a_store_is_opened_again(tmp_path: Path) -> None:
    for _ in range(2):
        engine = open_store(sqlite_url(tmp_path))
        with engine.connect() as connection:
            assert connection.scalar(select(func.count()).select_from(nodes)) == 0
        engine.dispose()


def test_leases_that_are_live_stay_so_when_users_come_to_name_theirs(empty: str) -> None:
    engine = create_engine(empty)
    with writer(engine).begin() as connection:
        migrate(connection, Schema(SCHEMA.folder, "shuffler_1"))
        _fill_first_version(connection)
    engine.dispose()
    engine = open_store(empty)
    with engine.connect() as connection:
        found = connection.execute(select(users.c.user, users.c.lease).order_by(users.c.user)).all()
        assert [tuple(row) for row in found] == [
            ("a-live-and-an-expired", "live"),
            ("never-leased", None),
            ("of-a-batch-that-is-over", None),
            ("slot-given-away", None),
        ]
    engine.dispose()


def _fill_first_version(connection: Connection) -> None:
    node = {"node_id": "n", "name": "n", "token_hash": "t", "quota": 9, "users": 4}
    connection.execute(insert(nodes), node)
    for number, (name, state) in enumerate((("one", "open"), ("two", "open"), ("over", "erased"))):
        numbers = {"deposited": number, "n": 9, "expires_at": NOW}
        sizes = {"report_bytes": 1, "message_bytes": 1}
        rest = dict.fromkeys(("coordinator_signature", "batch_key", "shuffler_signature"), "")
        row = {"batch_id": name, "state": state, "descriptor": b"", "digest": b""}
        connection.execute(insert(batches), row | numbers | sizes | rest)
    people = ("a-live-and-an-expired", "never-leased", "of-a-batch-that-is-over", "slot-given-away")
    for person in people:
        sql = "INSERT INTO users (\"user\", node_id, reported) VALUES (:user, 'n', :no)"
        connection.execute(text(sql), {"user": person, "no": False})
    for lease, batch, person, slot, expires in (
        ("expired", "one", people[0], 0, NOW - 9),
        ("live", "two", people[0], 0, NOW + 9),
        ("over", "over", people[2], 0, NOW + 99),
        ("lost", "one", people[3], None, NOW - 9),
    ):
        held = {"lease": lease, "batch_id": batch, "user": person, "node_id": "n"}
        connection.execute(insert(leases), held | {"slot": slot, "expires_at": expires})
