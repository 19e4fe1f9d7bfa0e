"""Batches of sums: one sum of exactly n reports with n keys, and never a second one."""

import os
import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, delete, event, func, insert, select, update
from sqlalchemy.exc import OperationalError

from riffle.common.mechanism.sums import KEY_BYTES
from riffle.common.protocol import hpke
from riffle.common.protocol.errors import LocalError
from riffle.shuffler.core import preflight
from riffle.shuffler.settings import Settings
from riffle.shuffler.store.lease_rows import read_slots
from riffle.shuffler.store.schema import metadata, report_keys, reports, sums
from riffle.shuffler.store.vault import ReportCipher
from tests.common.descriptors import ONE_MESSAGE
from tests.shuffler.conftest import Api, both_engines, problem, until
from tests.shuffler.store.test_committer import Gate
from tests.shuffler.world import Batch, descriptor_bytes, user

pytestmark = pytest.mark.parametrize("aggregation", ["sums"], indirect=True)

LARGE: dict[str, Any] = {"states": 40, "horizon": 2, "policies": (((0,) * 40, (1,) * 40),)}


def frames(api: Api, batch: Batch, sent: list[bytes], first: int = 0) -> list[tuple[str, bytes]]:
    users = [user(first + i) for i in range(len(sent))]
    leases = api.leases(batch, users)
    return [(one.lease, batch.report(vector)) for one, vector in zip(leases, sent, strict=True)]


def stored(api: Api) -> list[int]:
    """How many sums, tags of keys and rows of reports the store has."""
    with api.core._store.engine.connect() as store:
        tables = (sums, report_keys, reports)
        return [store.scalar(select(func.count()).select_from(one)) or 0 for one in tables]


@both_engines
def test_one_sum_and_the_keys_are_handed_over_until_acknowledged_then_erased(api: Api) -> None:
    batch = api.deposit()
    sent = [batch.messages() for _ in range(4)]
    uploads = frames(api, batch, sent)
    assert api.outcomes(batch, uploads[1::2]) == ["accepted"] * 2
    assert problem(api.messages(batch)) == "batch-not-ready"
    api.restart()
    assert api.outcomes(batch, uploads) == ["accepted", "replayed"] * 2
    first = api.messages(batch)
    assert batch.parts(first.content) == batch.handed_over(sent)
    assert len(first.content) == batch.context.descriptor.release_bytes
    assert stored(api) == [1, 4, 2]
    api.restart()
    assert api.messages(batch).content == first.content
    digest = first.headers["Riffle-Messages-Digest"]
    path, named = f"/batches/{batch.batch_id}/acknowledgement", {"messages_sha256": digest}
    blame = api.call("POST", path, "coordinator-token", json=named | {"failed": [0]})
    assert problem(blame) == "malformed", "no key can fail"
    assert api.acknowledge(batch, digest).json()["state"] == "erased"
    assert stored(api) == [0, 0, 0]
    assert problem(api.messages(batch)) == "late"


def test_a_short_batch_is_never_summed(api: Api) -> None:
    batch = api.deposit()
    api.outcomes(batch, frames(api, batch, [batch.messages() for _ in range(3)]))
    assert api.abandon(batch).json()["state"] == "abandoned"
    assert problem(api.messages(batch)) == "late"
    assert stored(api) == [0, 0, 0]


