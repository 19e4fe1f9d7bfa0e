"""The loop of many nodes against a shuffler in memory: faults, restarts, refusals, totals."""

import asyncio
import json
import logging
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from riffle.common.mechanism.counters import Ints
from riffle.common.protocol.errors import LocalError
from riffle.common.protocol.hpke import KeyPair
from riffle.common.protocol.verification import read_pins
from riffle.node_client.environments.registry import make
from riffle.node_client.episode import slot_report
from riffle.node_client.pipeline import Totals
from riffle.node_client.runner import request_size
from riffle.node_client.sealing import SealKeys
from riffle.node_client.users import Users
from tests.node_client import running, world
from tests.node_client.fake_shuffler import FOREIGN, FakeShuffler
from tests.node_client.running import Failing, in_thread, node_ids, serve, shuffler
from tests.node_client.test_users import count_asked


@pytest.fixture(autouse=True)
def log_of_nobody(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Whatever a test of this file does to a node, the node's log names no user, lease or token.

    The first few leases, and users of some tests, have the ids of nodes, which a node may log.
    """
    fakes: list[FakeShuffler] = []

    def made(*args: Any, **settings: Any) -> FakeShuffler:
        fakes.append(running.shuffler(*args, **settings))
        return fakes[-1]

    monkeypatch.setattr(sys.modules[__name__], "shuffler", made)
    caplog.set_level(logging.DEBUG, "riffle")
    yield
    text = "\n".join(record.getMessage() for record in caplog.get_records("call"))
    batches = [batch for fake in fakes for batch in fake.batches.values()]
    private = {user for fake in fakes for users in fake.served.values() for user in users}
    private |= {user for fake in fakes for user in fake.reported | fake.elsewhere}
    private |= {lease for batch in batches for lease in batch.ends}
    private |= {f"token-{name}" for name in node_ids(8)}
    assert not [word for word in private.difference(node_ids(8)) if word in text]
    assert '"slot"' not in text


def test_batches_fill_and_every_node_takes_part(tmp_path: Path) -> None:
    fake = shuffler()
    batches = [fake.deposit(world.signed(deployment=i)) for i in range(3)]
    totals, _ = asyncio.run(serve(fake, tmp_path))
    assert (totals.episodes, totals.accepted, totals.refused) == (72, 72, {})
    assert len(fake.reported) == 72
    assert fake.requests["descriptor"] == 3, "a descriptor is fetched once a batch"
    for batch in batches:
        histogram, failed = batch.counts()
        assert failed == []
        assert histogram.sum() == world.N * batch.descriptor.padding.messages
    assert len(fake.served) == 4


@pytest.mark.parametrize("fault", ["lost", "refused", "503", "429", "408", "garbage"])
def test_a_report_survives_faults_and_counts_once(fault: str, tmp_path: Path) -> None:
    fake = shuffler(faults=[fault] * 7 + [""] + [fault] * 3)
    batch = fake.deposit(world.signed())
    totals, _ = asyncio.run(serve(fake, tmp_path))
    assert totals.accepted == world.N == len(batch.reports)
    assert totals.refused == {}
    assert sum(len(body) for body in set(fake.uploads)) == world.N * (
        16 + batch.descriptor.report_bytes
    ), "a retry sends the same bytes"


def test_reports_are_sealed_again_to_the_batchs_present_key(tmp_path: Path) -> None:
    fake = shuffler()
    batch = fake.deposit(world.signed())
    sealed = 0

    async def seal(keys: SealKeys, messages: Ints) -> bytes:
        nonlocal sealed
        sealed += 1
        if sealed == 2:  # between fetching the descriptor and uploading
            fake.rekey(batch)
        return await in_thread(keys, messages)

    totals, _ = asyncio.run(serve(fake, tmp_path, seal=seal))
    # What the old key sealed was accepted under it, or not at all: the fake opens with one key.
    assert totals.accepted == world.N == len(batch.reports)
    assert totals.refused == {}
    assert fake.requests["descriptor"] > 1


OTHER_DESCRIPTORS: dict[str, dict[str, Any]] = {
    "run": {"run_id": "ab" * 16},
    "batch": {"expires_at": world.EXPIRES - 60},
    "trust": world.CENTRAL,
}


@pytest.mark.parametrize("fault", ["key", "coordinator", *OTHER_DESCRIPTORS])
def test_a_descriptor_that_is_fetched_again_is_checked_again(tmp_path: Path, fault: str) -> None:
    """No report is sealed for another batch, or to a key that the shuffler did not sign."""
    fake, totals = shuffler(), Totals()
    batch, sealed_to = fake.deposit(world.signed()), set[bytes]()
    first, signed = batch.key, batch.signed

    async def seal(keys: SealKeys, messages: Ints) -> bytes:
        if sealed_to and batch.key == first:  # after the rehearsal
            batch.key = KeyPair.generate()
            data = world.signed(**OTHER_DESCRIPTORS.get(fault, {})).descriptor.encode()
            signer = world.STRANGER if fault == "coordinator" else world.COORDINATOR
            batch.signed = world.sign(data, coordinator=signer, batch_key=batch.key.public)
            if fault == "key":
                key = {"batch_key": batch.key.public.hex()}
                batch.signed = signed.model_copy(update=key)
        sealed_to.add(keys.batch_key)
        return await in_thread(keys, messages)

    asyncio.run(serve(fake, tmp_path, seal=seal, until=lambda: bool(totals.refused), totals=totals))
    assert (totals.accepted, sealed_to) == (0, {first.public})


def test_a_batch_whose_key_is_not_pinned_waits_for_the_pin(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fake = shuffler()
    batch, now, pins = fake.deposit(world.signed()), float(world.NOW), tmp_path / "pins"
    pins.write_text("ab" * 32)

    def clock() -> float:
        nonlocal now
        now += 1.0
        if fake.requests["descriptor"] == 3:
            pins.write_text(f"{world.ANALYZER.public.hex()} # rotated\n")
        return min(now, world.EXPIRES - 100)

    totals, _ = asyncio.run(serve(fake, tmp_path, monotonic=clock, pins=lambda: read_pins(pins)))
    assert totals.accepted == world.N == len(batch.reports)
    assert caplog.text.count("not pinned here") == 1


@pytest.mark.parametrize("path", ["/leases", "/batches"])
def test_faults_of_other_requests_only_delay(
    path: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fake = shuffler(faults=["503", "refused", "garbage", "429", "refused", "503"], faulty=path)
    fake.deposit(world.signed())
    totals, _ = asyncio.run(serve(fake, tmp_path, until=lambda: len(fake.reported) >= 16))
    assert totals.accepted >= 16
    assert len([r for r in caplog.records if r.levelno == logging.WARNING]) == 1


@pytest.mark.parametrize("call", ["/batches", world.descriptor().batch_id, "/leases", "/reports"])
def test_foreign_answers_end_nothing_and_cost_no_person(call: str, tmp_path: Path) -> None:
    """One node: of several, those with answers could take the slots that another still holds."""
    fake = shuffler(1, faults=list(FOREIGN), faulty=call)
    batch = fake.deposit(world.signed())
    totals, runner = asyncio.run(serve(fake, tmp_path, nodes=1))
    assert fake.faults == []
    assert totals.episodes == totals.accepted == world.N == len(batch.reports)
    assert len(batch.ends) == world.N, "no slot was taken twice"
    assert not any(node.revoked or node.out_of_users for node in runner.nodes)


def test_a_descriptor_that_cannot_be_fetched_is_requested_again(tmp_path: Path) -> None:
    batch_id = world.descriptor().batch_id
    fake = shuffler(faults=["503"] * 9, faulty=batch_id)
    fake.deposit(world.signed())
    totals, _ = asyncio.run(serve(fake, tmp_path))
    assert totals.accepted == world.N
    assert fake.requests["descriptor"] == 10


def test_a_hostile_descriptor_cannot_forge_log_lines(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fake = shuffler()
    good = fake.deposit(world.signed(deployment=1))
    bad = fake.deposit(world.signed())
    text = bad.signed.descriptor.replace('{"version"', '{"a\\nERROR forged": 1, "version"')
    bad.signed = bad.signed.model_copy(update={"descriptor": text})
    done = lambda: len(good.reports) == world.N and "malformed" in caplog.text  # noqa: E731
    asyncio.run(serve(fake, tmp_path, until=done))
    assert not any("\n" in record.getMessage() for record in caplog.records)
    assert "forged" in caplog.text


def test_users_with_a_slot_elsewhere_are_set_aside(tmp_path: Path) -> None:
    users = Users(tmp_path, None)
    held = users.next_users(node_ids(1)[0], 5)
    users.close()
    fake = shuffler(1, elsewhere=set(held))
    fake.deposit(world.signed())
    totals, _ = asyncio.run(serve(fake, tmp_path, nodes=1))
    assert totals.accepted == world.N
    assert not fake.reported & set(held)


def test_seeded_counts_do_not_depend_on_the_serving_node(tmp_path: Path) -> None:
    def counts(nodes: int, state: Path) -> Ints:
        fake = shuffler(nodes)
        batch = fake.deposit(world.signed(test_seed=11))
        asyncio.run(serve(fake, state, nodes=nodes, test_entry=True, loopback=True))
        return batch.counts()[0]

    plan = world.descriptor(test_seed=11)
    environment = make("RiverSwim-v0", states=4, horizon=2)
    rows = [slot_report(plan, environment, i, test_entry=True)[1] for i in range(world.N)]
    expected = np.bincount(np.concatenate(rows), minlength=plan.layout.counters + 1)
    assert np.array_equal(counts(1, tmp_path / "one"), expected)
    assert np.array_equal(counts(5, tmp_path / "five"), expected)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"test_seed": 3}, "test-entry-refused"),
        ({"shuffler_id": "other"}, "wrong-recipient"),
        (world.CENTRAL, "trust-refused"),
        (world.SUMS, "trust-refused"),
        ({"noise_slots": 0}, "weak-guarantee"),
        ({"analyzer_key": "00" * 32}, "wrong-key"),
        ({"expires_at": world.NOW + 32 * 86_400}, "wrong-size"),
        ({"reward_high": 0.5}, "wrong-size"),
    ],
)
def test_a_refused_batch_is_logged_once_and_skipped(
    changes: dict[str, Any], reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also if a batch of the same run was accepted before it."""
    fake = shuffler()
    fake.deposit(world.signed())
    bad = fake.deposit(world.signed(deployment=1, **changes))
    fake.deposit(world.signed(deployment=2))
    done = lambda: len(fake.reported) == 2 * world.N and fake.requests["batches"] > 5  # noqa: E731
    with caplog.at_level(logging.INFO, "riffle.node"):
        totals, _ = asyncio.run(serve(fake, tmp_path, until=done))
    assert totals.accepted == 2 * world.N
    assert (bad.leases, bad.reports) == ({}, {})
    assert len([r for r in caplog.records if reason in r.getMessage()]) == 1


def test_a_failing_environment_still_sends_noise_and_logs_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fake = shuffler()
    batch = fake.deposit(world.signed())
    with caplog.at_level(logging.DEBUG):
        totals, _ = asyncio.run(serve(fake, tmp_path, environment=Failing()))
    histogram, failed = batch.counts()
    assert (totals.accepted, failed) == (world.N, [])
    assert 0 < histogram[:-1].sum() < histogram.sum()
    assert totals.failed == totals.episodes == world.N
    events = [json.loads(r.getMessage()) for r in caplog.records if "failed" in r.getMessage()]
    assert events == [
        {"event": "environment-failed"},
        {"event": "episodes-failed", "failed": world.N, "episodes": world.N},
    ]
    assert "SECRET" not in caplog.text
    assert "Traceback" not in caplog.text


def test_late_reports_are_dropped_and_counted(tmp_path: Path) -> None:
    fake = shuffler(lose_leases=True)
    fake.deposit(world.signed())
    totals, _ = asyncio.run(serve(fake, tmp_path, until=lambda: fake.requests["reports"] >= 1))
    assert totals.accepted == 0
    assert totals.refused["late"] == totals.episodes > 0


def test_a_shuffler_that_never_answers_stops_episodes_not_the_node(tmp_path: Path) -> None:
    fake = shuffler(faults=["refused"] * 10_000)
    fake.deposit(world.signed())
    until = lambda: fake.requests["reports"] > 20  # noqa: E731
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("riffle.node_client.runner.DRAIN_SECONDS", 0.05)
        totals, _ = asyncio.run(serve(fake, tmp_path, until=until))
    assert totals.accepted == 0
    assert totals.refused == {"unsent": totals.episodes}


def test_a_restarted_node_asks_nobody_twice(tmp_path: Path) -> None:
    fake = shuffler()
    fake.deposit(world.signed())
    asyncio.run(serve(fake, tmp_path))
    first = set(fake.reported)
    fake.deposit(world.signed(deployment=1))
    totals, _ = asyncio.run(serve(fake, tmp_path))
    assert totals.accepted == world.N
    assert len(fake.reported) == 2 * world.N
    assert first < fake.reported


def test_a_revoked_node_is_left_out_and_all_revoked_ends_the_process(tmp_path: Path) -> None:
    fake = shuffler(4)
    del fake.tokens[f"token-{node_ids(4)[1]}"]
    fake.deposit(world.signed())
    totals, runner = asyncio.run(serve(fake, tmp_path / "a"))
    assert totals.accepted == world.N
    assert sum(node.revoked for node in runner.nodes) == 1
    fake.tokens.clear()
    with pytest.raises(LocalError, match="knows no token"):
        asyncio.run(serve(fake, tmp_path / "b", until=lambda: False))


def test_nodes_at_their_quota_stay_up_and_decline(tmp_path: Path) -> None:
    fake = shuffler(quota=3)
    batch = fake.deposit(world.signed())
    asyncio.run(serve(fake, tmp_path, until=lambda: bool(fake.declined)))
    assert len(batch.reports) == 12
    assert fake.declined == ["no-users"]


def listed(number: int) -> dict[str, list[str]]:
    return {name: [f"{name[2:]}{number}{i}" for i in range(3)] for name in node_ids(4)}


def test_a_node_without_users_stays_up_until_its_owner_lists_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "riffle.node")
    file, fake = tmp_path / "users.json", shuffler()
    fake.deposit(world.signed())
    file.write_text(json.dumps(listed(0)))

    def until() -> bool:
        if fake.declined and len(fake.reported) == 12:
            text = json.dumps(listed(1)) if "users-file" in caplog.text else "half a {"
            if file.read_text() != text:
                file.write_text(text)
        return fake.full()

    asyncio.run(serve(fake, tmp_path, file=file, until=until))
    people = [user for number in range(2) for users in listed(number).values() for user in users]
    assert fake.reported == set(people)
    assert len(people) == world.N
    assert fake.declined == ["no-users"]
    events = [json.loads(record.getMessage())["event"] for record in caplog.records]
    assert [e for e in events if e.startswith("users-")] == [
        "users-listed",
        *["users-exhausted"] * 4,
        "users-file",
        "users-listed",
    ]


