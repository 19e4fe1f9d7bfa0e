"""Whose message is whose: an observer with all that the coordinator has, against live services.

All reports of a batch have equal content, so that plaintexts tell nothing. The observer has the
stream of messages as the coordinator got it, and is told what he cannot know: in which order the
reports came, who has which slot, and for every message the owners of all others. He guesses each
message's owner in four ways. Were the shuffle anything less than one permutation of all messages,
one of them would be right too often; faults planted on purpose show that.

Level: each way is refused when as many right guesses as there are have a probability below 1e-7 by
chance, so an honest shuffle fails this test less than once in 2e6 times.
"""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import numpy as np
import numpy.typing as npt
import pytest
from scipy import stats

from riffle.common.mechanism.randomness import ByteSource
from riffle.common.mechanism.shuffle_model import permutation
from riffle.common.protocol.descriptor import Context
from riffle.common.protocol.hpke import seal, seal_indices
from riffle.coordinator.batches.analyzer import Analyzer, OpenedBatch
from riffle.coordinator.batches.shuffler_client import Messages
from riffle.shuffler import permutation as shuffler_permutation
from tests.fuzz.live import TOKENS, Batch, Network, network
from tests.shuffler.world import COORDINATOR_TOKEN

Ints = npt.NDArray[np.int64]
N = 20
LEVEL = 1e-7


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    with network(tmp_path_factory.mktemp("live")) as made:
        yield made


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Batches' messages as the coordinator gets them."""
    seen: list[bytes] = []
    real = Analyzer.open

    async def curious(self: Analyzer, context: Context, messages: Messages) -> OpenedBatch:
        seen.append(bytes(messages.data))
        return await real(self, context, messages)

    monkeypatch.setattr(Analyzer, "open", curious)
    return seen


class Sent:
    """What a batch's users sent, and in which order: the truth that the observer guesses."""

    def __init__(self, live: Network, rng: np.random.Generator) -> None:
        self.batch = live.deploy()
        d = self.batch.context.descriptor
        self.L, self.size = d.padding.messages, d.message_bytes
        self.owner: dict[bytes, int] = {}
        self.users = live.users(N)
        self.leases = live.leases(self.batch, self.users)
        self.arrivals = rng.permutation(N)
        for slot in self.arrivals:
            report = self._report(self.batch, int(slot))
            assert live.upload(self.batch, [self.leases[slot]], [report]) == ["accepted"]
        live.settled(self.batch)

    def _report(self, batch: Batch, slot: int) -> bytes:
        keys, layout = batch.keys, batch.context.descriptor.layout
        content = np.arange(self.L) % (layout.counters + 1)
        inner = seal_indices(keys.analyzer_key, keys.message_info, content, layout.width, 1)
        for number, start in enumerate(range(0, len(inner), self.size)):
            self.owner[inner[start : start + self.size]] = slot * self.L + number
        return seal(keys.batch_key, keys.report_info, inner)

    def truth(self, stream: bytes) -> Ints:
        """For each message of the stream: slot * L + its number in its report."""
        each = (
            bytes(stream[start : start + self.size]) for start in range(0, len(stream), self.size)
        )
        return np.array([self.owner[message] for message in each])


def surprise(sent: Sent, stream: bytes) -> float:
    """The smallest of four probabilities of guessing so well by chance."""
    truth, L = sent.truth(stream), sent.L
    owner, place = truth // L, np.arange(N * L) // L
    right = [
        (owner == place).sum(),  # messages lie in the order of the slots
        (owner == sent.arrivals[place]).sum(),  # in the order of arrival
        (owner[1:] == owner[:-1]).sum(),  # beside one of the same report
        (truth[1:] == truth[:-1] + 1).sum(),  # beside the one that was sealed before
    ]
    guesses = [N * L, N * L, N * L - 1, N * L - 1]
    chance = [1 / N, 1 / N, (L - 1) / (N * L - 1), (N * L - 1) / (N * L * (N * L - 1))]
    return float(np.min(stats.binom.sf(np.array(right) - 1, guesses, chance)))


def test_nobody_tells_whose_message_is_whose(live: Network, stream: list[bytes]) -> None:
    sent = Sent(live, np.random.default_rng())
    assert surprise(sent, *stream) > LEVEL


def nothing(size: int, _: ByteSource) -> Ints:
    return np.arange(size)


def reports_only(size: int, randomness: ByteSource) -> Ints:
    blocks = np.arange(size).reshape(N, -1)
    return blocks[permutation(N, randomness)].ravel()


def within_reports(size: int, randomness: ByteSource) -> Ints:
    blocks = np.arange(size).reshape(N, -1)
    return np.concatenate([block[permutation(block.size, randomness)] for block in blocks])


@pytest.mark.parametrize("fault", [nothing, reports_only, within_reports])
def test_a_lesser_shuffle_is_found(
    fault: Callable[[int, ByteSource], Ints],
    live: Network,
    stream: list[bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shuffler_permutation, "permutation", fault)
    sent = Sent(live, np.random.default_rng())
    assert surprise(sent, *stream) < LEVEL


def test_the_coordinator_has_nothing_that_names_a_report(
    live: Network, stream: list[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    """Files, log, metrics and every answer that it gives or gets hold no user, lease or node."""
    caplog.set_level(logging.DEBUG)
    sent = Sent(live, np.random.default_rng())
    has = b"".join(everything(live, sent.batch)) + caplog.text.encode() + b"".join(stream)
    # The log of this process is the shuffler's too, which is more than the coordinator has.
    secrets = [*sent.users, *sent.leases, live.node]
    names = [name.encode() for name in secrets] + [bytes.fromhex(name) for name in secrets[:-1]]
    assert sent.batch.id.encode() in has
    assert not [name for name in names if name in has]


def everything(live: Network, batch: Batch) -> Iterator[bytes]:
    d = batch.context.descriptor
    for file in Path(live.folder / "coordinator").rglob("*"):
        if file.is_file():
            yield file.read_bytes()
    own = {"Authorization": f"Bearer {TOKENS['coordinator']}"}
    yield httpx.get(f"{live.coordinator}/metrics", headers=own).content
    run = f"/runs/{d.run_id}"
    for path in ("/runs", run, *(f"{run}/{part}" for part in PARTS)):
        answer = live.call("coordinator", "GET", path)
        assert answer.is_success, answer.text
        yield answer.content
    for part in ("status", "conservation"):
        answer = live.call("shuffler", "GET", f"/batches/{batch.id}/{part}", COORDINATOR_TOKEN)
        assert answer.is_success, answer.text
        yield answer.content


PARTS = ("deployments", "deployments/0", "ledger", "conservation", "result", "history")
