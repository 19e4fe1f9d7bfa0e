"""The personal ledger: the limit holds over races, crashes and older copies of the file."""

import asyncio
import logging
import os
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from riffle.common.accounting import repeated_user_guarantee
from riffle.common.mechanism.counters import Ints
from riffle.common.mechanism.parameters import Guarantee
from riffle.common.process.heads import HeadFolder
from riffle.common.protocol.descriptor import Epoch
from riffle.common.protocol.errors import LocalError
from riffle.common.protocol.verification import batch_event
from riffle.node_client.ledger import NAME, Charge, Limit, PersonalLedger
from riffle.node_client.pipeline import Totals
from riffle.node_client.sealing import SealKeys
from riffle.node_client.users import Users
from tests.deploy.cli.calls import document, riffle
from tests.node_client import running, world

NODE, BETA = "aa" * 16, 0.01
PEOPLE = [f"{i:032x}" for i in range(4)]


def charge(number: int = 0, month: int = 0, **changes: object) -> Charge:
    descriptor = world.descriptor(deployment=number)
    made = Charge.of(descriptor, b"\x07" * 32, Guarantee(5.0, BETA, 0.1))
    return made.model_copy(update={"epoch": Epoch(60 * month, 60 * month + 60)} | changes)


def spent(reports: int) -> float:
    event = charge().event
    assert event is not None
    return repeated_user_guarantee([event.event()] * reports, BETA).epsilon


def ledger(folder: Path, reports: int = 2) -> PersonalLedger:
    """A ledger whose limit lets a person into this many batches."""
    heads = folder / "heads"
    heads.mkdir(parents=True, exist_ok=True)
    limit = Limit(spent(reports) * 1.0001, BETA)
    return PersonalLedger(folder / "data" / "ledger.sqlite", HeadFolder(heads, NAME), limit)


def batches(of: PersonalLedger, user: str) -> list[str]:
    return [each.batch_id for _, each in of.histories().get(user, [])]


def test_a_person_is_charged_until_the_limit_and_not_beyond(tmp_path: Path) -> None:
    book = ledger(tmp_path)
    assert book.charge(PEOPLE, charge(0)) == PEOPLE
    assert book.charge(PEOPLE[:2], charge(1)) == PEOPLE[:2]
    assert book.affordable(PEOPLE, charge(2)) == PEOPLE[2:]
    assert book.charge(PEOPLE, charge(2)) == PEOPLE[2:]
    assert book.charge(PEOPLE, charge(3)) == []
    history = ledger(tmp_path).histories()
    assert [len(history[user]) for user in PEOPLE] == [2] * 4
    assert history[PEOPLE[0]][0][1] == charge(0), "read as it was charged"


def test_a_charge_is_synced_with_its_folder_before_anybody_is_asked(tmp_path: Path) -> None:
    """A rollback journal lasts until its folder is synced: 3 is EXTRA."""
    with ledger(tmp_path)._writing() as database:
        found = [
            database.execute(f"PRAGMA {of}").fetchone() for of in ("synchronous", "journal_mode")
        ]
    assert found == [(3,), ("delete",)]


def test_a_person_is_charged_once_a_batch_and_a_seeded_batch_never(tmp_path: Path) -> None:
    book = ledger(tmp_path)
    assert book.charge(PEOPLE[:1], charge()) == PEOPLE[:1]
    assert book.charge(PEOPLE[:1], charge()) == []
    assert book.charge(PEOPLE[:1], charge(1, event=None)) == []


ELSEWHERE: dict[str, Any] = {
    "run_id": "ab" * 16,
    "shuffler_id": "shuffler-2",
    "coordinator": "08" * 32,
    "trust": "central",
    "epoch": None,
}


