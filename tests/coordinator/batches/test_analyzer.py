"""Opening in worker processes: exact histograms, conservation, wrong keys and sizes."""

import asyncio
import os
import signal
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from riffle.common.protocol.descriptor import Context, parse
from riffle.common.protocol.errors import LocalError, RemoteError
from riffle.common.protocol.hpke import KeyPair, seal_indices
from riffle.coordinator.batches.analyzer import Analyzer, OpenedBatch, chunks
from riffle.coordinator.batches.issue import Issuer
from riffle.coordinator.batches.shuffler_client import Messages
from riffle.coordinator.learners.registry import problem
from riffle.coordinator.learning.learner import Deployment
from tests.coordinator.learner import Tiny
from tests.coordinator.world import (
    ANALYZER,
    NOW,
    RUN,
    SHUFFLER_ID,
    analyzer,
    one_key,
    sealed_messages,
    spec,
)


def context(n: int = 20) -> tuple[Context, bytes]:
    deployment = Tiny(problem(spec())).next_deployment()
    assert deployment is not None
    wanted = Deployment(1, "crude", deployment.mixture, n, 0)
    issuer = Issuer(SHUFFLER_ID, ANALYZER.public.hex, lambda: NOW)
    data = issuer.issue(RUN, spec(), wanted, index=0, step=0).data
    return parse(data), data


def opened(using: Analyzer, batch: Context, messages: bytes) -> OpenedBatch:
    try:
        return asyncio.run(using.open(batch, Messages(messages, "")))
    finally:
        using.close()


def test_worker_processes_count_as_one_would() -> None:
    batch, data = context()
    d = batch.descriptor
    indices = np.resize(np.arange(d.layout.counters + 1), d.n * d.padding.messages)
    messages = seal_indices(ANALYZER.public, batch.message_info, indices, d.layout.width)
    opening = opened(Analyzer(one_key(ANALYZER), 2), batch, messages)
    assert opening.failed == 0
    assert opening.histogram.tolist() == np.bincount(indices).tolist()
    assert opening.opened == indices.size
    assert opening.named == ()
    assert opened(analyzer(), batch, sealed_messages(data)).opened == indices.size


@pytest.mark.parametrize("least", [1_000, 10], ids=["one chunk", "four chunks"])
def test_tampered_messages_fail_and_are_named_by_their_places(
    least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("riffle.coordinator.batches.analyzer.LEAST_CHUNK", least)
    batch, data = context()
    messages = bytearray(sealed_messages(data))
    whole = opened(analyzer(), batch, bytes(messages))
    last = len(messages) // batch.descriptor.message_bytes - 1
    for message in (0, 7, last):
        messages[message * batch.descriptor.message_bytes + 45] ^= 0x80
    opening = opened(analyzer(), batch, bytes(messages))
    assert (opening.failed, opening.named) == (3, (0, 7, last))
    assert opening.opened == whole.opened - 3
    assert (whole.failed, whole.named) == (0, ())
    assert (whole.histogram - opening.histogram).sum() == 3


@pytest.mark.parametrize("change", [-1, 1])
def test_a_wrong_number_of_bytes_is_refused(change: int) -> None:
    batch, data = context()
    messages = (sealed_messages(data) + b"x")[: len(sealed_messages(data)) + change]
    with pytest.raises(RemoteError, match="bytes of messages"):
        opened(analyzer(), batch, messages)


def test_another_key_is_told_before_anything_is_opened() -> None:
    batch, data = context()
    other = KeyPair.from_private(bytes(range(2, 34)))
    with pytest.raises(LocalError, match="analyzer key"):
        opened(Analyzer(one_key(other), 1), batch, sealed_messages(data))


class Dead(Executor):
    """A pool whose workers are gone."""

    def submit(self, *_: Any, **__: Any) -> Future[Any]:
        raise BrokenExecutor


def test_dead_workers_are_replaced() -> None:
    pools: list[int] = []

    def pool(workers: int) -> Executor:
        pools.append(workers)
        return Dead()

    batch, data = context()
    with pytest.raises(LocalError, match="started again"):
        opened(Analyzer(one_key(ANALYZER), 3, pool), batch, sealed_messages(data))
    assert pools == [3, 3]


def test_a_worker_that_is_killed_costs_one_try() -> None:
    batch, data = context()
    messages, using = Messages(sealed_messages(data), ""), Analyzer(one_key(ANALYZER), 1)

    async def act() -> OpenedBatch:
        first = await using.open(batch, messages)
        assert isinstance(using._pool, ProcessPoolExecutor)
        for worker in list(using._pool._processes):
            os.kill(worker, signal.SIGKILL)
        with pytest.raises(LocalError, match="started again"):
            await using.open(batch, messages)
        again = await using.open(batch, messages)
        assert np.array_equal(again.histogram, first.histogram)
        return again

    try:
        assert asyncio.run(act()).failed == 0
    finally:
        using.close()


@given(st.integers(0, 200_000), st.integers(49, 60), st.integers(1, 64))
def test_chunks_cover_every_message_once(messages: int, size: int, workers: int) -> None:
    spans = list(chunks(messages * size, size, workers))
    assert [span.start for span in spans[1:]] == [span.stop for span in spans[:-1]]
    covered = sum(min(span.stop, messages * size) - span.start for span in spans)
    assert covered == messages * size
    assert all((span.stop - span.start) <= 20_000 * size for span in spans)
    assert messages < 4_000 * workers or len(spans) % workers == 0  # all have as many to open
