"""A process that dies between two steps: the next one on the same directory completes the work."""

import time
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlalchemy import Connection, text
from sqlalchemy.exc import OperationalError

from riffle.common.protocol.errors import LocalError
from riffle.common.server.database import Head
from riffle.shuffler.core import preflight, store_head
from riffle.shuffler.permutation import permute_messages
from riffle.shuffler.store import batch_rows, report_rows
from riffle.shuffler.store.vault import Vault
from tests.shuffler.conftest import Api, both_aggregations, both_engines, problem
from tests.shuffler.world import (
    COORDINATOR_TOKEN,
    NOW,
    OPERATOR_TOKEN,
    Batch,
    descriptor_bytes,
    user,
)

pytestmark = both_engines


def count(api: Api, table: str) -> int:
    with api.core._store.engine.connect() as connection:
        found = connection.execute(text(f"SELECT count(*) FROM {table}")).scalar_one()  # noqa: S608
    return int(found)


def secrets(api: Api) -> list[Path]:
    """Secrets of batches, then the records of their hand-overs."""
    files = (api.directory / "data" / "secrets").iterdir()
    return sorted(files, key=lambda file: file.suffix == ".released")


def dies(*_: Any, **__: Any) -> Any:
    raise RuntimeError("killed here")


def before_destroying(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Vault, "destroy", dies)


