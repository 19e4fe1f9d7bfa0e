"""Opening the shuffler's store; how a store is opened at all:
tests/common/server/test_database.py.
"""

from pathlib import Path

import pytest
from sqlalchemy import Connection, create_engine, func, insert, select, text

from riffle.common.protocol.errors import LocalError
from riffle.common.server.database import Schema, migrate, writer
from riffle.shuffler.store.leases import groups_of_upload
from riffle.shuffler.store.schema import SCHEMA, batches, nodes, open_store, sqlite_url
from riffle.shuffler.store.transitions import count_held, count_leased, stored_reports
from riffle.shuffler.store.users import find_users
from tests.shuffler.world import NOW


def test_a_store_is_opened_again(tmp_path: Path) -> None:
    for _ in range(2):
        engine = open_store(sqlite_url(tmp_path))
        with engine.connect() as connection:
            assert connection.scalar(select(func.count()).select_from(nodes)) == 0
        engine.dispose()


EXPIRED, LIVE, OVER, DONE, LOST = (f"{slot:016x}{slot + 5:016x}" for slot in (0, 0, 0, 1, 7))
OLDER, OLDEST = "fedcba98" * 4, "76543210" * 4  # from a time when lease ids had no slot
PEOPLE = {
    name: f"{number:032x}"
    for number, name in enumerate(
        ("two leases", "none", "of a batch that is over", "reported", "slot given away", "older")
    )
}
LEASES = (
    (EXPIRED, "one", "two leases", 0, NOW - 9),
    (LIVE[:-1] + "a", "two", "two leases", 0, NOW + 9),
    (OVER[:-1] + "b", "over", "of a batch that is over", 0, NOW + 99),
    (DONE, "one", "reported", 1, NOW + 9),
    (LOST, "one", "slot given away", None, NOW - 9),
    (OLDER, "one", "older", 4, NOW + 9),
    (OLDEST, "one", "older", None, NOW - 9),
)


def test_leases_and_reports_of_the_first_version_are_kept(url: str) -> None:
    engine = create_engine(url)
    with writer(engine).begin() as connection:
        migrate(connection, Schema(SCHEMA.folder, "shuffler_1"))
        _fill_first_version(connection)
    engine.dispose()
    engine = open_store(url)
    with engine.connect() as connection:
        found = find_users(connection, list(PEOPLE.values()))
        by_name = {name: found[user] for name, user in PEOPLE.items()}
        assert {name: one.owner for name, one in by_name.items()} == dict.fromkeys(PEOPLE, "n")
        assert [name for name, one in by_name.items() if one.reported] == ["reported"]
        live = {name: one.live(NOW) for name, one in by_name.items()}
        assert {name: one.batch_id for name, one in live.items() if one is not None} == {
            "two leases": "two",
            "older": "one",
        }
        assert by_name["two leases"].lease == LIVE[:-1] + "a"
        assert by_name["older"].lease == f"{4:016x}{OLDER[16:]}"
        assert (by_name["none"].lease, by_name["slot given away"].lease) == (None, None)
        assert list(stored_reports(connection, "one")) == [([1], b"a report")]
        done = groups_of_upload(connection, "one", "n", [DONE])[DONE[16:]]
        assert (done.digest(0), done.user(0)) == (b"\xab" * 32, PEOPLE["reported"])
        assert count_leased(connection, "one", NOW) == 1
        assert count_held(connection, "one", "n", NOW) == 2
    engine.dispose()


def test_a_report_without_a_user_is_not_migrated(url: str) -> None:
    engine = create_engine(url)
    with writer(engine).begin() as connection:
        migrate(connection, Schema(SCHEMA.folder, "shuffler_1"))
        _fill_first_version(connection)
        connection.execute(text("DELETE FROM leases WHERE report_sha256 IS NOT NULL"))
    engine.dispose()
    with pytest.raises(LocalError, match="of whom no lease is stored"):
        open_store(url)


def _fill_first_version(connection: Connection) -> None:
    node = {"node_id": "n", "name": "n", "owner": "n", "token_hash": "t", "quota": 9, "users": 5}
    connection.execute(insert(nodes), node)
    for number, (name, state) in enumerate((("one", "open"), ("two", "open"), ("over", "erased"))):
        numbers = {"deposited": number, "n": 9, "expires_at": NOW}
        sizes = {"report_bytes": 1, "message_bytes": 1}
        rest = dict.fromkeys(("coordinator_signature", "batch_key", "shuffler_signature"), "")
        row = {"batch_id": name, "state": state, "descriptor": b"", "digest": b""}
        connection.execute(insert(batches), row | numbers | sizes | rest)
    for name, user in PEOPLE.items():
        values = {"user": user, "reported": name == "reported"}
        connection.execute(text("INSERT INTO users VALUES (:user, 'n', :reported)"), values)
    for lease, batch, name, slot, expires in LEASES:
        sha256 = "ab" * 32 if name == "reported" else None
        values = {
            "lease": lease,
            "batch": batch,
            "user": PEOPLE[name],
            "slot": slot,
            "sha256": sha256,
        }
        connection.execute(
            text(
                "INSERT INTO leases VALUES (:lease, :batch, :user, 'n', :slot, :expires, :sha256)"
            ),
            values | {"expires": expires},
        )
    connection.execute(
        text("INSERT INTO reports VALUES ('one', 1, :sealed)"), {"sealed": b"a report"}
    )