def test_a_node_that_was_revoked_says_so_when_it_has_no_users_either(tmp_path: Path) -> None:
    file, fake = tmp_path / "users.json", shuffler()
    fake.deposit(world.signed())
    file.write_text(json.dumps(listed(0)))

    def until() -> bool:
        if fake.declined:
            fake.tokens.clear()
        return False

    with pytest.raises(LocalError, match="knows no token") as caught:
        asyncio.run(serve(fake, tmp_path, file=file, until=until))
    assert caught.value.slug == "unauthorized"


def test_a_clock_that_jumped_does_not_cost_the_open_batch(tmp_path: Path) -> None:
    fake, looks, uptime = shuffler(), 0, 0.0
    fake.deposit(world.signed())

    def clock() -> float:
        nonlocal looks
        looks += 1
        return world.EXPIRES + 3_600 if looks <= 2 else world.NOW

    def full() -> bool:
        nonlocal uptime
        uptime += 0.5
        return fake.full() or uptime > 60

    served = serve(fake, tmp_path, clock=clock, monotonic=lambda: uptime, until=full)
    assert asyncio.run(served)[0].accepted == world.N


def test_leases_that_end_too_soon_ask_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fake = shuffler(lease_ends=world.NOW)
    batch = fake.deposit(world.signed())
    until = lambda: fake.requests["batches"] > 4  # noqa: E731
    totals, _ = asyncio.run(serve(fake, tmp_path, until=until))
    assert (totals, batch.reports) == (Totals(), {})
    assert fake.requests["leases"] <= fake.requests["batches"], "no lease after lease in vain"
    assert caplog.text.count("leases-end-too-soon") == 1
    users = Users(tmp_path, None)
    assert not any(count_asked(users, name) for name in node_ids(4))
    users.close()


