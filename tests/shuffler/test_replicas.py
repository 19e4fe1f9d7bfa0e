"""Two shufflers on one store: batches fill through both, and each takes over from the other."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, func, select, update

from riffle.common.protocol.errors import LocalError
from riffle.common.server.database import try_claim
from riffle.shuffler.core import preflight
from riffle.shuffler.store import leasing
from riffle.shuffler.store.schema import batches, declined, lease_groups, nodes
from tests.postgres import during_commit
from tests.shuffler.conftest import Api, problem, until
from tests.shuffler.world import (
    COORDINATOR_TOKEN,
    NOW,
    OPERATOR_TOKEN,
    Batch,
    descriptor_bytes,
    multiset,
    user,
)

pytestmark = pytest.mark.parametrize("store_url", ["postgresql"], indirect=True)


@pytest.fixture
def other(api: Api) -> Iterator[Api]:
    """A replica that is notified of every change at ``api`` from now on."""
    with ExitStack() as stack:
        replica = api.replica(stack)
        until(lambda: replica.core.changes.version > 0)
        yield replica


def frame(api: Api, batch: Batch, number: int) -> tuple[str, bytes]:
    return api.leases(batch, [user(number)])[0].lease, batch.report()


def test_a_batch_fills_and_ends_through_both_replicas(api: Api, other: Api) -> None:
    batch = api.deposit()
    leases = other.leases(batch, [user(i) for i in range(4)])
    sent = [batch.messages() for _ in leases]
    for replica, lease, messages in zip([api, other] * 2, leases, sent, strict=True):
        assert replica.outcomes(batch, [(lease.lease, batch.report(messages))]) == ["accepted"]
    released = other.messages(batch)
    assert multiset(batch.rows(released.content)) == multiset(batch.rows(b"".join(sent)))
    assert api.finish(batch) == batch.rows(released.content)
    assert [one.status(batch)["state"] for one in (api, other)] == ["erased"] * 2
    assert [problem(one.messages(batch)) for one in (api, other)] == ["late"] * 2


def test_a_report_sent_to_both_at_once_is_counted_once(api: Api, other: Api) -> None:
    batch = api.deposit(n=8)
    for number in range(8):
        one = frame(api, batch, number)
        with ThreadPoolExecutor(2) as threads:
            answers = threads.map(lambda to, one=one: to.outcomes(batch, [one]), (api, other))
        assert sorted(one for answer in answers for one in answer) == ["accepted", "replayed"]
    assert api.status(batch)["reports"] == 8


def test_the_threshold_counts_distinct_reports_over_replicas(api: Api, other: Api) -> None:
    """Many race for the last place, of two batches in opposite orders; exactly n get in."""
    batches = [api.deposit(n=4, deployment=number) for number in range(2)]
    frames = [
        [frame(api, one, 10 * i + user_) for user_ in range(4)] for i, one in enumerate(batches)
    ]

    def send(turn: int) -> list[str]:
        replica = (api, other)[turn % 2]
        order = [0, 1] if turn % 2 else [1, 0]
        return [out for i in order for out in replica.outcomes(batches[i], frames[i])]

    with ThreadPoolExecutor(4) as threads:
        outcomes = [one for answers in threads.map(send, range(6)) for one in answers]
    assert outcomes.count("accepted") == 8
    assert set(outcomes) == {"accepted", "replayed"}
    for batch in batches:
        assert api.status(batch)["state"] == other.status(batch)["state"] == "sealed"


def test_slots_are_given_once_and_users_belong_to_one_node(api: Api, other: Api) -> None:
    batch = api.deposit(n=40)
    halves = [[user(i) for i in range(25)], [user(i) for i in range(20, 45)]]
    with ThreadPoolExecutor(2) as threads:
        answers = threads.map(lambda to, users: to.lease(batch, users).json(), (api, other), halves)
    replies = list(answers)
    slots = {lease["user"]: lease["slot"] for reply in replies for lease in reply["leases"]}
    assert sorted(slots.values()) == list(range(40))
    refused = [one["problem"] for reply in replies for one in reply["refused"]]
    assert set(refused) == {"batch-full"}


def test_a_descriptor_deposited_at_both_gets_one_key(api: Api, other: Api) -> None:
    data = descriptor_bytes()
    with ThreadPoolExecutor(2) as threads:
        answers = list(threads.map(lambda to: to.put(data), (api, other)))
    assert sorted(answer.status_code for answer in answers) == [200, 201]
    assert answers[0].json() == answers[1].json()
    api.fill(Batch(data, bytes.fromhex(answers[0].json()["batch_key"])))


@pytest.mark.usefixtures("only_signals_wake")
def test_a_long_poll_at_one_replica_wakes_at_a_change_at_the_other(api: Api, other: Api) -> None:
    with ThreadPoolExecutor(1) as thread:
        query = {"wait": 30, "accepting": 1}
        waiting = thread.submit(other.call, "GET", "/batches", other.token, params=query)
        other.has_waiting()
        batch = api.deposit()
        assert waiting.result(20).json()["batches"], "sooner than at the end of its wait"
        sealed = thread.submit(other.status, batch, wait=30, state="sealed")
        other.has_waiting()
        api.fill(batch)
        assert sealed.result(20)["state"] == "sealed"


def test_a_node_revoked_at_one_is_refused_at_the_other(
    api: Api, other: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("riffle.shuffler.core.CACHE_SECONDS", 3_600.0)
    assert other.call("GET", "/batches", api.token).status_code == 200
    assert api.call("DELETE", f"/nodes/{api.node_id}", OPERATOR_TOKEN).status_code == 204
    assert api.call("GET", "/batches", api.token).status_code == 401
    until(lambda: other.call("GET", "/batches", api.token).status_code == 401)


def test_a_replica_without_notifications_takes_nothing_of_a_revoked_node(
    api: Api, other: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("riffle.shuffler.core.CACHE_SECONDS", 3_600.0)
    version = other.core.changes.version
    batch = api.deposit()
    # The deposit's signal must come first: it would make the other replica drop its cache.
    until(lambda: other.core.changes.version > version)
    held = other.leases(batch, [user(0)])[0]
    monkeypatch.setattr(other.core.changes, "notify", lambda: None)
    assert api.call("DELETE", f"/nodes/{api.node_id}", OPERATOR_TOKEN).status_code == 204
    assert other.call("GET", "/batches", api.token).status_code == 200, "it is remembered"
    for answer in (
        other.lease(batch, [user(1)]),
        other.upload(batch, [(held.lease, batch.report())]),
    ):
        assert (answer.status_code, problem(answer)) == (401, "unauthorized")
    monkeypatch.setattr("riffle.shuffler.core.CACHE_SECONDS", 0.0)
    assert other.call("GET", "/batches", api.token).status_code == 401


def test_one_permutes_and_the_other_takes_over_when_it_dies(api: Api, other: Api) -> None:
    batch = api.deposit()
    api.fill(batch)
    held = api.core._store.engine.connect()
    assert try_claim(held, f"shuffle {batch.batch_id}")
    answer = other.messages(batch)
    assert (answer.status_code, problem(answer)) == (503, "unavailable")
    assert answer.headers["Retry-After"] == "1"
    held.invalidate()  # as the death of the process does, which the server hears of in its time
    until(lambda: other.messages(batch).status_code == 200)
    assert other.messages(batch).content == api.messages(batch).content


def test_a_replica_with_other_secrets_does_not_start(api: Api, tmp_path: Path) -> None:
    """It would find no secret of any batch, and give up all of them."""
    preflight(api.settings)
    preflight(api.settings)
    elsewhere = api.settings.model_copy(update={"data_dir": tmp_path / "elsewhere"})
    with pytest.raises(LocalError, match="all replicas must share one directory"):
        preflight(elsewhere)
    number = (tmp_path / "data" / "secrets.id").read_text()
    (tmp_path / "elsewhere" / "secrets.id").write_text(number)
    preflight(elsewhere)


ABANDONED = update(batches).values(state="abandoned", ended_by="abandon")
SEALED = update(batches).values(state="sealed", sealed_at=NOW)
REVOKED = update(nodes).values(revoked_at=NOW)


def during(api: Api, change: Callable[[Connection], object], act: Callable[[], Any]) -> Any:
    """Returns what ``act`` answers if another replica's ``change`` is committed after its start."""
    return during_commit(api.core._store.engine, change, act)


