"""Random operations over the real batches, vault and committer, against a small model.

Leases, uploads with faults, replays, clock jumps, restarts and crashes between the steps of
erasure, on three batches that share users. Every message sent is unique, so a report counted twice
or lost shows in what is handed over. The model knows the rules and nothing of how they are stored.
"""

import asyncio
import tempfile
from collections import Counter
from collections.abc import Coroutine
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

from riffle.common.protocol import hpke
from riffle.common.protocol.errors import RemoteError
from riffle.common.protocol.wire import EnrolRequest, Lease
from riffle.shuffler.core import Shuffler
from riffle.shuffler.store import report_rows
from riffle.shuffler.store.vault import Vault
from tests.common.descriptors import ONE_MESSAGE
from tests.shuffler import world
from tests.shuffler.model import EXAMPLES, MEMORY, Killed, ModelBatch, Sent, bounded
from tests.shuffler.world import NOW, Batch, FakeClock, descriptor_bytes, signature, user

T = TypeVar("T")
N, USERS, BATCHES = 4, 14, 3
STRANGER = hpke.KeyPair.from_private(bytes(range(3, 35)))


class Shuffling(RuleBasedStateMachine):
    """One shuffler, two nodes, three batches of four (one of sums), fourteen users."""

    leases = Bundle("leases")
    sent = Bundle("sent")

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None)
        self.closing = ExitStack()
        self.store_url = self.make_store()
        self.clock = FakeClock()
        self.loop = asyncio.new_event_loop()
        self.core = self.open_core()
        self.batches: dict[int, ModelBatch] = {}
        self.reported: dict[str, int] = {}

    def make_store(self) -> str | None:
        """A file of SQLite's in the directory."""
        return None

    # The process

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(work)

    def open_core(self) -> Shuffler:
        async def start() -> Shuffler:
            settings = world.settings(Path(self.directory.name), store_url=self.store_url)
            core = Shuffler(settings, self.clock)
            await core.start()
            return core

        return self.do(start())

    def teardown(self) -> None:
        self.core.close()
        self.do(self.loop.shutdown_default_executor())
        self.loop.close()
        self.closing.close()
        self.directory.cleanup()

    @initialize()
    def enrol(self) -> None:
        request = EnrolRequest(name="node", owner="me", users=100)
        self.nodes = [self.do(self.core.enrol(request)) for _ in range(2)]
        for number in range(BATCHES - 1):
            self.deposit(number)

    @rule()
    def restart(self) -> None:
        self.core.close()
        self.core = self.open_core()
        self.expire()

    @rule(seconds=st.sampled_from([1, 1, 5, 31, 61, 200]))
    def advance(self, seconds: int) -> None:
        self.clock.now += seconds

    def expire(self) -> None:
        for model in self.batches.values():
            expires_at = model.batch.context.descriptor.expires_at
            if model.state == "open" and expires_at <= self.clock.now:
                model.state = "abandoned"

    # The coordinator

    @rule(number=st.integers(0, BATCHES - 1))
    def deposit(self, number: int) -> None:
        kind = ONE_MESSAGE["sums"] if number == 1 else {}
        data = descriptor_bytes(N, number, expires_at=NOW + 600 * (number + 1), **kind)
        batch = Batch(data, b"")
        work = self.core.batches.deposit(batch.batch_id, data, signature(data))
        if number not in self.batches and batch.context.descriptor.expires_at <= self.clock.now:
            with pytest.raises(RemoteError):
                self.do(work)
            return
        signed, created = self.do(work)
        assert created == (number not in self.batches)
        batch.batch_key = bytes.fromhex(signed.batch_key)
        if created:
            self.batches[number] = ModelBatch(batch)
        assert self.batches[number].batch.batch_key == batch.batch_key

    @rule(number=st.integers(0, BATCHES - 1), again=st.booleans())
    def collect(self, number: int, again: bool) -> None:
        model = self.batches.get(number)
        if model is None:
            return
        if model.state not in ("sealed", "forwarded"):
            with pytest.raises(RemoteError):
                self.do(self.core.batches.release(model.batch.batch_id))
            return
        data = b"".join(self.do(self.core.batches.release(model.batch.batch_id)).chunks())
        model.state = "forwarded"
        sent = [one.messages for one in model.accepted.values()]
        assert len(model.accepted) == N
        assert model.batch.parts(data) == model.batch.handed_over(sent)
        assert model.released in (None, data)
        model.released = data
        if again:
            assert (
                b"".join(self.do(self.core.batches.release(model.batch.batch_id)).chunks()) == data
            )

    @rule(
        number=st.integers(0, BATCHES - 1),
        crash=st.sampled_from([None, (Vault, "destroy"), (report_rows, "delete_reports")]),
        right=st.booleans(),
    )
    def acknowledge(self, number: int, crash: tuple[Any, str] | None, right: bool) -> None:
        model = self.batches.get(number)
        if model is not None and model.state == "sealed":
            self.collect(number, again=False)
        if model is None or model.released is None:
            return
        sha256 = world.sha256(model.released) if right else "00" * 32
        work = self.core.batches.acknowledge(model.batch.batch_id, sha256, ())
        if not right:
            with pytest.raises(RemoteError):
                self.do(work)
        elif crash is None or model.state == "erased":
            assert self.do(work).state == "erased"
            model.state = "erased"
        else:
            self.crash_while(work, crash)
            model.state = "erased"

    def crash_while(self, work: Coroutine[Any, Any, object], crash: tuple[Any, str]) -> None:
        def killed(*_: object, **__: object) -> None:
            raise Killed

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(*crash, killed)
            with pytest.raises(Killed):
                self.do(work)
        self.restart()

    @rule(number=st.integers(0, BATCHES - 1), really=st.sampled_from([False] * 5 + [True]))
    def abandon(self, number: int, really: bool) -> None:
        model = self.batches.get(number)
        if model is None or not really:
            return
        work = self.core.batches.abandon(model.batch.batch_id)
        if model.state in ("sealed", "forwarded", "erased"):
            with pytest.raises(RemoteError):
                self.do(work)
        else:
            assert self.do(work).state == "abandoned"
            model.state = "abandoned"

    @rule(number=st.integers(0, BATCHES - 1), really=st.sampled_from([False] * 5 + [True]))
    def lose_secret(self, number: int, really: bool) -> None:
        model = self.batches.get(number)
        if model is None or model.state not in ("open", "sealed") or not really:
            return
        (Path(self.directory.name) / f"data/secrets/{model.batch.batch_id}.secret").unlink()
        self.restart()
        model.state = "abandoned"

    # The nodes

    @rule(
        target=leases,
        number=st.integers(0, BATCHES - 1),
        users=st.lists(st.integers(0, USERS - 1), min_size=1, max_size=5, unique=True),
    )
    def lease(self, number: int, users: list[int]) -> Any:
        """Leases that wait for another rule to use them."""
        return multiple(*self.take(number, users))

    @rule(
        target=sent,
        number=st.integers(0, BATCHES - 1),
        users=st.lists(st.integers(0, USERS - 1), min_size=2, max_size=6, unique=True),
    )
    def serve(self, number: int, users: list[int]) -> Any:
        """Plays a node without faults: leases, then all reports in one body."""
        frames = []
        for _, node, lease in self.take(number, users):
            batch = self.batches[number].batch
            messages = batch.messages()
            frames.append(Sent(number, node, lease, batch.report(messages), messages))
        if frames:
            self.send(frames, opens=True)
        return multiple(*frames)

    def take(self, number: int, users: list[int]) -> list[tuple[int, int, Lease]]:
        """Users of even number belong to node 0, the others to node 1."""
        model, node = self.batches.get(number), users[0] % 2
        if model is None:
            return []
        self.expire()
        wanted = [user(one) for one in users if one % 2 == node]
        reply = self.do(self.core.lease(model.batch.batch_id, self.nodes[node].node_id, wanted))
        granted = {lease.user for lease in reply.leases}
        assert granted | {refusal.user for refusal in reply.refused} == set(wanted)
        assert not granted or model.state == "open"
        assert granted.isdisjoint(self.reported)
        for lease in reply.leases:
            self.check_lease(model, lease)
        return [(number, node, lease) for lease in reply.leases]

    def check_lease(self, model: ModelBatch, lease: Lease) -> None:
        before = model.holders.get(lease.slot)
        assert 0 <= lease.slot < N
        if before == lease:
            assert self.clock.now < lease.expires_at
            return
        taken = {one.lease.slot for one in model.accepted.values()}
        assert lease.slot not in taken
        assert before is None or before.expires_at <= self.clock.now
        model.holders[lease.slot] = lease
        model.episodes += 1

    @rule(
        target=sent,
        held=leases,
        fault=st.sampled_from(["none", "none", "none", "none", "key", "bit", "context"]),
    )
    def upload(self, held: tuple[int, int, Lease], fault: str) -> Sent:
        number, node, lease = held
        batch = self.batches[number].batch
        messages = batch.messages()
        sealed = batch.report(messages, key=STRANGER.public if fault == "key" else None)
        if fault == "bit":
            sealed = sealed[:-1] + bytes([sealed[-1] ^ 1])
        if fault == "context":
            sealed = hpke.seal(batch.batch_key, b"another context", messages)
        one = Sent(number, node, lease, sealed, messages)
        self.send([one], opens=fault == "none")
        return one

    @rule(one=sent, other=sent)
    def replay(self, one: Sent, other: Sent) -> None:
        self.expire()
        model = self.batches[one.batch]
        pair = [one, other] if (one.batch, one.node) == (other.batch, other.node) else [one]
        outcomes = self.raw(pair)
        for frame, outcome in zip(pair, outcomes, strict=True):
            mine = model.accepted.get(frame.lease.user)
            if mine is not None and mine.sealed == frame.sealed:
                assert outcome == "replayed"
                model.replayed += 1
            else:
                assert outcome in ("already-reported", "late", "wrong-key")
                model.dropped[outcome] += 1

    @rule(held=consumes(leases))
    def lose(self, held: tuple[int, int, Lease]) -> None:
        """The node that held this lease is gone."""

    def send(self, frames: list[Sent], *, opens: bool) -> None:
        self.expire()
        for frame, outcome in zip(frames, self.raw(frames), strict=True):
            model = self.batches[frame.batch]
            expected = self.expected(model, frame, opens=opens)
            assert outcome == expected
            if outcome != "accepted":
                model.dropped[outcome] += 1
                continue
            model.accepted[frame.lease.user] = frame
            self.reported[frame.lease.user] = frame.batch
            if len(model.accepted) == N:
                model.state = "sealed"

    def expected(self, model: ModelBatch, frame: Sent, *, opens: bool) -> str:
        mine = model.accepted.get(frame.lease.user)
        if model.state in ("abandoned", "erased") and (mine is None or mine.lease != frame.lease):
            return "late"  # a batch that is over has forgotten the leases that never reported
        if frame.lease.user in self.reported:
            return "already-reported"
        lost = model.holders[frame.lease.slot] != frame.lease
        if model.state != "open" or lost or frame.lease.expires_at <= self.clock.now:
            return "late"
        return "accepted" if opens else "wrong-key"

    def raw(self, frames: list[Sent]) -> list[str]:
        node = self.nodes[frames[0].node]
        batch_id = self.batches[frames[0].batch].batch.batch_id
        body = b"".join(bytes.fromhex(one.lease.lease) + one.sealed for one in frames)

        async def work() -> list[str]:
            node_id = await self.core.admission.node(node.token)
            batch = await self.core.admission.batch(batch_id)
            reply = await self.core.upload(batch, node_id, body, self.loop.time())
            return [result.outcome for result in reply.results]

        return self.do(work())

    # What always holds

    @invariant()
    def status_is_the_model(self) -> None:
        self.expire()
        for model in self.batches.values():
            status = self.do(self.core.batches.status(model.batch.batch_id))
            assert status.state == model.state
            assert status.reports == len(model.accepted) <= N
            assert (status.state in ("open", "abandoned")) or status.reports == N
            assert status.episodes == (N if model.episodes else 0)
            assert status.dropped == model.dropped

    @invariant()
    def nothing_is_lost_or_made(self) -> None:
        self.expire()
        for model in self.batches.values():
            work = self.core.conservation(model.batch.batch_id, whole=True)
            record, stored = self.do(work), len(model.accepted)
            gone = stored if model.state == "abandoned" else 0
            left = N if model.released is not None else 0
            assert record.balanced
            assert record.accepted == stored
            assert (record.forwarded, sum((record.dropped or {}).values())) == (left, gone)
            assert record.held == stored - gone - left
            refused = Counter(record.rejected)
            assert refused.pop("replayed", 0) == model.replayed
            assert refused == model.dropped

    @invariant()
    def a_user_is_in_one_batch(self) -> None:
        everyone = [one for model in self.batches.values() for one in model.accepted]
        assert len(everyone) == len(set(everyone)) == len(self.reported)

    @invariant()
    def secrets_are_those_of_batches_that_go_on(self) -> None:
        found = {path.stem for path in (Path(self.directory.name) / "data/secrets").iterdir()}
        assert found == {
            model.batch.batch_id
            for model in self.batches.values()
            if model.state in ("open", "sealed", "forwarded")
        }


TestShuffling = Shuffling.TestCase
TestShuffling.settings = bounded(EXAMPLES)