@pytest.mark.parametrize("field", ELSEWHERE)
def test_a_limit_is_one_over_runs_services_and_trust_models(tmp_path: Path, field: str) -> None:
    book, other = ledger(tmp_path, 1), {field: ELSEWHERE[field]}
    assert set(ELSEWHERE) == set(Charge.model_fields) - {"batch_id", "event"}
    assert book.charge(PEOPLE[:1], charge()) == PEOPLE[:1]
    assert book.affordable(PEOPLE[:2], charge(1, **other)) == PEOPLE[1:2]
    assert book.charge(PEOPLE[:2], charge(1, **other)) == PEOPLE[1:2]


def test_a_file_that_is_replaced_while_it_is_written_charges_nobody(tmp_path: Path) -> None:
    book, copy = ledger(tmp_path), tmp_path / "copy"
    book.check()
    shutil.copy(book.file, copy)
    fits = PersonalLedger._fits

    def replaced(self: PersonalLedger, *args: Any) -> bool:
        copy.replace(book.file)
        return fits(self, *args)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(LocalError, match="was replaced"):
        patch.setattr(PersonalLedger, "_fits", replaced)
        book.charge(PEOPLE[:1], charge())


def test_what_did_not_leave_is_given_back(tmp_path: Path) -> None:
    book = ledger(tmp_path, 1)
    assert book.charge(PEOPLE[:2], charge()) == PEOPLE[:2]
    book.give_back(PEOPLE[:1], charge())
    assert book.affordable(PEOPLE[:2], charge(1)) == PEOPLE[:1]


@pytest.mark.parametrize("how", ["copied over it", "moved to its place", "emptied", "removed"])
def test_an_older_copy_is_refused_while_nodes_run_and_after(tmp_path: Path, how: str) -> None:
    book, yesterday = ledger(tmp_path, 1), tmp_path / "yesterday"
    book.charge(PEOPLE[:1], charge())
    shutil.copy(book.file, yesterday)
    book.charge(PEOPLE[1:], charge(1))
    if how == "copied over it":
        book.file.write_bytes(yesterday.read_bytes())
    elif how == "moved to its place":
        yesterday.replace(book.file)
    else:
        book.file.unlink()
        if how == "emptied":
            book.file.touch()
    for again in (book, ledger(tmp_path, 1)):
        for attempt in (again.check, lambda of=again: of.charge(PEOPLE[1:], charge(2))):
            with pytest.raises(LocalError, match="older copy") as caught:
                attempt()
            assert caught.value.slug == "unavailable"
    written = book.head.written()
    assert str(book.head.file(written)) in caught.value.detail
    book.head.file(written).unlink()
    book.check()  # the owner goes on without what it forgot


def test_a_process_that_dies_before_the_head_is_written_leaves_a_ledger_that_opens(
    tmp_path: Path,
) -> None:
    book = ledger(tmp_path)
    book.charge(PEOPLE, charge())
    number = book.head.written()
    book.head.write(number - 1)
    book.head.file(number).unlink()
    book.check()
    assert book.head.written() > number


