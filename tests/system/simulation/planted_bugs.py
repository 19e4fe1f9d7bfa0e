"""Faults that somebody could put into the services one day, each as a patch.

The simulation must find every one of them; see `test_simulation`.
"""

import asyncio
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import pytest
from sqlalchemy import Connection, Engine, update

from riffle.common.mechanism.sums import Words, add
from riffle.common.protocol.errors import RemoteError
from riffle.common.server.database import Head
from riffle.coordinator.batches import shuffler_client
from riffle.coordinator.runs.driver import Driver
from riffle.coordinator.store.records import DeploymentRecord
from riffle.coordinator.store.transactions import Store
from riffle.node_client.pipeline import ReportTiming
from riffle.node_client.users import Users
from riffle.shuffler import rules
from riffle.shuffler.permutation import permute_messages
from riffle.shuffler.store import batch_rows, leasing, report_rows
from riffle.shuffler.store.committer import Committer, Job
from riffle.shuffler.store.schema import batches
from riffle.shuffler.store.vault import BatchSecret
from tests.system.simulation.learner import N
from tests.system.simulation.machine import Killed


def answered_before_the_commit(patch: pytest.MonkeyPatch) -> None:
    """An upload is answered at once and committed half a second later."""
    commit = Committer._commit

    def early(committer: Committer, group: Sequence[Job[Any]]) -> None:
        if not all("report" in getattr(job.write, "__qualname__", "") for job in group):
            commit(committer, group)
            return
        with committer._engine.connect() as connection, connection.begin() as transaction:
            results = [job.write(connection) for job in group]
            transaction.rollback()
        for job, result in zip(group, results, strict=True):
            job.future.set_result(result)
        again = [Job(job.write) for job in group]
        asyncio.get_running_loop().call_later(0.5, _unless_killed, commit, committer, again)

    patch.setattr(Committer, "_commit", early)


def _unless_killed(commit: Any, *args: Any) -> None:
    try:
        commit(*args)
    except Killed:
        return


def replays_fill_the_batch(patch: pytest.MonkeyPatch) -> None:
    """The threshold counts reports that came, not distinct ones."""
    upload = leasing.store_reports

    def counting(connection: Connection, batch_id: str, *rest: Any) -> leasing.UploadSummary:
        done = upload(connection, batch_id, *rest)
        again = sum(result.outcome == "replayed" for result in done.reply.results)
        batch = batch_rows.find(connection, batch_id, lock=True)
        if again and batch.state == "open":
            row = batches.c.batch_id == batch_id
            reports = batch.reports + again
            connection.execute(update(batches).where(row).values(reports=reports))
            if reports >= batch.n:
                batch_rows.transition(connection, batch, "fill")
        return done

    patch.setattr(leasing, "store_reports", counting)


def replays_are_added_to_the_sum(patch: pytest.MonkeyPatch) -> None:
    """A vector is added whenever it comes, also if its report is stored already."""
    upload = leasing.store_reports

    def adding(
        connection: Connection, batch_id: str, node: str, frames: Any, cipher: Any, now: int
    ) -> leasing.UploadSummary:
        done = upload(connection, batch_id, node, frames, cipher, now)
        batch = batch_rows.find(connection, batch_id, lock=True)
        if cipher is not None and batch.word_bits:
            total = report_rows.read_sum(connection, batch, cipher)
            for frame, result in zip(frames, done.reply.results, strict=True):
                if result.outcome == "replayed":
                    add(total, frame[2])
            values = {"batch": batch_id, "sum": cipher.encrypt(batch.reports, total.tobytes())}
            connection.execute(report_rows._SAVE, values)
        return done

    patch.setattr(leasing, "store_reports", adding)


def a_vector_outlives_its_transaction(patch: pytest.MonkeyPatch) -> None:
    """The sum is kept in memory, so it keeps the vectors of an upload that is undone."""
    read_sum, kept = report_rows.read_sum, WeakKeyDictionary[Engine, dict[str, Words]]()

    def read_once(connection: Connection, batch: batch_rows.Batch, cipher: Any) -> Words:
        sums = kept.setdefault(connection.engine, {})
        if batch.batch_id not in sums:
            sums[batch.batch_id] = read_sum(connection, batch, cipher)
        return sums[batch.batch_id]

    patch.setattr(report_rows, "read_sum", read_once)