@pytest.mark.parametrize("changed", [ABANDONED, SEALED, REVOKED], ids=["over", "full", "revoked"])
@pytest.mark.parametrize("asks", ["lease", "upload", "last", "decline"])
def test_nodes_get_nothing_that_another_replica_has_ended_meanwhile(
    api: Api, changed: Any, asks: str
) -> None:
    batch = api.deposit()
    leases = api.leases(batch, [user(number) for number in range(4)])
    frames = [(lease.lease, batch.report()) for lease in leases]
    if asks == "last":
        api.outcomes(batch, frames[:3])
    path = f"/batches/{batch.batch_id}/declined"
    acts: dict[str, Callable[[], Any]] = {
        "lease": lambda: api.lease(batch, [user(9)]),
        "upload": lambda: api.upload(batch, frames[:1]),
        "last": lambda: api.upload(batch, frames[3:]),
        "decline": lambda: api.call("POST", path, api.token, json={"reason": "too-slow"}),
    }
    answer = during(api, lambda other: other.execute(changed), acts[asks])
    with api.core._store.engine.connect() as store:
        notices = store.scalar(select(func.count()).select_from(declined))
        state = store.scalar(select(batches.c.state))
    assert state == {ABANDONED: "abandoned", SEALED: "sealed", REVOKED: "open"}[changed]
    assert notices == (asks == "decline" and changed is REVOKED), "of an open batch only"
    if asks == "decline":
        return
    if changed is REVOKED:
        assert (answer.status_code, problem(answer)) == (401, "unauthorized")
    elif asks == "lease":
        refused = "late" if changed is ABANDONED else "batch-full"
        assert [one["problem"] for one in answer.json()["refused"]] == [refused]
    else:
        assert [one["outcome"] for one in answer.json()["results"]] == ["late"]