def after_destroying(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(report_rows, "delete_reports", dies)


def after_deleting(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(batch_rows, "mark_clean", dies)


@pytest.mark.parametrize("point", [before_destroying, after_destroying, after_deleting])
def test_a_crash_between_acknowledgement_and_erasure(
    api: Api, point: Callable[[pytest.MonkeyPatch], None]
) -> None:
    batch = api.deposit()
    api.fill(batch)
    digest = api.messages(batch).headers["Riffle-Messages-Digest"]
    with pytest.MonkeyPatch.context() as patch:
        point(patch)
        assert api.acknowledge(batch, digest).status_code == 500
    api.restart()
    assert api.status(batch)["state"] == "erased"
    assert (secrets(api), count(api, "reports")) == ([], 0)
    assert api.acknowledge(batch, digest).json()["state"] == "erased"


@pytest.mark.parametrize("point", [before_destroying, after_destroying, after_deleting])
def test_a_crash_while_an_expired_batch_is_abandoned(
    api: Api, point: Callable[[pytest.MonkeyPatch], None]
) -> None:
    batch = api.deposit()
    lease = api.leases(batch, [user(0)])[0]
    api.outcomes(batch, [(lease.lease, batch.report())])
    api.clock.now = NOW + 3_600
    with pytest.MonkeyPatch.context() as patch:
        point(patch)
        path = f"/batches/{batch.batch_id}/status"
        assert api.call("GET", path, COORDINATOR_TOKEN).status_code == 500
    api.restart()
    assert api.status(batch)["state"] == "abandoned"
    assert (secrets(api), count(api, "reports"), count(api, "lease_groups")) == ([], 0, 1)


def test_expiry_is_found_at_start(api: Api) -> None:
    batch = api.deposit()
    api.clock.now = NOW + 3_600
    api.restart()
    assert secrets(api) == []
    assert api.status(batch)["state"] == "abandoned"


def test_a_secret_written_but_its_deposit_not_committed(api: Api) -> None:
    """The key of a deposit that was never answered is one that nobody has seen: it is used."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch_rows, "insert_batch", dies)
        assert api.put(descriptor_bytes()).status_code == 500
    orphan = secrets(api)[0].read_bytes()
    api.restart()
    batch = api.deposit()
    assert [path.read_bytes() for path in secrets(api)] == [orphan]
    assert api.fill(batch)


@both_aggregations
def test_a_hand_over_whose_answer_was_lost(api: Api) -> None:
    """Sealed, forwarded, killed: the next process hands over the same bytes."""
    batch = api.deposit()
    sent = api.fill(batch)
    api.restart()
    first = api.messages(batch).content
    api.restart()
    assert api.messages(batch).content == first
    assert batch.parts(first) == batch.handed_over(sent)


def other_secret(api: Api, _: pytest.MonkeyPatch) -> None:
    path = secrets(api)[0]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1  # in the permutation's key
    path.write_bytes(data)


def other_permutation(_: Api, patch: pytest.MonkeyPatch) -> None:
    """Moves every message by one place: another key may permute a few messages in the same way."""
    patch.setattr(
        "riffle.shuffler.lifecycle.permute_messages",
        lambda *a, **k: np.roll(permute_messages(*a, **k), 1, axis=0),
    )


@both_aggregations
@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (other_secret, "stored reports, or their secret, are damaged; none is released"),
        (other_permutation, "the store or the secret changed; nothing is handed over"),
    ],
)
def test_bytes_that_would_differ_are_not_handed_over(
    api: Api,
    fault: Callable[[Api, pytest.MonkeyPatch], None],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two permutations of the same reports could be compared; so a changed secret ends it."""
    batch = api.deposit()
    api.fill(batch)
    api.messages(batch)
    api.restart()
    fault(api, monkeypatch)
    answer = api.messages(batch)
    assert (answer.status_code, answer.json()["detail"]) == (500, says)


def lose_secret(api: Api, batch: Batch) -> None:
    (api.directory / "data" / "secrets" / f"{batch.batch_id}.secret").unlink()


@pytest.mark.parametrize("restart", [True, False])
def test_a_lost_secret_ends_its_batch_and_no_other(api: Api, restart: bool) -> None:
    short, full, fine = (api.deposit(deployment=number) for number in range(3))
    lease = api.leases(short, [user(20)])[0]
    api.fill(full)
    lose_secret(api, short)
    lose_secret(api, full)
    if restart:
        preflight(api.settings)
        api.restart()
    assert api.outcomes(short, [(lease.lease, short.report())]) == ["late"]
    answer = api.messages(full)
    assert (answer.status_code, problem(answer)) == (410, "late")
    assert [api.status(one)["state"] for one in (short, full, fine)] == [
        "abandoned",
        "abandoned",
        "open",
    ]
    assert count(api, "reports") == 0
    api.fill(fine, first_user=10)
    assert api.finish(fine)


def test_a_damaged_secret_is_a_lost_one(api: Api) -> None:
    batch = api.deposit()
    secrets(api)[0].write_bytes(b"not a secret")
    api.restart()
    assert api.status(batch)["state"] == "abandoned"
    assert secrets(api) == []


@both_aggregations
def test_a_lost_secret_of_a_batch_whose_messages_have_left(api: Api) -> None:
    """The batch cannot be handed over again, but the analyzer may still acknowledge it."""
    batch = api.deposit()
    api.fill(batch)
    digest = api.messages(batch).headers["Riffle-Messages-Digest"]
    lose_secret(api, batch)
    api.restart()
    for _ in range(2):
        assert problem(api.messages(batch)) == "late"
    assert api.status(batch)["state"] == "forwarded"
    assert api.acknowledge(batch, digest).json()["state"] == "erased"
    assert count(api, "reports") == 0


def test_a_secret_that_cannot_be_read_stops_the_start_and_ends_nothing(api: Api) -> None:
    batch = api.deposit()
    path = secrets(api)[0]
    path.rename(path.with_suffix(".aside"))
    path.mkdir()
    with pytest.raises(LocalError, match="cannot read a batch secret"):
        api.restart()
    path.rmdir()
    path.with_suffix(".aside").rename(path)
    api.restart()
    assert api.status(batch)["state"] == "open"


def sealed_and_forwarded(api: Api) -> tuple[Batch, Batch, str]:
    """Returns a full batch, another that was handed over, and its digest; kept for 1,000 s."""
    api.restart(retention_seconds=1_000)
    sealed, forwarded = api.deposit(), api.deposit(deployment=1)
    api.fill(sealed)
    api.fill(forwarded, first_user=10)
    return sealed, forwarded, api.messages(forwarded).headers["Riffle-Messages-Digest"]


def test_a_batch_that_nobody_takes_is_not_kept_for_ever(api: Api) -> None:
    """Sealed: nothing has left, so it is abandoned. Forwarded: it counts, so it is erased."""
    sealed, forwarded, digest = sealed_and_forwarded(api)
    api.clock.now = NOW + 999  # from sealing: an expiry that is far away keeps nothing longer
    states = [api.status(one)["state"] for one in (sealed, forwarded)]
    assert (states, len(secrets(api))) == (["sealed", "forwarded"], 3)
    api.clock.now += 1
    states = [api.status(one)["state"] for one in (sealed, forwarded)]
    assert states == ["abandoned", "erased"]
    assert (secrets(api), count(api, "reports")) == ([], 0)
    assert [problem(api.messages(one)) for one in (sealed, forwarded)] == ["late", "late"]
    assert api.acknowledge(forwarded, digest).json()["state"] == "erased"


def test_a_batch_due_for_erasure_is_handed_over_no_more(api: Api) -> None:
    """No caller asked for anything since it was due, so the request itself has to end it."""
    sealed, forwarded, digest = sealed_and_forwarded(api)
    api.clock.now = NOW + 999
    assert api.messages(forwarded).headers["Riffle-Messages-Digest"] == digest
    api.clock.now += 1
    assert [problem(api.messages(one)) for one in (sealed, forwarded)] == ["late", "late"]
    assert (secrets(api), count(api, "reports")) == ([], 0)


@pytest.mark.parametrize("ask", ["batches", "status", "messages", "start"])
def test_the_next_request_erases_a_batch_that_is_due(api: Api, ask: str) -> None:
    api.restart(retention_seconds=1_000)
    batch, other = api.deposit(), api.deposit(deployment=1, expires_at=NOW + 9_000)
    api.fill(batch)
    api.clock.now += 1_000
    if ask == "batches":
        assert len(api.call("GET", "/batches", api.token).json()["batches"]) == 1
    elif ask == "status":
        api.status(other)
    elif ask == "messages":
        assert problem(api.messages(other)) == "batch-not-ready"
    else:
        api.restart()
    assert [file.name for file in secrets(api)] == [f"{other.batch_id}.secret"]
    assert count(api, "reports") == 0


@pytest.mark.parametrize("erased", [False, True], ids=["sealed", "erased"])
def test_no_leftover_of_an_erased_batch_opens(api: Api, *, erased: bool) -> None:
    """The database never holds a batch's keys, nor a message that is not under one of them."""
    started = time.time()
    batch = api.deposit()
    secret = secrets(api)[0].read_bytes()
    sent = api.fill(batch)
    if erased:
        api.finish(batch)
    url = api.core._store.engine.url
    paths: Iterable[Path] = (api.directory / "data").rglob("*")
    if "host" in url.query:  # the server's files, its log too
        paths = chain(paths, (Path(str(url.query["host"])) / "data").rglob("*"))
    for path in (path for path in paths if path.is_file()):
        if path.stat().st_mtime < started - 1:
            continue
        data = path.read_bytes()
        assert not any(message in data for message in sent)
        if path.suffix != ".secret":
            assert secret[16:48] not in data
            assert secret[48:] not in data


def test_a_user_marked_by_a_batch_is_marked_whatever_follows(api: Api) -> None:
    batch = api.deposit()
    lease = api.leases(batch, [user(0)])[0]
    assert api.outcomes(batch, [(lease.lease, batch.report())]) == ["accepted"]
    api.restart()
    assert api.status(batch)["reports"] == 1
    answer = api.lease(batch, [user(0)]).json()
    assert answer["refused"] == [{"user": user(0), "problem": "user-unavailable"}]


FULL_IN_POSTGRES = """
    CREATE FUNCTION full_disk() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN RAISE EXCEPTION 'no space left' USING ERRCODE = 'disk_full'; END $$;
    CREATE TRIGGER full_disk BEFORE INSERT ON reports
    FOR EACH ROW WHEN (NEW.slot >= 25) EXECUTE FUNCTION full_disk()
"""


@both_aggregations
def test_a_full_disk_loses_nothing_that_was_answered(api: Api) -> None:
    """Uploads until the store is full; after a restart with room again, none of them is lost."""
    batch = api.deposit(n=40)
    leases = api.leases(batch, [user(i) for i in range(40)])
    frames = [(lease.lease, batch.report()) for lease in leases]

    def no_more_room(connection: Connection) -> None:
        if connection.dialect.name == "postgresql":
            connection.execute(text(FULL_IN_POSTGRES))
            return
        pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()
        connection.exec_driver_sql(f"PRAGMA max_page_count={pages + 1}")

    def room_again(connection: Connection) -> None:
        if connection.dialect.name == "postgresql":
            connection.execute(text("DROP FUNCTION full_disk CASCADE"))

    api.core._store.committer.submit(no_more_room).result(10)
    answers = [api.upload(batch, [frame]) for frame in frames]
    stored = [answer.status_code == 200 for answer in answers]
    assert any(stored)
    assert {answer.status_code for answer in answers} == {200, 503}
    api.core._store.committer.submit(room_again).result(10)
    api.restart()
    expected = ["replayed" if was else "accepted" for was in stored]
    assert api.outcomes(batch, frames) == expected


@pytest.mark.parametrize("how", ["write", "read"])
def test_a_store_that_fails_is_told_without_what_it_worked_on(
    api: Api, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writes share a transaction: its error may quote another caller's users."""

    def fails(*_: object, **__: object) -> None:
        raise OperationalError("SELECT :user", {"user": user(7)}, ValueError(user(7)))

    batch = api.deposit()
    if how == "write":
        monkeypatch.setattr("riffle.shuffler.store.leasing.lease_slots", fails)
        answer = api.lease(batch, [user(0)])
    else:
        monkeypatch.setattr(batch_rows, "status", fails)
        path = f"/batches/{batch.batch_id}/status"
        answer = api.call("GET", path, COORDINATOR_TOKEN)
    assert (answer.status_code, problem(answer)) == (503, "unavailable")
    assert not [word for word in (user(7), "SELECT") if word in answer.text]


def head(api: Api) -> int:
    return store_head(api.settings).written()


def unwritable(*_: object) -> None:
    raise LocalError("unavailable", "cannot write the store's head")


def test_what_must_not_be_forgotten_is_in_the_head_before_it_is_answered(api: Api) -> None:
    """Killed before the head is written, the service starts again, and a repetition is answered."""
    batch = api.deposit()
    api.fill(batch)
    node, _ = api.enrol(9)
    body = {"name": "a node", "owner": "owner", "users": 9}
    answered: dict[str, Callable[[], int]] = {
        "countersignature": lambda: api.put(descriptor_bytes(deployment=1)).status_code,
        "release": lambda: api.messages(batch).status_code,
        "enrolment": lambda: api.call("POST", "/nodes", OPERATOR_TOKEN, json=body).status_code,
        "revocation": lambda: api.call("DELETE", f"/nodes/{node}", OPERATOR_TOKEN).status_code,
    }
    for what, call in answered.items():
        before = head(api)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Head, "write", unwritable)
            assert (what, call()) == (what, 503)
        assert head(api) == before
        preflight(api.settings)
        assert head(api) == before + 1, "the database was ahead"
        assert call() < 300
        assert head(api) == before + 2, what


def test_the_head_never_has_a_number_that_the_store_may_lose(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service killed in between would take its own store for an older copy."""
    write, durable = Head.write, list[bool]()

    def looking(of: Head, number: int) -> None:
        with api.core._store.engine.connect() as connection:
            durable.append(of._read(connection) >= number)
        write(of, number)

    monkeypatch.setattr(Head, "write", looking)
    api.fill(batch := api.deposit())
    api.enrol(1)
    api.messages(batch)
    preflight(api.settings)
    assert durable == [True] * 4


def test_a_store_rolled_back_under_the_service_is_written_no_more(api: Api) -> None:
    batch = api.deposit()
    lease = api.leases(batch, [user(0)])[0]
    store_head(api.settings).write(99)  # as if the database had been replaced since
    ready = api.client.get("/readyz")
    assert ready.status_code == 503
    assert "replaced by an older one" in ready.text
    assert api.upload(batch, [(lease.lease, batch.report())]).status_code == 503
    assert problem(api.put(descriptor_bytes(deployment=1))) == "unavailable"
    with pytest.raises(LocalError, match="ACCEPT_OLDER_STORE=99"):
        preflight(api.settings)


def test_only_its_owner_may_enter_the_data_folder(api: Api, tmp_path: Path) -> None:
    data, head = tmp_path / "new" / "data", tmp_path / "heads"
    head.mkdir()
    changes = {"data_dir": data, "head_dir": head, "store_url": None}
    preflight(api.settings.model_copy(update=changes))
    for folder in (data, data / "secrets"):
        assert folder.stat().st_mode & 0o077 == 0


@both_aggregations
def test_open_batches_of_an_accepted_older_store_are_abandoned(api: Api) -> None:
    """They may have been released since; a second release would differ in a few reports only."""
    batch, *others = (api.deposit(deployment=number) for number in range(3))
    lease = api.leases(batch, [user(0)])[0]
    api.upload(batch, [(lease.lease, batch.report())])
    preflight(api.settings)
    assert api.status(batch)["state"] == "open"
    store_head(api.settings).write(99)
    preflight(api.settings.model_copy(update={"accept_older_store": 99}))
    api.restart()
    assert {api.status(one)["state"] for one in (batch, *others)} == {"abandoned"}
    assert secrets(api) == []


def test_a_file_deleted_under_the_service_is_written_no_more(api: Api) -> None:
    if api.settings.store_url:
        pytest.skip("PostgreSQL's files are its own")
    batch = api.deposit()
    lease = api.leases(batch, [user(0)])[0]
    for file in api.settings.data_dir.glob("shuffler.sqlite*"):
        file.unlink()
    assert api.upload(batch, [(lease.lease, batch.report())]).status_code == 503
    assert "removed or replaced" in api.client.get("/readyz").text
    with pytest.raises(LocalError, match="older copy"):
        preflight(api.settings)