def test_the_head_never_has_a_number_that_the_file_may_lose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that dies in between would leave a ledger that counts as an older copy."""
    book, write = ledger(tmp_path), HeadFolder.write
    durable: list[bool] = []

    def looking(head: HeadFolder, number: int) -> None:
        with closing(sqlite3.connect(book.file)) as database:
            durable.append(database.execute("SELECT number FROM head").fetchone() == (number,))
        write(head, number)

    monkeypatch.setattr(HeadFolder, "write", looking)
    book.check()
    book.charge(PEOPLE, charge())
    book.give_back(PEOPLE, charge())
    assert durable == [True] * 3


def test_a_damaged_ledger_and_one_of_another_version_are_refused(tmp_path: Path) -> None:
    book = ledger(tmp_path)
    book.check()
    for version, refusal in ((2, "has version 2"), (1, "")):
        with closing(sqlite3.connect(book.file)) as database:
            database.execute(f"PRAGMA user_version = {version}")
        if refusal:
            with pytest.raises(LocalError, match=refusal):
                book.charge(PEOPLE, charge())
    assert book.charge(PEOPLE, charge()) == PEOPLE, "nothing was changed"
    book.file.write_bytes(b"no database" * 100)
    with pytest.raises(LocalError, match="cannot use the ledger"):
        book.check()


RACER = """
import sys
from pathlib import Path
from typing import Any
from tests.node_client.test_ledger import PEOPLE, charge, ledger
book, own = ledger(Path(sys.argv[1])), int(sys.argv[2])
print(len([1 for number in range(12) for _ in book.charge(PEOPLE, charge(2 * number + own))]))
"""


def start(program: str, *words: str | Path) -> subprocess.Popen[str]:
    """Runs a program that can import the tests, also under PYTHONSAFEPATH."""
    return subprocess.Popen(
        [sys.executable, "-c", program, *words],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        stdout=subprocess.PIPE,
        text=True,
    )


def test_processes_that_race_do_not_pass_the_limit_together(tmp_path: Path) -> None:
    with start(RACER, tmp_path, "0") as one, start(RACER, tmp_path, "1") as other:
        charged = [int(racer.communicate(timeout=120)[0]) for racer in (one, other)]
    history = ledger(tmp_path).histories()
    assert [len(history[user]) for user in PEOPLE] == [2] * 4
    assert sum(charged) == 8


DYING = """
import sys
from pathlib import Path
from tests.node_client.test_ledger import PEOPLE, charge, ledger
book = ledger(Path(sys.argv[1]), 9)
for number in range(9):
    for user in PEOPLE:
        book.charge([user], charge(number))
        print(user, flush=True)  # from here on, an episode may run
