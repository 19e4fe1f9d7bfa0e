"""What is remembered of nodes and batches, for how long, and what makes it be forgotten."""

import asyncio
from pathlib import Path

import pytest

from riffle.common.process.endpoint import hash_token
from riffle.common.protocol.errors import RemoteError
from riffle.common.protocol.messages import EnrolRequest
from riffle.shuffler import admission
from riffle.shuffler.admission import REMEMBERED_SECONDS, Admission, Memory
from riffle.shuffler.store import users
from riffle.shuffler.store.committer import Access
from tests.shuffler.conftest import Api, problem
from tests.shuffler.world import user


class Told:
    """How often something was told, and a clock that stands."""

    def __init__(self) -> None:
        self.times, self.now = 0, 100.0

    def memory(self) -> Memory[str]:
        return Memory(lambda: self.times, lambda: self.now)


def test_an_answer_is_forgotten_when_something_is_told_or_after_a_while() -> None:
    world = Told()
    memory = world.memory()
    memory.keep("one", "1", memory.ticket)
    assert (memory.get("one"), memory.get("two")) == ("1", None)
    world.now += REMEMBERED_SECONDS - 0.1
    assert memory.get("one") == "1"
    world.now += 0.1
    assert memory.get("one") is None
    memory.keep("one", "1", memory.ticket)
    world.times += 1
    assert memory.get("one") is None


def test_what_was_told_while_the_store_was_read_counts() -> None:
    world = Told()
    memory = world.memory()
    ticket = memory.ticket
    world.times += 1
    memory.keep("one", "1", ticket)
    assert memory.get("one") is None


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "KEPT", 3)
    memory = Told().memory()
    for number in range(10):
        memory.keep(str(number), "", memory.ticket)
        assert len(memory._held) <= 3
        assert memory.get(str(number)) == ""


def test_a_node_revoked_elsewhere_is_served_for_a_while_at_most(tmp_path: Path) -> None:
    """As at a replica that does not hear of it; who heard refuses it at once."""

    async def scenario() -> None:
        access, world = Access(f"sqlite:///{tmp_path / 'store'}"), Told()
        try:
            deaf = Admission(access, lambda: 0, lambda: world.now)
            heard = Admission(access, lambda: world.times, lambda: world.now)
            node = await access.write(
                lambda store: users.enrol(store, EnrolRequest(name="a", users=9))
            )
            for one in (deaf, heard):
                assert await one.node(node.token) == node.node_id
            await access.write(lambda store: users.revoke(store, node.node_id))
            world.times += 1
            assert await deaf.node(node.token) == node.node_id
            with pytest.raises(RemoteError, match="not that of an enrolled node"):
                await heard.node(node.token)
            world.now += REMEMBERED_SECONDS
            with pytest.raises(RemoteError, match="not that of an enrolled node"):
                await deaf.node(node.token)
        finally:
            access.close()

    asyncio.run(scenario())


def test_no_token_is_kept_and_no_stranger(api: Api) -> None:
    batch = api.deposit()
    assert api.lease(batch, [user(0)], "guess").status_code == 401
    assert api.lease(batch, [user(0)]).status_code == 200
    found = api.core.admission._nodes._held
    assert set(found) == {hash_token(api.token)}


def test_an_upload_after_its_batch_ended_finds_it_over(api: Api) -> None:
    """Also one that comes when the batch is remembered as open."""
    batch = api.deposit()
    held = api.leases(batch, [user(0), user(1)])
    assert api.outcomes(batch, [(held[0].lease, batch.report())]) == ["accepted"]
    assert api.abandon(batch).status_code == 200
    assert api.outcomes(batch, [(held[1].lease, batch.report())]) == ["late"]


def test_an_upload_to_a_batch_that_ended_unheard_finds_it_over(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "REMEMBERED_SECONDS", 3_600.0)
    batch = api.deposit()
    held = api.leases(batch, [user(0), user(1)])
    assert api.outcomes(batch, [(held[0].lease, batch.report())]) == ["accepted"]
    monkeypatch.setattr(api.core.changes, "notify", lambda: None)
    assert api.abandon(batch).status_code == 200
    remembered = api.core.admission._batches.get(batch.batch_id)
    assert remembered is not None and remembered.state == "open"
    assert api.outcomes(batch, [(held[1].lease, batch.report())]) == ["late"]
    unknown = api.call("POST", f"/batches/{'00' * 16}/reports", api.token, content=b"x")
    assert problem(unknown) == "unknown-batch"


def test_requests_that_are_known_read_nothing_before_they_write(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "REMEMBERED_SECONDS", 3_600.0)
    batch = api.deposit()
    held = api.leases(batch, [user(0)])[0]
    assert api.outcomes(batch, [(held.lease, batch.report())]) == ["accepted"]
    access = api.core._access
    monkeypatch.setattr(access, "read", None)
    held = api.leases(batch, [user(1)])[0]
    assert api.outcomes(batch, [(held.lease, batch.report())]) == ["accepted"]