PEOPLE = {name: [f"{name[2:]}{i:02x}" for i in range(9)] for name in node_ids(4)}


@pytest.mark.parametrize("people", [None, PEOPLE], ids=["invented", "listed"])
def test_a_full_disk_is_waited_for_and_nobody_is_asked_twice(
    people: dict[str, list[str]] | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Invented users fail when they are written, listed ones when they are marked as asked."""
    users, fake = Users(tmp_path, people), shuffler()
    batch = fake.deposit(world.signed())

    def failures() -> int:
        return sum('"users-file"' in line for line in caplog.messages)

    def until() -> bool:
        full = failures() < 3
        with users._lock:
            users._database.execute(f"PRAGMA query_only = {'ON' if full else 'OFF'}")
        return fake.full()

    # A slot leased in vain is free again later, as another node may fill the rest of the batch.
    fake.clock = lambda: world.NOW + (fake.lease_seconds if failures() >= 3 else 0)
    users._database.execute("PRAGMA query_only = ON")
    totals, _ = asyncio.run(serve(fake, tmp_path, users=users, until=until))
    reported = [batch.leases[lease][0] for lease in batch.reports]
    assert totals.accepted == totals.episodes == world.N == len(set(reported))
    assert failures() >= 3
    assert fake.requests["leases"] < 30, "a node that cannot mark its users takes no slots"


def test_a_user_is_marked_before_their_episode_begins(tmp_path: Path) -> None:
    """So a node that dies within an episode does not ask its user again."""
    users, fake, in_order = Users(tmp_path, None), shuffler(), list[bool]()
    fake.deposit(world.signed())

    class Watching(Failing):
        def reset(self, randomness: Any) -> int:
            marked = sum(count_asked(users, name) for name in node_ids(4))
            in_order.append(len(in_order) < marked)
            return 0

    totals, _ = asyncio.run(serve(fake, tmp_path, users=users, environment=Watching()))
    assert in_order == [True] * totals.episodes
    assert totals.episodes >= world.N


def test_episodes_leave_the_event_loop_free(tmp_path: Path) -> None:
    turns, over, went_on = 0, False, list[bool]()

    class Slow(Failing):
        """Waits until the event loop goes on meanwhile, some seconds at most."""

        def reset(self, randomness: Any) -> int:
            before, looks = turns, 0
            while turns < before + 3 and not over and looks < 1_000:
                time.sleep(0.005)
                looks += 1
            went_on.append(looks < 1_000)
            return 0

    async def scenario() -> None:
        nonlocal turns, over
        fake = shuffler()
        fake.deposit(world.signed())
        going = asyncio.create_task(
            serve(fake, tmp_path, environment=Slow(), until=lambda: len(fake.reported) > 0)
        )
        while not going.done():
            await asyncio.sleep(0.005)
            turns += 1
        over = True
        await going

    asyncio.run(scenario())
    assert set(went_on) == {True}


def test_a_node_with_its_share_of_a_batch_leaves_it_to_others(tmp_path: Path) -> None:
    fake = shuffler(2, share=6)
    small = fake.deposit(world.signed())
    other = fake.deposit(world.signed(deployment=1))
    full = lambda: len(small.reports) + len(other.reports) >= 24  # noqa: E731
    totals, runner = asyncio.run(serve(fake, tmp_path, nodes=2, until=full))
    assert totals.accepted == 24
    assert totals.refused == {}
    for batch in (small, other):
        assert Counter(node for _, _, node in batch.leases.values()) == dict.fromkeys(
            node_ids(2), 6
        )
    assert not any(node.quota_reached or node.out_of_users for node in runner.nodes)


def test_a_node_asks_again_when_its_share_may_have_grown(tmp_path: Path) -> None:
    fake = shuffler(1, share=6)
    batch = fake.deposit(world.signed())

    def grown() -> bool:
        if len(batch.reports) == 6 and fake.requests["batches"] > 8:
            fake.share = None
        return fake.full()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("riffle.node_client.runner.RETRY_SECONDS", 0.0)
        totals, _ = asyncio.run(serve(fake, tmp_path, nodes=1, until=grown))
    assert totals.accepted == world.N


def test_a_bug_while_sealing_is_counted_and_names_no_report(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(keys: SealKeys, messages: Ints) -> bytes:
        if not messages.any():  # a rehearsal
            return b""
        raise ValueError(f"SECRET {messages}")

    fake = shuffler()
    fake.deposit(world.signed())
    until = lambda: "reports-lost" in caplog.text  # noqa: E731
    totals, _ = asyncio.run(serve(fake, tmp_path, until=until, seal=broken))
    assert totals.refused["internal"] > 0
    assert totals.refused.total() == totals.episodes
    assert "SECRET" not in caplog.text


def test_the_size_of_a_lease_request() -> None:
    assert request_size(free=10, nodes=20, messages=24_000, users_a_request=64) == 1
    assert request_size(free=1000, nodes=20, messages=1_200, users_a_request=64) == 40
    assert request_size(free=1000, nodes=20, messages=900, users_a_request=64) == 50
    assert request_size(free=1000, nodes=2, messages=60, users_a_request=64) == 64
    assert request_size(free=100, nodes=20, messages=600, users_a_request=64) == 60
    assert request_size(free=3, nodes=20, messages=20, users_a_request=64) == 3
    assert request_size(free=9, nodes=1, messages=65_536, users_a_request=64) == 1