"""


@pytest.mark.parametrize("asked", [1, 7])
def test_a_node_that_dies_before_the_report_leaves_its_charges(tmp_path: Path, asked: int) -> None:
    with start(DYING, tmp_path) as node:
        assert node.stdout is not None
        told = [node.stdout.readline().strip() for _ in range(asked)]
        assert set(told) <= set(PEOPLE)
        node.kill()
        told += [line.strip() for line in node.stdout if line.endswith("\n")]
    history = ledger(tmp_path, 9).histories()
    for user in PEOPLE:
        assert len(history.get(user, [])) >= told.count(user)
    left = [user for user in PEOPLE if len(history.get(user, [])) < 9]
    assert ledger(tmp_path, 9).affordable(PEOPLE, charge(99)) == left


@pytest.mark.parametrize("left", [False, True])
def test_a_charge_is_given_back_only_for_a_report_that_never_left(
    tmp_path: Path, *, left: bool
) -> None:
    """A report that left may be stored, whatever the answer says."""
    fake, totals = running.shuffler(1, lose_leases=True), Totals()
    people = {running.node_ids(1)[0]: PEOPLE}
    users = Users(tmp_path / "state", people, ledger=ledger(tmp_path))
    fake.deposit(world.signed())

    async def seal(keys: SealKeys, messages: Ints) -> bytes:
        if messages.any() and not left:  # not the rehearsal
            raise RuntimeError
        return await running.in_thread(keys, messages)

    until = lambda: bool(totals.refused)  # noqa: E731
    asyncio.run(running.serve(fake, tmp_path, users=users, totals=totals, seal=seal, until=until))
    assert len(ledger(tmp_path).histories()) == totals.refused["late"] == left


@pytest.mark.parametrize("changes", [{}, world.SUMS])
def test_a_charge_counts_on_no_single_owners_noise(changes: dict[str, Any]) -> None:
    """The owner's fraction, or the share of the slots that one owner's nodes may hold."""
    promise = {"epsilon": 50.0, "beta": 0.1, "dishonest_fraction": 0.4}
    for share, fraction in ((0.4, 0.4), (0.1, 0.2), (1.0, 0.2)):
        batch = world.descriptor(owner_share=share, guarantee=promise, **changes)
        event = Charge.of(batch, b"\x07" * 32, Guarantee(50.0, BETA, 0.2)).event
        assert event is not None
        assert event.event() == batch_event(batch, fraction)


# With the list of users


def test_users_are_asked_once_an_epoch_and_while_their_limit_allows(tmp_path: Path) -> None:
    users = Users(tmp_path / "state", {NODE: PEOPLE}, ledger=ledger(tmp_path))
    first, same_month, next_month, third = (charge(i, m) for i, m in enumerate((1, 1, 2, 3)))
    assert sorted(users.next_users(NODE, 9, first)) == PEOPLE
    assert users.mark_asked(PEOPLE[:3], first) == PEOPLE[:3]
    assert sorted(users.next_users(NODE, 9, same_month)) == PEOPLE[3:]
    assert sorted(users.next_users(NODE, 9, next_month)) == PEOPLE
    users.set_aside(PEOPLE[3:], next_month)
    assert sorted(users.next_users(NODE, 9, next_month)) == PEOPLE[:3]
    assert users.mark_asked(PEOPLE, next_month) == PEOPLE
    users.close()
    users = Users(tmp_path / "state", {NODE: PEOPLE[1:]}, ledger=ledger(tmp_path))
    assert sorted(users.next_users(NODE, 9, third)) == PEOPLE[3:], "the first is listed no more"
    assert users.over_limit(third) == set(PEOPLE[1:3])
    users.close()


def test_the_log_counts_people_over_their_limit_and_names_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "riffle")
    fake, book = running.shuffler(1), ledger(tmp_path, 1)
    people = [f"{'ab' * 15}{number:02x}" for number in range(3)]
    book.charge(people, charge(9, epoch=None))
    users = Users(tmp_path / "state", {running.node_ids(1)[0]: people}, ledger=book)
    fake.deposit(world.signed())
    until = lambda: bool(fake.declined)  # noqa: E731
    asyncio.run(running.serve(fake, tmp_path, nodes=1, users=users, until=until))
    assert fake.declined == ["over-limit"]
    assert "3 people are not asked" in caplog.text
    assert not [person for person in people if person in caplog.text]


def test_users_set_aside_come_back_in_the_next_epoch(tmp_path: Path) -> None:
    users = Users(tmp_path / "state", {NODE: PEOPLE})
    users.set_aside(PEOPLE[1:], charge(0, 1))
    assert users.next_users(NODE, 9, charge(1, 1)) == PEOPLE[:1]
    assert sorted(users.next_users(NODE, 9, charge(2, 2))) == PEOPLE
    users.close()


def test_two_nodes_share_one_ledger(tmp_path: Path) -> None:
    one, two = (
        Users(tmp_path / state, {NODE: PEOPLE}, ledger=ledger(tmp_path)) for state in ("a", "b")
    )
    for number in range(2):
        assert one.mark_asked(PEOPLE, charge(number, number)) == PEOPLE
    assert two.next_users(NODE, 9, charge(9, 9)) == []
    assert two.mark_asked(PEOPLE, charge(9, 9)) == []
    one.close()
    two.close()


# Shown by `riffle budget`


def test_the_owner_sees_what_people_have_spent(tmp_path: Path) -> None:
    book = ledger(tmp_path)
    book.charge(PEOPLE[:2], charge(0))
    book.charge(PEOPLE[:1], charge(1, 1))
    limit = ("--epsilon", str(book.limit.epsilon), "--beta", str(BETA))
    asked = ("budget", str(book.file), "--head-dir", str(tmp_path / "heads"), *limit)
    shown = document(riffle(*asked, "--format", "json"))
    assert shown["limit_epsilon"] == book.limit.epsilon
    people: Any = shown["people"]
    assert [(p["person"], p["epsilon"], len(p["batches"])) for p in people] == [
        (PEOPLE[0], spent(2), 2),
        (PEOPLE[1], spent(1), 1),
    ]
    assert people[0]["batches"][1]["epoch"]["start"] == 60
    assert PEOPLE[1] in riffle(*asked).stdout
    of_one = riffle(*asked, "--person", PEOPLE[0]).stdout
    assert charge(1).batch_id[:8] in of_one.replace("\n", "")
    assert riffle(*asked, "--person", "nobody").exit_code == 3
    book.file.unlink()
    assert riffle(*asked).exit_code == 4
