"""A test environment of the coordinator: a shuffler in memory whose users report at once, a tiny
learner, keys, settings, and a way to run until something happens.

Everything is deterministic: the same descriptor gets the same sealed messages, so that two runs of
the same spec must end with the same counts.
"""

import asyncio
import hashlib
import json
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from riffle.common.mechanism import sums
from riffle.common.mechanism.counters import Episode
from riffle.common.mechanism.randomness import SeededRandomness, word
from riffle.common.mechanism.workflow import encode
from riffle.common.process.endpoint import hash_token
from riffle.common.protocol.descriptor import Context, SignedDescriptor, parse
from riffle.common.protocol.errors import LocalError, RemoteError
from riffle.common.protocol.hpke import KeyPair, seal_indices
from riffle.common.protocol.signatures import key_id, verify_deposit
from riffle.common.protocol.wire import (
    BatchState,
    BatchStatus,
    Conservation,
    DeclineReason,
    MessageFlow,
)
from riffle.common.server.at_rest import StorageCipher
from riffle.common.server.database import Head
from riffle.coordinator.batches.analyzer import Analyzer
from riffle.coordinator.batches.issue import Issuer
from riffle.coordinator.batches.keys import KeyRing
from riffle.coordinator.batches.shuffler_client import Messages, ShufflerClient
from riffle.coordinator.learners.registry import Registry
from riffle.coordinator.metrics import CoordinatorMetrics
from riffle.coordinator.runs.coordinator import Coordinator
from riffle.coordinator.runs.exchange import BatchExchange
from riffle.coordinator.settings import Settings
from riffle.coordinator.specs import RunSpec
from riffle.coordinator.store.events import ChangeSignals
from riffle.coordinator.store.queries import RUNS_WITH_WORK
from riffle.coordinator.store.records import Replica
from riffle.coordinator.store.schema import meta
from riffle.coordinator.store.transactions import Store
from tests.common.mechanism.roles import release
from tests.coordinator.learner import tiny

SHUFFLER_ID = "shuffler-1"
RUN = "0123456789abcdef0123456789abcdef"
TOKEN = "operator"
NOW = 1_700_000_000.0
SIGNING = bytes(range(32))
PUBLIC = Ed25519PrivateKey.from_private_bytes(SIGNING).public_key().public_bytes_raw()
ANALYZER = KeyPair.from_private(bytes(range(1, 33)))

SMALL: dict[str, Any] = {
    "run_id": RUN,
    "name": "small",
    "learner": "tiny",
    "environment": "Toy-v0",
    "states": 2,
    "actions": 2,
    "horizon": 2,
    "episodes": 40,
    "epsilon": 4.0,
    "beta": 0.01,
    "dishonest_fraction": 0.1,
    "batch_seconds": 60,
}


def spec(**changes: Any) -> RunSpec:
    return RunSpec.model_validate({**SMALL, **changes})


class Crash(BaseException):
    """The process dies here."""


class Clock:
    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> float:
        return self.now


# -- shuffler -----------------------------------------------------------------------------------


def toy_episode(policy: np.ndarray[Any, Any], randomness: SeededRandomness) -> Episode:
    H = policy.shape[0]
    states, actions, rewards = np.zeros((3, H + 1), dtype=np.int64)
    for h in range(H):
        actions[h] = policy[h, states[h]]
        states[h + 1] = (states[h] + actions[h] + word(randomness) % 2) % 2
        rewards[h] = states[h + 1]
    return Episode(states, actions[:H], rewards[:H])


@cache
def sealed_messages(data: bytes) -> bytes:
    """The messages of a batch's users, permuted; the same for the same descriptor."""
    context = parse(data)
    d = context.descriptor
    reports = []
    for slot in range(d.n):
        randomness = SeededRandomness.keyed(1, d.batch_id, slot)
        episode = toy_episode(d.mixture.pick(word(randomness)), randomness)
        noise, bits = d.batch_noise, d.word_bits
        reports.append(encode(d.layout, noise, d.padding, episode, randomness, bits))
    if d.word_bits:
        return released_sum(context, reports)
    symbols = np.concatenate(reports)
    if d.trust == "shuffle":
        symbols.sort()  # any order that does not depend on the users
    key, kind = bytes.fromhex(d.analyzer_key), d.symbols
    return seal_indices(key, context.message_info, symbols, kind.width, kind.count)


def released_sum(context: Context, vectors: list[Any]) -> bytes:
    """What the shuffler hands over of masked vectors; keys are in any order but the users'."""
    d = context.descriptor
    key, total = bytes.fromhex(d.analyzer_key), sums.empty_sum(d.layout.counters, d.word_bits or 0)
    secrets = [bytes([slot + 1]) * 32 for slot in range(d.n)]
    masked = (
        sums.mask(vector, secret, key, context.mask_info)
        for vector, secret in zip(vectors, secrets, strict=True)
    )
    keys = b"".join(sums.add(total, report) for report in masked)
    return release(total, keys, np.arange(d.n)[::-1])