def handed_over_in_another_order(patch: pytest.MonkeyPatch) -> None:
    """Messages are permuted anew each time they are asked for, and nobody compares."""

    def anew(reports: Any, _key: bytes, **sizes: Any) -> Any:
        return permute_messages(reports, BatchSecret.generate().permutation, **sizes)

    def unchecked(connection: Connection, batch_id: str, sha256: str, messages: int) -> None:
        row = batches.c.batch_id == batch_id
        batch_rows.transition(
            connection, batch_rows.find(connection, batch_id, lock=True), "forward"
        )
        values = {"messages_sha256": sha256, "forwarded": messages}
        connection.execute(update(batches).where(row).values(values))

    patch.setattr("riffle.shuffler.lifecycle.permute_messages", anew)
    patch.setattr("riffle.shuffler.lifecycle.BatchLifecycle._remember", lambda *_: None)
    patch.setattr(batch_rows, "mark_forwarded", unchecked)


def asked_again_after_a_crash(patch: pytest.MonkeyPatch) -> None:
    """Whom a node has asked is forgotten when it is started again."""
    prepare = Users._prepare

    def forgetful(users: Users, key: bytes | None) -> None:
        prepare(users, key)
        users._database.execute("UPDATE users SET barred_until = 0")

    patch.setattr(Users, "_prepare", forgetful)


def acknowledged_before_it_is_settled(patch: pytest.MonkeyPatch) -> None:
    """The shuffler is told to erase a batch as soon as it is opened."""
    open_batch = Driver._open

    async def early(driver: Driver, row: DeploymentRecord, *rest: Any) -> Any:
        opened = await open_batch(driver, row, *rest)
        await driver.exchange.shuffler.acknowledge(row.batch_id, opened.messages_sha256, ())
        return opened

    patch.setattr(Driver, "_open", early)


def settled_without_the_fence(patch: pytest.MonkeyPatch) -> None:
    """A coordinator settles a batch without a look at who drives the run by now."""
    settle = Store.settle

    def unfenced(*settlement: Any) -> None:
        with pytest.MonkeyPatch.context() as unchecked:
            unchecked.setattr(Store, "_check_fence", lambda *_: None)
            settle(*settlement)

    patch.setattr(Store, "settle", unfenced)


def an_older_store_is_taken(patch: pytest.MonkeyPatch) -> None:
    """A service starts on whatever store it finds."""
    patch.setattr(Head, "start", Head._read)


def batches_of_an_older_store_go_on(patch: pytest.MonkeyPatch) -> None:
    """A batch that was released after the copy was made is filled and released once more."""
    patch.setattr(batch_rows, "abandon_open", lambda _: None)


def foreign_answers_are_believed(patch: pytest.MonkeyPatch) -> None:
    """Whatever is not a success is a refusal that the shuffler means."""

    def believed(peer: str, *_: object) -> RemoteError:
        return RemoteError("wrong-state", f"{peer} refused")

    patch.setattr(shuffler_client, "read_refusal", believed)


def lapses_cost_nothing(patch: pytest.MonkeyPatch) -> None:
    """Whoever lets leases lapse gets others at once."""
    patch.setattr(rules, "waits_until", lambda *_: 0)


def slow_nodes_ask_on(patch: pytest.MonkeyPatch) -> None:
    """A node asks people whose reports will be late."""
    patch.setattr(ReportTiming, "most_users", lambda *_: N)
    patch.setattr(ReportTiming, "in_time", lambda _timing, leases, *_: list(leases))


PLANTED_BUGS = {
    fault.__name__.replace("_", "-"): fault
    for fault in (
        answered_before_the_commit,
        replays_fill_the_batch,
        replays_are_added_to_the_sum,
        a_vector_outlives_its_transaction,
        handed_over_in_another_order,
        asked_again_after_a_crash,
        acknowledged_before_it_is_settled,
        settled_without_the_fence,
        an_older_store_is_taken,
        batches_of_an_older_store_go_on,
        foreign_answers_are_believed,
        lapses_cost_nothing,
        slow_nodes_ask_on,
    )
}
