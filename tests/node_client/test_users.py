"""The users' file: no user is asked twice, over restarts and crashes; locked; versioned."""

import hashlib
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from riffle.common.protocol.errors import LocalError
from riffle.node_client.users import FILE_NAME, Users, opaque_id

NODE, OTHER = "aa" * 16, "bb" * 16
DURABLE = {"journal_mode": "wal", "synchronous": 2, "secure_delete": 1, "locking_mode": "exclusive"}


def count_asked(users: Users, node: str) -> int:
    query = "SELECT COUNT(*) FROM users WHERE node = ? AND barred_until > 0"
    return int(str(users._rows(query, (node,))[0][0]))


def test_users_are_invented_as_needed_and_kept(tmp_path: Path) -> None:
    users = Users(tmp_path, None)
    first = users.next_users(NODE, 3)
    assert len(set(first)) == 3
    assert all(len(bytes.fromhex(user)) == 16 for user in first)
    assert set(users.next_users(NODE, 5)) > set(first)
    assert not set(users.next_users(OTHER, 5)) & set(users.next_users(NODE, 5))
    users.close()


def test_the_file_syncs_each_commit_and_overwrites_what_it_deletes(tmp_path: Path) -> None:
    users = Users(tmp_path, None)
    found = {name: users._rows(f"PRAGMA {name}", ())[0][0] for name in DURABLE}
    users.close()
    assert found == DURABLE


def test_nobody_is_asked_twice_after_a_restart(tmp_path: Path) -> None:
    users = Users(tmp_path, None)
    asked = users.next_users(NODE, 4)
    kept = users.next_users(NODE, 6)[4:] or [u for u in users.next_users(NODE, 6) if u not in asked]
    users.mark_asked(asked)
    users.close()
    again = Users(tmp_path, None)
    assert not set(again.next_users(NODE, 10)) & set(asked)
    assert set(kept) <= set(again.next_users(NODE, 10))
    assert count_asked(again, NODE) == 4
    again.close()


def test_without_new_users_a_node_runs_out(tmp_path: Path) -> None:
    users = Users(tmp_path, None)
    known = users.next_users(NODE, 2)
    assert sorted(users.next_users(NODE, 5, invent=False)) == sorted(known)
    users.mark_asked(known)
    assert users.next_users(NODE, 5, invent=False) == []
    users.close()


def test_listed_users_are_the_only_ones(tmp_path: Path) -> None:
    invented = Users(tmp_path, None)
    left = invented.next_users(NODE, 2)
    invented.close()
    people = [f"{i:032x}" for i in range(3)]
    users = Users(tmp_path, {NODE: people, OTHER: []})
    assert sorted(users.next_users(NODE, 5)) == people, f"{left} were invented"
    assert users.next_users(OTHER, 5) == []
    users.mark_asked(people[:1])
    users.close()
    again = Users(tmp_path, {NODE: people[:2], OTHER: people[2:]})
    assert again.next_users(NODE, 5) == people[1:2], "asked once; and not this node's any more"
    assert again.next_users(OTHER, 5) == people[2:]
    again.close()


def test_forgotten_users_are_gone_unless_asked(tmp_path: Path) -> None:
    users = Users(tmp_path, None)
    one, two = users.next_users(NODE, 2)
    users.mark_asked([one])
    users.forget([one, two])
    assert count_asked(users, NODE) == 1
    assert users.next_users(NODE, 2, invent=False) == []
    users.close()


def test_users_set_aside_come_back_at_the_next_start(tmp_path: Path) -> None:
    users = Users(tmp_path, None)
    known = users.next_users(NODE, 4)
    users.set_aside(known[:3])
    assert users.next_users(NODE, 4, invent=False) == known[3:]
    assert not set(users.next_users(NODE, 4)) & set(known[:3])
    users.close()
    again = Users(tmp_path, None)
    assert set(known) <= set(again.next_users(NODE, 7, invent=False))
    again.close()


def test_two_processes_cannot_share_a_file(tmp_path: Path) -> None:
    Users(tmp_path, None).close()
    users = Users(tmp_path, None)
    with pytest.raises(LocalError, match="another node process"):
        Users(tmp_path, None)
    assert len(users.next_users(NODE, 1)) == 1
    users.close()


@pytest.mark.parametrize("bound", [None, b"k" * 32])
@pytest.mark.parametrize("key", [None, b"j" * 32])
def test_a_newer_file_is_refused(tmp_path: Path, bound: bytes | None, key: bytes | None) -> None:
    """And left alone, whichever users key was given to it before and is given now."""
    file = tmp_path / FILE_NAME
    Users(tmp_path, None, bound).close()
    with closing(sqlite3.connect(file)) as database:
        database.execute("PRAGMA user_version = 99")
    before = file.read_bytes()
    with pytest.raises(LocalError, match="version 99"):
        Users(tmp_path, {NODE: ["ab" * 16]}, key)
    assert file.read_bytes() == before


def test_an_unusable_directory_or_file_is_explained(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LocalError, match="state directory"):
        Users(tmp_path / "file", None)
    (tmp_path / FILE_NAME).write_bytes(b"not a database" * 100)
    with pytest.raises(LocalError, match="cannot open"):
        Users(tmp_path, None)


def test_a_failed_read_is_an_error(tmp_path: Path) -> None:
    users = Users(tmp_path, None)
    users.close()
    for read in (lambda: users.next_users(NODE, 1), lambda: count_asked(users, NODE)):
        with pytest.raises(LocalError, match="cannot read"):
            read()


def test_a_failed_write_is_an_error_and_changes_nothing(tmp_path: Path) -> None:
    users = Users(tmp_path, None)
    known = users.next_users(NODE, 2)
    users._database.execute("PRAGMA query_only = ON")
    with pytest.raises(LocalError, match="cannot write"):
        users.mark_asked(known)
    users._database.execute("PRAGMA query_only = OFF")
    assert count_asked(users, NODE) == 0
    users.close()


@pytest.mark.parametrize("user", ["ann@example.org", "ab" * 16, "7", "\u00e5nn", "x" * 200])
def test_an_opaque_id_needs_the_owners_key(user: str) -> None:
    """HMAC-SHA256, checked by its definition (RFC 2104), so that other nodes can agree."""
    key, message = bytes(range(32)), b"riffle v1 user\0" + user.encode()
    pads = (bytes(b ^ pad for b in key.ljust(64, b"\0")) for pad in (0x36, 0x5C))
    inner, outer = pads
    digest = hashlib.sha256(outer + hashlib.sha256(inner + message).digest()).hexdigest()
    assert opaque_id(key, user) == digest[:32]
    assert opaque_id(bytes(32), user) != digest[:32]
    assert opaque_id(key, user.capitalize() + "x") != digest[:32]


def test_a_file_keeps_its_key(tmp_path: Path) -> None:
    for key in (None, b"k" * 32, b"k" * 32):
        Users(tmp_path, None, key).close()
    with pytest.raises(LocalError, match="another users key") as caught:
        Users(tmp_path, None, b"j" * 32)
    assert caught.value.slug == "wrong-state"
    Users(tmp_path, None, b"k" * 32).close()