def test_nothing_stays_of_a_batch_that_is_deleted_in_pieces(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("riffle.shuffler.lifecycle.SLOTS_A_DELETE", 1)
    batch = api.deposit()
    for one in frames(api, batch, [batch.messages() for _ in range(3)]):
        assert api.outcomes(batch, [one]) == ["accepted"]
    assert stored(api) == [1, 3, 3]
    api.abandon(batch)
    assert stored(api) == [0, 0, 0]


@pytest.mark.parametrize("store_url", ["postgresql"], indirect=True)
def test_a_batch_is_driven_by_two_replicas(api: Api) -> None:
    with ExitStack() as stack:
        other = api.replica(stack)
        batch = api.deposit()
        sent = [batch.messages() for _ in range(4)]
        uploads = frames(api, batch, sent)
        assert api.outcomes(batch, uploads[:1]) == ["accepted"]
        copy = (uploads[1][0], batch.report(sent[0]))
        assert other.outcomes(batch, [copy]) == ["reused-key"]
        for turn, one in enumerate(uploads[1:]):
            assert (api, other)[turn % 2].outcomes(batch, [one]) == ["accepted"]
            assert (other, api)[turn % 2].outcomes(batch, [one]) == ["replayed"]
        released = [one.messages(batch).content for one in (api, other)]
        assert released[0] == released[1]
        assert batch.parts(released[0]) == batch.handed_over(sent)


@pytest.mark.parametrize("store_url", ["postgresql"], indirect=True)
def test_one_key_sent_to_both_replicas_at_once_is_counted_once(api: Api) -> None:
    with ExitStack() as stack, ThreadPoolExecutor(2) as threads:
        replicas = (api, api.replica(stack))
        batch = api.deposit(n=8)
        for turn in range(4):
            pair = frames(api, batch, [batch.messages()] * 2, 2 * turn)
            answers = threads.map(lambda to, one: to.outcomes(batch, [one]), replicas, pair)
            assert sorted(one for answer in answers for one in answer) == ["accepted", "reused-key"]
        assert api.status(batch)["reports"] == 4


@both_engines
def test_a_reused_key_is_refused_and_its_vector_not_added(api: Api) -> None:
    batch = api.deposit()
    sent = [batch.messages() for _ in range(4)]
    copies = [sent[0], sent[0][:KEY_BYTES] + os.urandom(len(sent[0]) - KEY_BYTES)]
    uploads = frames(api, batch, [*sent[:2], *copies])
    assert api.outcomes(batch, [uploads[0], uploads[2]]) == ["accepted", "reused-key"]
    api.restart()
    assert api.outcomes(batch, uploads) == ["replayed", "accepted", "reused-key", "reused-key"]
    assert api.status(batch)["dropped"] == {"reused-key": 3}
    again = [(lease, batch.report(one)) for (lease, _), one in zip(uploads[2:], sent[2:])]  # noqa: B905
    assert api.outcomes(batch, again) == ["accepted"] * 2
    assert batch.parts(api.messages(batch).content) == batch.handed_over(sent)


UNDONE_BEFORE = {
    "the sum is stored": "UPDATE sums",
    "the tags of keys are stored": "INSERT INTO report_keys",
    "the keys are stored": "INSERT INTO reports",
    "the reports are counted": "UPDATE batches SET reports",
    "the batch is sealed": "UPDATE batches SET state",
    "the commit": "COMMIT",
}
"""The steps of an upload's transaction after its vectors were added, and how their SQL begins."""


@contextmanager
def undone_before(
    api: Api, statement: str, error: Exception, times: int
) -> Iterator[list[Exception]]:
    """Raises an error before a statement, so many times; yields a list of the errors raised."""
    engine, raised = api.core._store.engine, list[Exception]()

    def execute(_connection: Connection, _cursor: object, text: str, *_: object) -> None:
        if text.startswith(statement) and len(raised) < times:
            raised.append(error)
            raise error

    def commit(connection: Connection) -> None:
        execute(connection, None, "COMMIT")

    event.listen(engine, "before_cursor_execute", execute)
    event.listen(engine, "commit", commit)
    try:
        yield raised
    finally:
        event.remove(engine, "before_cursor_execute", execute)
        event.remove(engine, "commit", commit)


@both_engines
@pytest.mark.parametrize(
    ("error", "times"),
    [
        pytest.param(OperationalError("", {}, OSError("no disk")), 1, id="group fails"),
        pytest.param(RuntimeError("a fault"), 1, id="group is run apart"),
        pytest.param(RuntimeError("a fault"), 2, id="upload fails also apart"),
    ],
)
def test_an_upload_that_is_undone_leaves_nothing_in_the_sum(
    api: Api, error: Exception, times: int
) -> None:
    """After the failure, the node sends the upload again to the same process."""
    for number, (step, statement) in enumerate(UNDONE_BEFORE.items()):
        batch = api.deposit(deployment=number)
        sent = [batch.messages() for _ in range(4)]
        for one in frames(api, batch, sent, 4 * number):
            with undone_before(api, statement, error, times) as raised:
                answer = api.upload(batch, [one])
            again = "replayed" if answer.status_code == 200 else "accepted"
            assert api.outcomes(batch, [one]) == [again], step
        assert raised, step
        assert stored(api)[:2] == [number + 1, 4 * (number + 1)], step
        assert batch.parts(api.messages(batch).content) == batch.handed_over(sent), step


@both_engines
def test_an_upload_that_is_run_again_without_its_neighbour_is_added_once(api: Api) -> None:
    """Another write of the same transaction fails, so every write is undone and run apart."""
    batch, committer = api.deposit(), api.core._store.committer
    sent = [batch.messages() for _ in range(4)]

    def fails(_: Connection) -> None:
        raise RuntimeError

    with ThreadPoolExecutor(1) as thread:
        for one in frames(api, batch, sent):
            gate = Gate()
            committer.submit(gate)
            assert gate.entered.wait(10)
            answer = thread.submit(api.outcomes, batch, [one])
            until(lambda: committer.waiting == 1)
            failed = committer.submit(fails)
            gate.leave.set()
            assert answer.result() == ["accepted"]
            assert isinstance(failed.exception(10), RuntimeError)
    assert batch.parts(api.messages(batch).content) == batch.handed_over(sent)


@pytest.mark.parametrize("owner", ["owner", "another"])
def test_a_key_of_another_node_is_refused(api: Api, owner: str) -> None:
    _, token = api.enrol(10, owner)
    batch = api.deposit()
    vector = batch.messages()
    assert api.outcomes(batch, frames(api, batch, [vector])) == ["accepted"]
    (held,) = api.leases(batch, [user(1)], token)
    assert api.outcomes(batch, [(held.lease, batch.report(vector))], token) == ["reused-key"]


def test_a_key_may_occur_in_two_batches(api: Api) -> None:
    """Its masks differ, since they depend on the batch; the shuffler cannot refuse everything."""
    first, second = api.deposit(), api.deposit(deployment=1)
    vector = first.messages()
    assert api.outcomes(first, frames(api, first, [vector])) == ["accepted"]
    assert api.outcomes(second, frames(api, second, [vector], 1)) == ["accepted"]


@pytest.mark.parametrize("key", [bytes(32), b"\1" + bytes(31), b"\xff" * 32])
def test_points_of_low_order_are_keys_like_others(api: Api, key: bytes) -> None:
    batch = api.deposit()
    sent = [batch.messages() for _ in range(4)]
    sent[2] = key + sent[2][KEY_BYTES:]
    assert api.outcomes(batch, frames(api, batch, sent)) == ["accepted"] * 4
    assert batch.parts(api.messages(batch).content) == batch.handed_over(sent)


@pytest.mark.parametrize("cut", [-1, 2, 32])
def test_a_vector_of_another_size_is_refused(api: Api, cut: int) -> None:
    batch = api.deposit()
    vector = (batch.messages() + bytes(2))[: -1 - cut]
    assert problem(api.upload(batch, frames(api, batch, [vector]))) == "wrong-size"
    assert stored(api) == [1, 0, 0]


def test_an_altered_report_does_not_open_and_is_no_replay_of_another(api: Api) -> None:
    batch, other = api.deposit(), api.deposit(deployment=1)
    ((lease, report),) = frames(api, batch, [batch.messages()])
    foreign = hpke.seal(batch.batch_key, other.context.report_info, batch.messages())
    sealed_wrong = [foreign, batch.report(key=other.batch_key), other.report()]
    assert api.outcomes(batch, [(lease, one) for one in sealed_wrong]) == ["wrong-key"] * 3
    for place in (0, 40, 60, -1):
        bad = bytearray(report)
        bad[place] ^= 1
        assert api.outcomes(batch, [(lease, bytes(bad))]) == ["wrong-key"]
    assert api.outcomes(batch, [(lease, report)]) == ["accepted"]


@both_engines
@pytest.mark.parametrize("fault", ["earlier", "foreign", "missing"])
def test_a_sum_that_is_not_that_of_its_reports_is_not_handed_over(api: Api, fault: str) -> None:
    """A database restored in part has an earlier sum, of three reports of the batch."""
    batch, other = api.deposit(), api.deposit(deployment=1)
    uploads = frames(api, batch, [batch.messages() for _ in range(4)])
    api.outcomes(batch, uploads[:3])
    kept = {"earlier": sum_of(api, batch), "foreign": sum_of(api, other)}
    api.outcomes(batch, uploads[3:])
    with api.core._store.engine.begin() as store:
        of_batch = sums.c.batch_id == batch.batch_id
        wrong = update(sums).where(of_batch).values(sealed=kept.get(fault))
        store.execute(delete(sums).where(of_batch) if fault == "missing" else wrong)
    answer = api.messages(batch)
    assert (answer.status_code, problem(answer)) == (500, "internal")
    assert "released" in answer.json()["detail"]


def sum_of(api: Api, batch: Batch) -> bytes:
    with api.core._store.engine.connect() as store:
        query = select(sums.c.sealed).where(sums.c.batch_id == batch.batch_id)
        return bytes(store.scalar(query) or b"")


@pytest.mark.parametrize("released", [False, True])
def test_after_a_backup_is_restored_no_second_sum_is_handed_over(
    api: Api, tmp_path: Path, *, released: bool
) -> None:
    """The copy has three reports. A sum of these and another one would differ in one user."""
    batch, file = api.deposit(), api.settings.data_dir / "shuffler.sqlite"
    uploads = frames(api, batch, [batch.messages() for _ in range(4)])
    api.outcomes(batch, uploads[:3])
    copy = sqlite3.connect(tmp_path / "copy")
    with closing(copy), closing(sqlite3.connect(file)) as source:
        source.backup(copy)
    api.outcomes(batch, uploads[3:])
    if released:
        assert api.messages(batch).status_code == 200
    api._stack.close()
    for old in file.parent.glob(f"{file.name}*"):
        old.unlink()
    (tmp_path / "copy").rename(file)
    if not released:  # no sum has left: the batch goes on with its three reports
        api.restart()
        assert api.outcomes(batch, uploads) == ["replayed"] * 3 + ["accepted"]
        assert api.messages(batch).status_code == 200
        return
    with pytest.raises(LocalError, match="older copy") as refused:
        preflight(api.settings)
    accepted = int(refused.value.detail.rpartition("=")[2].split()[0])
    preflight(api.settings.model_copy(update={"accept_older_store": accepted}))
    api.restart()
    assert api.outcomes(batch, uploads[3:]) == ["late"]
    assert problem(api.messages(batch)) == "late"


@both_engines
def test_a_failover_that_nobody_notices_hands_no_other_sum_over(api: Api) -> None:
    """The new database lacks the last report and the hand-over; the head's folder is another."""
    batch = api.deposit()
    uploads = frames(api, batch, [batch.messages() for _ in range(4)])
    api.outcomes(batch, uploads[:3])
    tables = [one for one in metadata.sorted_tables if one.name != "meta"]
    with api.core._store.engine.connect() as store:
        before = [store.execute(select(table)).mappings().all() for table in tables]
    api.outcomes(batch, uploads[3:])
    first = api.messages(batch)
    assert first.status_code == 200
    with api.core._store.engine.begin() as store:
        for table in reversed(tables):
            store.execute(delete(table))
        for table, rows in zip(tables, before, strict=True):
            if rows:
                store.execute(insert(table), [dict(row) for row in rows])
    api.restart()
    assert api.status(batch)["state"] == "open", "the copy was not noticed"
    other = (uploads[3][0], batch.report())
    assert api.outcomes(batch, [other]) == ["accepted"]
    assert problem(api.messages(batch)) == "late"
    assert api.status(batch)["state"] == "abandoned"


def test_sums_are_refused_unless_the_operator_allows_them(api: Api) -> None:
    assert Settings.model_fields["aggregations"].default == ("messages",)
    api.restart(aggregations=("messages",))
    assert problem(api.put(descriptor_bytes(**ONE_MESSAGE["sums"]))) == "trust-refused"


def test_disk_and_memory_do_not_grow_with_the_number_of_reports(api: Api) -> None:
    """40 vectors of 12 KB in single uploads: the store has room for a few of them only."""
    batch = api.deposit(n=40, layer=None, **LARGE)
    file = api.settings.data_dir / "shuffler.sqlite"
    sent = [batch.messages() for _ in range(40)]
    uploads = frames(api, batch, sent)
    api.outcomes(batch, uploads[:1])
    with closing(sqlite3.connect(file)) as store:
        before = store.execute("PRAGMA page_count").fetchone()[0]
    for one in uploads[1:]:
        assert api.outcomes(batch, [one]) == ["accepted"]
    with closing(sqlite3.connect(file)) as store:
        grown = 4096 * (store.execute("PRAGMA page_count").fetchone()[0] - before)
    assert grown < 3 * len(sent[0]) < 40 * len(sent[0])
    assert batch.parts(api.messages(batch).content) == batch.handed_over(sent)


def test_no_vector_of_a_user_is_stored(api: Api) -> None:
    """Even under the batch's secret, the store has two sums of two users, then one of four."""
    batch, file = api.deposit(), api.settings.data_dir / "shuffler.sqlite"
    sent = [batch.messages() for _ in range(4)]
    uploads = frames(api, batch, sent)
    for pair in (uploads[:2], uploads[2:]):
        api.outcomes(batch, pair)
        cipher = ReportCipher(batch.batch_id, api.core._vault.get(batch.batch_id))
        with closing(sqlite3.connect(file)) as store:
            (total,) = store.execute("SELECT sealed FROM sums").fetchone()
            rows = store.execute("SELECT slots, sealed FROM reports").fetchall()
        count = 2 * len(rows)
        assert cipher.decrypt(count, total) == batch.handed_over(sent[:count])[0]
        kept = b"".join(cipher.decrypt(read_slots(slots), keys) for slots, keys in rows)
        assert kept == b"".join(report[:KEY_BYTES] for report in sent[:count])


def test_no_file_has_a_key_or_a_sum_in_clear(api: Api) -> None:
    """All that an erased batch leaves behind was encrypted under its secret."""
    batch = api.deposit()
    sent = [batch.messages() for _ in range(4)]
    api.outcomes(batch, frames(api, batch, sent))
    hidden = [*batch.handed_over(sent), *(report[KEY_BYTES:] for report in sent)]
    for erase in (False, True):
        if erase:
            api.finish(batch)
        for file in (path for path in api.settings.data_dir.rglob("*") if path.is_file()):
            data = file.read_bytes()
            assert not any(part in data for part in hidden)