def test_a_user_gets_one_lease_of_two_batches_at_once(api: Api) -> None:
    """Of two replicas, each for a node of the user's owner."""
    batch, other = api.deposit(), api.deposit(deployment=1)
    node, _ = api.enrol(10, "owner")
    first = api.leases(batch, [user(0)])[0]
    api.clock.now += 60

    def lease(connection: Connection) -> None:
        reply = leasing.lease_slots(connection, other.batch_id, node, [user(0)], NOW + 60, 60)
        assert len(reply.leases) == 1

    answer = during(api, lease, lambda: api.lease(batch, [user(0)]))
    assert [one["problem"] for one in answer.json()["refused"]] == ["user-unavailable"]
    assert api.outcomes(batch, [(first.lease, batch.report())]) == ["late"]


def test_a_lease_that_another_replica_takes_back_meanwhile_reports_late(api: Api) -> None:
    batch = api.deposit()
    lease = api.leases(batch, [user(0)])[0]
    change = update(lease_groups).values(states="v")
    upload = [(lease.lease, batch.report())]
    assert during(api, lambda o: o.execute(change), lambda: api.outcomes(batch, upload)) == ["late"]


@pytest.mark.parametrize(
    ("how", "final"),
    [("expire", "sealed"), ("abandon", "sealed"), ("retire", "erased"), ("lost", "erased")],
)
def test_a_batch_that_another_replica_moves_on_meanwhile_has_one_end(
    api: Api, how: str, final: str
) -> None:
    batch = api.deposit()
    changes: dict[str, Any] = {"state": "sealed", "sealed_at": NOW + 3_600}
    if final == "erased":
        api.fill(batch)
        changes = {"state": "acknowledged"}
    if how == "lost":
        (api.directory / f"data/secrets/{batch.batch_id}.secret").unlink()
    api.clock.now += {"expire": 3_600, "retire": api.settings.retention_seconds}.get(how, 0)
    acts = {"abandon": lambda: api.abandon(batch), "lost": lambda: api.messages(batch)}
    act: Callable[[], object] = acts.get(how, lambda: api.status(batch))
    during(api, lambda other: other.execute(update(batches).values(changes)), act)
    assert api.status(batch)["state"] == final


def test_bytes_that_another_replica_hands_over_meanwhile_are_the_only_ones(api: Api) -> None:
    batch = api.deposit()
    api.fill(batch)
    change = update(batches).values(state="forwarded", messages_sha256="00" * 32)
    answer = during(api, lambda other: other.execute(change), lambda: api.messages(batch))
    assert (answer.status_code, problem(answer)) == (500, "internal")


def test_failures_that_another_replica_hears_of_meanwhile_are_counted_once(api: Api) -> None:
    batch = api.deposit()
    api.fill(batch)
    digest = api.messages(batch).headers["Riffle-Messages-Digest"]
    path = f"/batches/{batch.batch_id}/acknowledgement"
    named = {"messages_sha256": digest, "failed": [0]}
    change = update(batches).values(state="acknowledged")
    during(
        api,
        lambda other: other.execute(change),
        lambda: api.call("POST", path, COORDINATOR_TOKEN, json=named),
    )
    listed = api.call("GET", "/nodes", OPERATOR_TOKEN).json()["nodes"]
    assert [one["failed_messages"] for one in listed] == [0]