class FakeShuffler(ShufflerClient):
    """A shuffler in memory. Batches fill at once, unless ``fills`` is false."""

    def __init__(self) -> None:
        self.skew: float | None = None
        self.contexts: dict[str, Context] = {}
        self.data: dict[str, bytes] = {}
        self.states: dict[str, BatchState] = {}
        self.acknowledged: dict[str, str] = {}
        self.named: defaultdict[str, list[tuple[int, ...]]] = defaultdict(list)
        self.calls: list[str] = []
        self.fills = True
        self.down = 0
        self.broken: dict[int, int] = {}  # deployment index -> messages that do not open
        self.lies: dict[int, int] = {}  # deployment index -> added to the first counter of a sum
        self.expired = 1  # leases of a batch that came to nothing
        self.fills_when_abandoned = False
        self.refusal: RemoteError | None = None
        self.declined: tuple[DeclineReason, ...] = ()

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if self.down > 0:
            self.down -= 1
            raise LocalError("unavailable", "the shuffler does not answer (test)")

    async def deposit(self, batch_id: str, data: bytes, signature: str) -> SignedDescriptor:
        self._called("deposit")
        if self.refusal is not None:
            raise self.refusal
        verify_deposit(PUBLIC, data, signature)
        if self.data.setdefault(batch_id, data) != data:
            raise RemoteError("descriptor-conflict", "other bytes")
        self.contexts[batch_id] = parse(data)
        self.states.setdefault(batch_id, "open")
        return SignedDescriptor(
            descriptor=data.decode(),
            coordinator_signature=signature,
            batch_key="0" * 64,
            shuffler_signature="0" * 128,
        )

    async def status(self, batch_id: str, wait: float) -> BatchStatus:
        self._called("status")
        if self.fills and self._state(batch_id) == "open":
            self.states[batch_id] = "sealed"
        if self._state(batch_id) == "open":
            await asyncio.sleep(min(wait, 0.01))
        n = self.contexts[batch_id].descriptor.n
        state = self._state(batch_id)  # a test may forget the batch meanwhile
        held = 3 if state == "abandoned" else n
        episodes = None if state == "open" else held + self.expired
        return BatchStatus(
            batch_id=batch_id, state=state, n=n, episodes=episodes, declined=self.declined
        )

    def _state(self, batch_id: str) -> BatchState:
        if batch_id not in self.states:
            raise RemoteError("unknown-batch", "no such batch")
        return self.states[batch_id]

    async def open_batches(self) -> tuple[str, ...]:
        if self.down > 0:  # asked beside the drivers, whose calls tests count
            raise LocalError("unavailable", "the shuffler does not answer (test)")
        return tuple(batch for batch, state in self.states.items() if state == "open")

    async def conservation(self, batch_id: str) -> Conservation:
        self._called("conservation")
        state, d = self._state(batch_id), self.contexts[batch_id].descriptor
        L, open_ = d.padding.messages, state == "open"
        held = 0 if open_ else 3 if state == "abandoned" else d.n
        forwarded = held if state in ("forwarded", "erased") else 0
        dropped = held if state == "abandoned" else 0
        flow = MessageFlow(
            accepted=held * L,
            held=(held - forwarded - dropped) * L,
            forwarded=forwarded * L,
            dropped=dropped * L,
        )
        return Conservation(
            batch_id=batch_id,
            state=state,
            n=d.n,
            messages_a_report=L,
            messages=None if open_ else flow,
            balanced=True,
        )

    async def messages(self, batch_id: str, size: int) -> Messages:
        self._called("messages")
        if self._state(batch_id) == "abandoned":
            raise RemoteError("late", "the batch was given up")
        assert self.states[batch_id] in ("sealed", "forwarded")
        self.states[batch_id] = "forwarded"
        context = self.contexts[batch_id]
        sealed = bytearray(sealed_messages(self.data[batch_id]))
        for message in range(self.broken.get(context.descriptor.deployment, 0)):
            sealed[message * context.descriptor.message_bytes + 40] ^= 1
        if lie := self.lies.get(context.descriptor.deployment):
            first = int.from_bytes(sealed[:2], "little") + lie
            sealed[:2] = (first % (1 << 16)).to_bytes(2, "little")
        assert len(sealed) == size
        return Messages(bytes(sealed), hashlib.sha256(sealed).hexdigest())

    async def acknowledge(self, batch_id: str, sha256: str, failed: Sequence[int]) -> None:
        self.named[batch_id].append(tuple(failed))
        self._called("acknowledge")
        assert self.states[batch_id] in ("forwarded", "erased")
        self.states[batch_id] = "erased"
        assert self.acknowledged.setdefault(batch_id, sha256) == sha256

    async def abandon(self, batch_id: str) -> None:
        self._called("abandon")
        if batch_id not in self.states:
            raise RemoteError("unknown-batch", "no such batch")
        if self.fills_when_abandoned and self.states[batch_id] == "open":
            self.states[batch_id] = "sealed"  # the last report was faster
        if self.states[batch_id] not in ("open", "abandoned"):
            raise RemoteError("wrong-state", f"is {self.states[batch_id]}")
        self.states[batch_id] = "abandoned"

    async def identity(self) -> str:
        self._called("identity")
        return SHUFFLER_ID


