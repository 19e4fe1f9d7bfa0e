"""Opening the shuffler's store; how a store is opened at all: tests/common/test_database.py."""

from pathlib import Path

from sqlalchemy import Connection, create_engine, func, insert, select, text

from common.database import writer
from common.migrations import Schema, migrate
from shuffler.schema import SCHEMA, batches, leases, nodes, open_store, sqlite_url, users
from tests.shuffler.world import NOW


def test_a_store_is_opened_again(tmp_path: Path) -> None:
    for _ in range(2):
        engine = open_store(sqlite_url(tmp_path))
        with engine.connect() as connection:
            assert connection.scalar(select(func.count()).select_from(nodes)) == 0
        engine.dispose()


def test_leases_that_are_live_stay_so_when_users_come_to_name_theirs(url: str) -> None:
    engine = create_engine(url)
    with writer(engine).begin() as connection:
        migrate(connection, Schema(SCHEMA.folder, "shuffler_1"))
        _fill_first_version(connection)
    engine.dispose()
    engine = open_store(url)
    with engine.connect() as connection:
        found = connection.execute(select(users.c.user, users.c.lease).order_by(users.c.user)).all()
        assert [tuple(row) for row in found] == [
            ("a-live-and-an-expired", "live"),
            ("never-leased", None),
            ("of-a-batch-that-is-over", None),
            ("reported", None),
            ("slot-given-away", None),
        ]
    engine.dispose()


def _fill_first_version(connection: Connection) -> None:
    node = {"node_id": "n", "name": "n", "token_hash": "t", "quota": 9, "users": 5}
    connection.execute(insert(nodes), node)
    for number, (name, state) in enumerate((("one", "open"), ("two", "open"), ("over", "erased"))):
        numbers = {"deposited": number, "n": 9, "expires_at": NOW}
        sizes = {"report_bytes": 1, "message_bytes": 1}
        rest = dict.fromkeys(("coordinator_signature", "batch_key", "shuffler_signature"), "")
        row = {"batch_id": name, "state": state, "descriptor": b"", "digest": b""}
        connection.execute(insert(batches), row | numbers | sizes | rest)
    people = (
        "a-live-and-an-expired",
        "never-leased",
        "of-a-batch-that-is-over",
        "reported",
        "slot-given-away",
    )
    for person in people:
        sql = "INSERT INTO users (\"user\", node_id, reported) VALUES (:user, 'n', :no)"
        connection.execute(text(sql), {"user": person, "no": False})
    for lease, batch, person, slot, expires in (
        ("expired", "one", people[0], 0, NOW - 9),
        ("live", "two", people[0], 0, NOW + 9),
        ("over", "over", people[2], 0, NOW + 99),
        ("done", "one", people[3], 1, NOW + 9),
        ("lost", "one", people[4], None, NOW - 9),
    ):
        held = {"lease": lease, "batch_id": batch, "user": person, "node_id": "n"}
        sha256 = "ab" * 32 if person == "reported" else None
        place = {"slot": slot, "expires_at": expires}
        connection.execute(insert(leases), held | place | {"report_sha256": sha256})
