"""Sealing: reports open to their messages, also those that a pool of processes sealed."""

import asyncio
import os
import signal
from concurrent.futures.process import BrokenProcessPool

import numpy as np
import pytest

from riffle.common.mechanism import sums
from riffle.common.protocol.descriptor import parse, serialize
from riffle.common.protocol.errors import LocalError
from riffle.common.protocol.hpke import OpenError, open_histogram, open_sealed
from riffle.node_client.sealing import (
    TASK_MESSAGES,
    SealingPool,
    SealKeys,
    seal_reports,
    whole_reports,
)
from tests.common.descriptors import ONE_MESSAGE
from tests.node_client import world

CONTEXT = parse(serialize(world.descriptor()))
KEYS = SealKeys.of(CONTEXT, world.BATCH.public)
L = KEYS.messages
MESSAGES = np.arange(3 * L, dtype=np.int64).reshape(3, L) % (CONTEXT.descriptor.layout.dummy + 1)


def opened(sealed: bytes) -> list[bytes]:
    size = CONTEXT.descriptor.report_bytes
    return [
        open_sealed(world.BATCH.private, CONTEXT.report_info, sealed[i : i + size])
        for i in range(0, len(sealed), size)
    ]


def test_reports_open_to_their_messages() -> None:
    sealed = seal_reports(KEYS, MESSAGES)
    assert len(sealed) == 3 * CONTEXT.descriptor.report_bytes
    layout = CONTEXT.descriptor.layout
    for report, expected in zip(opened(sealed), MESSAGES, strict=True):
        histogram, failed = open_histogram(
            world.ANALYZER.private, CONTEXT.message_info, report, layout.width, layout.counters
        )
        assert failed == []
        assert np.array_equal(histogram, np.bincount(expected, minlength=layout.counters + 1))


def test_masked_reports_add_up_to_their_vectors_under_keys_of_their_own() -> None:
    context = parse(serialize(world.descriptor(**ONE_MESSAGE["sums"])))
    keys, C = SealKeys.of(context, world.BATCH.public), context.descriptor.layout.counters
    vectors = np.arange(5 * C, dtype=np.uint16).reshape(5, C)

    async def seal() -> bytes:
        with SealingPool(2) as pool:
            return await pool.seal(keys, vectors)

    sealed = asyncio.run(seal())
    size, total = context.descriptor.report_bytes, sums.empty_sum(C, 16)
    assert len(sealed) == 5 * size
    reports = [
        open_sealed(world.BATCH.private, context.report_info, sealed[i : i + size])
        for i in range(0, len(sealed), size)
    ]
    own = sums.add(total, b"".join(reports))
    assert len({own[i : i + 32] for i in range(0, 160, 32)}) == 5
    masks = sums.add_masks(world.ANALYZER.private, context.mask_info, own, C, 16)
    assert np.array_equal(total - masks, vectors.sum(axis=0, dtype=np.uint16))
    assert keys.zeros().shape == (1, C)
    assert keys.size == -(-size // 50), "a chunk has as many bytes as one of messages"


def test_no_two_ciphertexts_are_equal() -> None:
    size = CONTEXT.descriptor.message_bytes
    report = opened(seal_reports(KEYS, np.zeros((1, L), dtype=np.int64)))[0]
    messages = {report[i : i + size] for i in range(0, len(report), size)}
    assert len(messages) == L


def test_seals_are_bound_to_the_descriptor() -> None:
    other = parse(serialize(world.descriptor(deployment=1)))
    sealed = seal_reports(SealKeys.of(other, world.BATCH.public), MESSAGES[:1])
    with pytest.raises(OpenError):
        opened(sealed)


def test_chunks_are_whole_reports() -> None:
    assert whole_reports(2_000, 20) == 100
    assert whole_reports(2_000, 600) == 3
    assert whole_reports(2_000, 65_536) == 1


def test_a_chunk_of_several_tasks_keeps_its_order() -> None:
    count = 2 * whole_reports(TASK_MESSAGES, L) + 1
    messages = np.repeat(np.arange(count) % 50, L).reshape(count, L)
    with SealingPool(2) as pool:
        reports = opened(asyncio.run(pool.seal(KEYS, messages)))
    size, layout = CONTEXT.descriptor.message_bytes, CONTEXT.descriptor.layout
    first = b"".join(report[:size] for report in reports)
    named = [
        open_sealed(world.ANALYZER.private, CONTEXT.message_info, first[i : i + size])
        for i in range(0, len(first), size)
    ]
    assert named == [(i % 50).to_bytes(layout.width, "big") for i in range(count)]


def test_a_pool_seals_and_survives_the_death_of_a_worker() -> None:
    async def go(pool: SealingPool) -> list[bytes]:
        before = await pool.seal(KEYS, MESSAGES[:1])
        for process in list(pool._pool._processes.values()):
            os.kill(process.pid or 0, signal.SIGKILL)
        tasks = [pool.seal(KEYS, MESSAGES[i : i + 1]) for i in range(3)]
        return [before, *await asyncio.gather(*tasks)]

    with SealingPool(1) as pool:
        results = asyncio.run(go(pool))
    assert [len(opened(sealed)) for sealed in results] == [1, 1, 1, 1]


def test_a_pool_with_dying_workers_gives_up_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    class Dead:
        def shutdown(self, **_: object) -> None:
            return None

        def submit(self, *_: object) -> None:
            raise BrokenProcessPool("gone")

    monkeypatch.setattr("riffle.node_client.sealing.process_pool", lambda _: Dead())
    with SealingPool(1) as pool, pytest.raises(LocalError, match="dying"):
        asyncio.run(pool.seal(KEYS, MESSAGES))