class LateShuffler(FakeShuffler):
    """Every descriptor reaches it after the batch has expired."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    async def deposit(self, *args: Any) -> Any:
        self._clock.now += spec().batch_seconds
        raise RemoteError("late", "the descriptor expired")


def runs_with_work(store: Store) -> list[str]:
    """The runs that are running, or left a batch at the shuffler to be settled."""
    with store._engine.connect() as connection:
        return sorted(connection.execute(RUNS_WITH_WORK).scalars())


# -- the service --------------------------------------------------------------------------------


def one_key(pair: KeyPair) -> Callable[[str], bytes | None]:
    """Looks a private key up where there is one key pair."""
    return {pair.public.hex(): pair.private}.get


def analyzer() -> Analyzer:
    return Analyzer(one_key(ANALYZER), 1, ThreadPoolExecutor)


def key_ring(directory: Path, clock: Callable[[], float] = time.time) -> KeyRing:
    """A folder of keys whose first one is ANALYZER."""
    folder, key = directory / "analyzer_keys", ANALYZER.public
    if not folder.exists():
        folder.mkdir(parents=True)
        first = {"id": key_id(key), "public": key.hex(), "state": "active", "since": int(NOW)}
        (folder / f"{key_id(key)}.key").write_text(ANALYZER.private.hex())
        (folder / "keys.json").write_text(json.dumps([first]))
    return KeyRing(folder, StorageCipher(None), clock)


def registry() -> Registry:
    return Registry({"tiny": tiny})


def settings(directory: Path, **changes: Any) -> Settings:
    files = {
        "signing_key_file": SIGNING.hex(),
        "shuffler_token_file": "coordinator",
        "operator_token_hash_file": hash_token(TOKEN),
    }
    directory.mkdir(exist_ok=True)
    key_ring(directory)
    for name, text in files.items():
        (directory / name).write_text(text + "\n")
    return Settings.model_validate(
        {
            "data_dir": directory,
            "shuffler_url": "http://127.0.0.1:1",
            "shuffler_id": SHUFFLER_ID,
            "analyzer_keys_dir": directory / "analyzer_keys",
            **{name: directory / name for name in files},
            **changes,
        }
    )


def store_url(directory: Path) -> str:
    """A SQLite file, or the database that a fixture chose (`tests.coordinator.conftest`)."""
    noted = directory / "store_url"
    if noted.exists():
        return noted.read_text()
    return f"sqlite:///{directory / 'coordinator.sqlite'}"


def open_store(directory: Path, active_key: Callable[[], str] | None = None) -> Store:
    """The coordinator's store of a test's directory, with its head."""
    return Store(store_url(directory), Head(directory, "coordinator", meta), active_key)


@dataclass(frozen=True)
class Parts:
    """The parts of a coordinator."""

    store: Any
    shuffler: Any
    analyzer: Analyzer
    keys: KeyRing
    registry: Registry
    clock: Any
    signals: ChangeSignals = field(default_factory=ChangeSignals)

    def coordinator(self, name: str = "one", lease_seconds: float = 15.0) -> Coordinator:
        return Coordinator(
            store=self.store,
            issuer=Issuer(SHUFFLER_ID, self.keys.active, self.clock),
            exchange=BatchExchange(self.shuffler, self.analyzer, SIGNING, self.clock),
            keys=self.keys,
            registry=self.registry,
            signals=self.signals,
            metrics=CoordinatorMetrics(),
            clock=self.clock,
            replica=Replica(name, lease_seconds),
            aggregations=("messages", "sums"),
            test_entry=True,
        )

    def close(self) -> None:
        self.analyzer.close()
        self.store.close()


def parts(directory: Path, shuffler: Any, clock: Clock | None = None) -> Parts:
    keys = key_ring(directory)
    store = open_store(directory, keys.active)
    return Parts(store, shuffler, analyzer(), keys, registry(), clock or Clock())


def play(given: Parts, act: Callable[[Coordinator], Awaitable[None]]) -> None:
    """Start a coordinator, act on it, stop it."""

    async def whole() -> None:
        coordinator = given.coordinator()
        await coordinator.start()
        try:
            async with asyncio.timeout(30):
                await act(coordinator)
        finally:
            await coordinator.close()

    try:
        asyncio.run(whole())
    finally:
        given.close()


def tasks_of_drivers() -> set[asyncio.Task[Any]]:
    """Drivers, and restarts of drivers after a notification."""
    return {t for t in asyncio.all_tasks() if t.get_name().startswith(("run ", "restart "))}


async def drivers_end() -> None:
    """Wait until no run is driven: all are over, or crashed."""
    while tasks := tasks_of_drivers():
        await asyncio.wait(tasks)


async def until(condition: Callable[[], bool]) -> None:
    """Poll until something holds."""
    while not condition():
        await asyncio.sleep(0.005)


def run_to_end(given: Parts, wanted: RunSpec | None = None) -> None:
    """Create a run when one is given, and drive all runs until they are over or crash."""

    async def act(coordinator: Coordinator) -> None:
        if wanted is not None:
            await coordinator.create(wanted)
        await drivers_end()

    play(given, act)
