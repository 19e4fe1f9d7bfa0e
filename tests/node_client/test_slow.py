"""Nodes that are slow, in sealing, uploading or episodes: whom they ask, and what they say."""

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from riffle.common.mechanism.counters import Ints
from riffle.common.protocol.wire import Lease
from riffle.node_client.pipeline import Job, Pipeline, Totals
from riffle.node_client.sealing import SealKeys
from riffle.node_client.settings import Credential
from riffle.node_client.shuffler_client import ShufflerClient
from riffle.node_client.trust import accept
from riffle.node_client.users import Users
from tests.node_client import world
from tests.node_client.fake_shuffler import FakeShuffler
from tests.node_client.running import QUICK, Failing, in_thread, serve, shuffler

LEASE = 20
"""Seconds of a lease, by a clock that only slow work and idle polls move."""


class SlowNode:
    """Sealing takes ``sealing`` seconds a report, one after another."""

    def __init__(self, sealing: float) -> None:
        self.now = float(world.NOW)
        self.sealing = sealing
        self._busy = asyncio.Lock()

    def clock(self) -> float:
        return self.now

    async def seal(self, keys: SealKeys, messages: Ints) -> bytes:
        async with self._busy:
            await self._work(self.sealing * len(messages))
            return await in_thread(keys, messages)

    async def _work(self, seconds: float) -> None:
        for _ in range(10):  # others see time pass, as they do on a slow machine
            self.now += seconds / 10
            await asyncio.sleep(0)


def run(
    node: SlowNode, fake: FakeShuffler, state: Path, until: Callable[[], bool], idle: float = 0.05
) -> Totals:
    """Serves until a condition holds; ``idle`` seconds pass at each poll if no report is under way.

    A poll begins after the previous turn has ended, so the speed of this machine changes nothing.
    """
    fake.clock, fake.lease_seconds = node.clock, LEASE
    totals = Totals()

    def polled() -> None:
        if totals.episodes == totals.accepted + totals.refused.total():
            node.now += idle

    fake.polled = polled
    served = serve(
        fake,
        state,
        until=until,
        seal=node.seal,
        clock=node.clock,
        monotonic=node.clock,
        totals=totals,
        pause=0.0,
    )
    return asyncio.run(served)[0]


def test_a_slow_node_asks_only_people_whose_reports_will_be_in_time(tmp_path: Path) -> None:
    node, fake = SlowNode(sealing=2.0), shuffler()
    batch = fake.deposit(world.signed())
    totals = run(node, fake, tmp_path, fake.full)
    assert len(batch.reports) == world.N
    assert totals.episodes == totals.accepted == world.N, "nobody was asked in vain"
    assert fake.declined == []


def test_a_node_that_is_too_slow_asks_nobody_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    node, fake = SlowNode(sealing=0.6 * LEASE), shuffler()
    batch = fake.deposit(world.signed())
    totals = run(node, fake, tmp_path, lambda: len(fake.declined) > 3, idle=2.0)
    assert totals == Totals()
    assert batch.ends == {}, "no slot is taken from others"
    assert set(fake.declined) == {"too-slow"}
    assert caplog.text.count('"given-up"') == 1
    assert caplog.text.count(batch.descriptor.batch_id) >= 1


def test_a_node_that_is_fast_again_serves_the_batch(tmp_path: Path) -> None:
    node, fake = SlowNode(sealing=LEASE), shuffler()
    fake.deposit(world.signed())

    def recovered() -> bool:
        if fake.declined:
            node.sealing = 0.01
        return fake.full()

    totals = run(node, fake, tmp_path, recovered, idle=2.0)
    assert totals.episodes == totals.accepted == world.N


def test_people_are_not_asked_without_end_when_reports_come_too_late(tmp_path: Path) -> None:
    """Sealing is fast, but no upload arrives in time: measuring the seal says nothing."""
    node, fake = SlowNode(sealing=0.01), shuffler(lose_leases=True)
    fake.deposit(world.signed(n=2_000))
    hour = node.now + 3_600
    totals = run(
        node, fake, tmp_path, lambda: node.now > hour or len(fake.uploads) > 100, idle=20.0
    )
    assert 0 < totals.episodes <= 12
    assert totals.accepted == 0
    assert "too-slow" in fake.declined


class Dawdling(Failing):
    """An environment whose third user takes until ``released``."""

    def __init__(self) -> None:
        self.released = threading.Event()
        self.users = 0
        self.inside = 0

    def reset(self, randomness: Any) -> int:
        self.inside += 1
        assert self.inside == 1, "one user at a time"
        self.users += 1
        if self.users == 3:
            self.released.wait(20)
        self.inside -= 1
        return 0

    def step(self, action: int, randomness: Any) -> tuple[int, float, bool]:
        return 0, 0.0, False


def test_a_user_who_takes_too_long_is_reported_in_time_with_noise_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    environment, fake = Dawdling(), shuffler(1)
    fake.clock, fake.lease_seconds = time.time, 2
    batch = fake.deposit(world.signed(expires_at=int(time.time()) + 1_000))

    def until() -> bool:
        if "overdue" in caplog.text and fake.declined:
            environment.released.set()
        return fake.full()

    try:
        totals, _ = asyncio.run(
            serve(fake, tmp_path, nodes=1, environment=environment, clock=time.time, until=until)
        )
    finally:
        environment.released.set()
    assert totals.accepted == totals.episodes == world.N
    assert (totals.refused, set(fake.declined)) == ({}, {"too-slow"})
    assert len(batch.ends) == world.N, "no lease lapsed: nobody sees that somebody was slow"
    assert batch.counts()[1] == []
    assert 1 <= totals.failed < world.N / 2


def test_leases_that_ended_while_a_chunk_waited_ask_nobody(tmp_path: Path) -> None:
    """While the shuffler takes no upload, all chunks that may be under way are."""
    fake, users, now = shuffler(1), Users(tmp_path, None), [float(world.NOW)]
    batch = fake.deposit(world.signed())
    (node,) = fake.tokens.values()
    accepted = accept(batch.signed, batch.descriptor.batch_id, world.demands(), world.NOW)
    leases = [
        Lease(user, slot, f"{slot:032x}", world.NOW + LEASE)
        for slot, user in enumerate(users.next_users(node, 4))
    ]

    seal: Any = in_thread

    async def go() -> int:
        client = ShufflerClient(fake.client(), QUICK)
        pipeline = Pipeline(
            environment=Failing(),
            seal=seal,
            shuffler=client,
            users=users,
            totals=Totals(),
            capacity=asyncio.Semaphore(0),
            test_entry=False,
            clock=lambda: now[0],
        )
        credential = Credential(node_id=node, token=f"token-{node}")
        asked = asyncio.create_task(pipeline.submit(Job.of(accepted), credential, leases))
        await asyncio.sleep(0.01)
        now[0] += LEASE
        pipeline.capacity.release()
        return await asked

    assert asyncio.run(go()) == 0
    assert set(users.next_users(node, 4)) == {lease.user for lease in leases}, "nobody was asked"
    users.close()
