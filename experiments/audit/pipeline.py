"""One trial: the product's code from a user's slot to the analyzer's count.

Episode and encoding (`node_client.episode.slot_report`), seals and frames (`node_client.sealing`,
`common.protocol.messages`), the shuffle (`shuffler.permutation.shuffle`) and the count
(`open_histogram`, or the whole `coordinator.batches.analyzer.Analyzer`) are called as they are
deployed. Noise and permutation come from the system's CSPRNG unless the setting is seeded.

Sealing that hides nothing and costs nothing, so that an audit can afford 1e5 trials.

Encryption has no part in the guarantee against the analyzer, who opens every message. Only the
HPKE suite behind `common.protocol.hpke` is replaced; sizes, framing, batching and opening stay the
product's. Trials with real sealing must agree (`attack.agreement`).
"""

import asyncio
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from unittest.mock import patch

import numpy as np
import numpy.typing as npt

from riffle.common.mechanism.counters import Ints
from riffle.common.mechanism.randomness import SeededRandomness
from riffle.common.protocol import hpke
from riffle.common.protocol.hpke import open_each, open_histogram
from riffle.common.protocol.messages import frame, split_frames
from riffle.coordinator.batches.analyzer import Analyzer
from riffle.coordinator.batches.keys import OneKey
from riffle.experiments.audit.world import World
from riffle.node_client.episode import slot_report
from riffle.node_client.sealing import pack, seal_reports
from riffle.shuffler.permutation import shuffle
from riffle.shuffler.store.vault import KEY_BYTES


@dataclass(frozen=True, slots=True)
class Views:
    """What the analyzer saw: counts (trials, C), and counts of the first data_slots messages.

    The second would show the data of the first report if the shuffle did not move it.
    """

    counts: Ints
    head: Ints


def views(world: World, trials: int, *, first: bool, start: int = 0) -> Views:
    """Run ``trials`` batches; ``start`` numbers them, which matters to seeded settings only."""
    C = world.plan.layout.counters
    counts, head = np.empty((trials, C), np.int64), np.empty((trials, C), np.int64)
    for i in range(trials):
        released = release(world, reports(world, start + i, first=first), start + i)
        head[i], counts[i] = _opened(world, released)
        world.on_trial()
    return Views(counts, head)


def views_of_the_analyzer(world: World, trials: int, *, first: bool, start: int = 0) -> Views:
    """The same, opened by `Analyzer.open` as in a deployed coordinator, in a thread."""
    analyzer = Analyzer(OneKey(world.analyzer), 1, pool=ThreadPoolExecutor)
    C = world.plan.layout.counters

    async def run() -> Views:
        counts, head = np.empty((trials, C), np.int64), np.empty((trials, C), np.int64)
        for i in range(trials):
            released = release(world, reports(world, start + i, first=first), start + i)
            opening = await analyzer.open(world.context, released)
            counts[i] = opening.histogram[:C]
            head[i] = _count(world, released[: _head_bytes(world)])
            world.on_trial()
        return Views(counts, head)

    try:
        return asyncio.run(run())
    finally:
        analyzer.close()


def reports(world: World, number: int, *, first: bool) -> Ints:
    """The users' half: messages (n, L) of one batch."""
    n, seeded = world.setting.n, world.setting.seed is not None
    rows = [
        slot_report(
            world.plan, world.environment(user, first), number * n + user, test_entry=seeded
        )[1]
        for user in range(n)
    ]
    return np.stack(rows)


def release(world: World, messages: Ints, number: int) -> bytes:
    """Seals, frames and the shuffle: the bytes that the analyzer is handed."""
    descriptor, size = world.context.descriptor, world.context.descriptor.report_bytes
    sealed = seal_reports(world.seal_keys, pack(messages))
    body = b"".join(
        frame(f"{user:032x}", sealed[user * size : (user + 1) * size])
        for user in range(descriptor.n)
    )
    _, reports = split_frames(body, size)
    opened = open_each(world.outer.private, world.context.report_info, reports)
    released = shuffle(
        (([slot], report or b"") for slot, report in enumerate(opened)),
        _permutation_key(world, number),
        n=descriptor.n,
        L=descriptor.padding.messages,
        message_bytes=descriptor.message_bytes,
    )
    return released.messages.tobytes()


def _permutation_key(world: World, number: int) -> bytes:
    seed = world.setting.seed
    if seed is None:
        return os.urandom(KEY_BYTES)
    return SeededRandomness.keyed(seed, "permutation", number).read(KEY_BYTES)


def _opened(world: World, released: bytes) -> tuple[Ints, Ints]:
    edge = _head_bytes(world)
    head = _count(world, released[:edge])
    return head, head + _count(world, released[edge:])


def _head_bytes(world: World) -> int:
    return world.plan.padding.data_slots * world.context.descriptor.message_bytes


def _count(world: World, messages: bytes) -> npt.NDArray[np.int64]:
    layout = world.plan.layout
    histogram, failed = open_histogram(
        world.analyzer.private,
        world.context.message_info,
        messages,
        layout.width,
        layout.counters,
    )
    if failed:
        raise AssertionError("a message of the audit did not open")
    return histogram[:-1]


_TAG = bytes(hpke.OVERHEAD)


class IdentitySuite:
    """Stands for an HPKE suite: the plaintext, and as many zero bytes as a seal adds."""

    def encrypt(self, plaintext: bytes, key: object, info: bytes) -> bytes:
        """The plaintext and OVERHEAD zero bytes."""
        del key, info
        return plaintext + _TAG

    def decrypt(self, ciphertext: bytes, key: object, info: bytes) -> bytes:
        """The plaintext back."""
        del key, info
        return ciphertext[: -hpke.OVERHEAD]


@contextmanager
def identity_seals() -> Iterator[None]:
    """Within this context nothing is encrypted. Never within a process that serves."""
    with patch.object(hpke, "_SUITE", IdentitySuite()):
        yield
