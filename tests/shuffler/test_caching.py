"""The cache of nodes and batches: how long it keeps an answer, and when it drops one."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from riffle.common.process.endpoint import hash_token
from riffle.common.protocol.errors import RemoteError
from riffle.common.protocol.wire import EnrolRequest
from riffle.common.server.database import Head
from riffle.shuffler import core
from riffle.shuffler.core import CACHE_SECONDS, Admission
from riffle.shuffler.store import users
from riffle.shuffler.store.committer import Store
from riffle.shuffler.store.schema import meta
from riffle.shuffler.waiting import ChangeSignal
from tests.shuffler.conftest import Api, problem
from tests.shuffler.world import user


class World:
    """A store that counts its reads, changes to signal, and a clock that stands still."""

    def __init__(self) -> None:
        self.now, self.reads = 100.0, 0
        self.changes = ChangeSignal()
        self.admission = Admission(cast("Store", self), self.changes, lambda: self.now)
        self.meanwhile: Callable[[], None] = lambda: None

    async def read(self, *_: object) -> int:
        self.reads += 1
        self.meanwhile()
        return self.reads

    def get(self, name: str = "one") -> object:
        return asyncio.run(self.admission.node(name))


def test_an_answer_is_dropped_after_a_change_or_after_a_while() -> None:
    world = World()
    assert (world.get("one"), world.get("two"), world.get("one")) == (1, 2, 1)
    world.now += CACHE_SECONDS - 0.1
    assert world.get() == 1
    world.now += 0.1
    assert (world.get(), world.get()) == (3, 3)
    world.changes.notify()
    assert world.get() == 4


def test_a_change_while_the_store_is_read_counts() -> None:
    world = World()
    world.meanwhile = world.changes.notify
    assert (world.get(), world.get()) == (1, 2)


def test_the_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "MAX_ENTRIES", 3)
    world = World()
    for number in range(10):
        assert world.get(str(number)) == world.get(str(number)) == number + 1
        assert len(world.admission._entries) <= 3


def test_a_node_revoked_at_another_replica_is_served_for_a_while_at_most(tmp_path: Path) -> None:
    """A replica that misses the notification serves it for a while; another refuses it at once."""

    async def scenario() -> None:
        store = Store(f"sqlite:///{tmp_path / 'store'}", Head(tmp_path, "", meta))
        world, changes = World(), ChangeSignal()
        try:
            deaf = Admission(store, ChangeSignal(), lambda: world.now)
            notified = Admission(store, changes, lambda: world.now)
            node = await store.write(
                lambda connection: users.enrol(
                    connection, EnrolRequest(name="a", owner="me", users=9), 0
                )
            )
            for replica in (deaf, notified):
                assert await replica.node(node.token) == node.node_id
            await store.write(lambda connection: users.revoke(connection, node.node_id, 0))
            changes.notify()
            assert await deaf.node(node.token) == node.node_id
            with pytest.raises(RemoteError, match="not that of an enrolled node"):
                await notified.node(node.token)
            world.now += CACHE_SECONDS
            with pytest.raises(RemoteError, match="not that of an enrolled node"):
                await deaf.node(node.token)
        finally:
            store.close()

    asyncio.run(scenario())


def test_the_cache_holds_no_token_and_no_stranger(api: Api) -> None:
    batch = api.deposit()
    assert api.lease(batch, [user(0)], "guess").status_code == 401
    assert api.lease(batch, [user(0)]).status_code == 200
    assert set(api.core.admission._entries) == {hash_token(api.token)}


def test_an_upload_after_its_batch_ended_finds_it_over(api: Api) -> None:
    """The cache still has the batch as open when the upload comes."""
    batch = api.deposit()
    held = api.leases(batch, [user(0), user(1)])
    assert api.outcomes(batch, [(held[0].lease, batch.report())]) == ["accepted"]
    assert api.abandon(batch).status_code == 200
    assert api.outcomes(batch, [(held[1].lease, batch.report())]) == ["late"]


def test_an_upload_to_a_batch_that_ended_without_a_signal_finds_it_over(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core, "CACHE_SECONDS", 3_600.0)
    batch = api.deposit()
    held = api.leases(batch, [user(0), user(1)])
    assert api.outcomes(batch, [(held[0].lease, batch.report())]) == ["accepted"]
    monkeypatch.setattr(api.core.changes, "notify", lambda: None)
    assert api.abandon(batch).status_code == 200
    remembered, _, _ = api.core.admission._entries[batch.batch_id]
    assert remembered.state == "open"
    assert api.outcomes(batch, [(held[1].lease, batch.report())]) == ["late"]
    unknown = api.call("POST", f"/batches/{'00' * 16}/reports", api.token, content=b"x")
    assert problem(unknown) == "unknown-batch"


async def no_read(*_: object) -> None:
    pytest.fail("the store is read")


def test_requests_of_cached_nodes_read_nothing_before_they_write(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core, "CACHE_SECONDS", 3_600.0)
    batch = api.deposit()
    held = api.leases(batch, [user(0)])[0]
    assert api.outcomes(batch, [(held.lease, batch.report())]) == ["accepted"]
    monkeypatch.setattr(api.core._store, "read", no_read)
    held = api.leases(batch, [user(1)])[0]
    assert api.outcomes(batch, [(held.lease, batch.report())]) == ["accepted"]
