"""Runs trials: the product's code from a user's slot to the analyzer's count.

If the setting has no seed, noise and permutation come from the system's CSPRNG.

An audit can run 1e5 trials because `identity_seals` replaces encryption by a seal that hides
nothing and costs nothing. The guarantee against the analyzer, who opens every message, does not
rely on encryption. `attack.agreement` tests whether trials with real seals have the same law.
"""

import asyncio
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from unittest.mock import patch

import numpy as np

from riffle.common.mechanism import sums
from riffle.common.mechanism.counters import Ints
from riffle.common.mechanism.randomness import SeededRandomness
from riffle.common.mechanism.workflow import Report
from riffle.common.protocol import hpke
from riffle.common.protocol.hpke import open_each, open_histogram
from riffle.common.protocol.wire import frame, split_frames
from riffle.coordinator.batches.analyzer import Analyzer
from riffle.coordinator.batches.shuffler_client import Messages
from riffle.experiments.audit.world import World
from riffle.node_client.episode import slot_report
from riffle.node_client.sealing import seal_reports
from riffle.shuffler.permutation import permute_messages
from riffle.shuffler.store.vault import KEY_BYTES


@dataclass(frozen=True, slots=True)
class Views:
    """The analyzer's views: counts (trials, C) of all messages, and ``head``.

    ``head`` (trials, C) counts only the first data_slots messages. If the shuffle moved nothing,
    these would be the data of the first report. With the aggregation `sums`, ``head`` is zero.
    """

    counts: Ints
    head: Ints


def views_of_the_analyzer(world: World, trials: int, *, first: bool, start: int = 0) -> Views:
    """Runs batches as `views` does, but opens them as a coordinator does, by `Analyzer.open`."""
    keys = {world.analyzer.public.hex(): world.analyzer.private}
    analyzer = Analyzer(keys.get, 1, pool=ThreadPoolExecutor)
    with closing(analyzer), asyncio.Runner() as runner:

        def count(released: bytes) -> Ints:
            opening = runner.run(analyzer.open(world.context, Messages(released, "")))
            return np.asarray(opening.histogram[: world.batch.layout.counters])

        return views(world, trials, first=first, start=start, count=count)


def views(
    world: World,
    trials: int,
    *,
    first: bool,
    start: int = 0,
    count: Callable[[bytes], Ints] | None = None,
) -> Views:
    """Runs ``trials`` batches, numbered from ``start``. Only seeded settings use the numbers.

    ``count`` opens a batch and counts its messages.
    """
    count = count or partial(_count, world)
    C = world.batch.layout.counters
    head_bytes = world.batch.padding.data_slots * world.context.descriptor.message_bytes
    counts, head = np.empty((trials, C), np.int64), np.empty((trials, C), np.int64)
    for i in range(trials):
        released = release(world, reports(world, start + i, first=first), start + i)
        counts[i] = count(released)
        head[i] = 0 if world.batch.word_bits else _count(world, released[:head_bytes])
        world.on_trial()
    return Views(counts, head)


def reports(world: World, number: int, *, first: bool) -> Report:
    """Returns the reports of one batch, unsealed: messages (n, L) or vectors (n, C)."""
    n, seeded = world.setting.n, world.setting.seed is not None
    rows = [
        slot_report(
            world.batch, world.environment(user, first), number * n + user, test_entry=seeded
        )[1]
        for user in range(n)
    ]
    return np.stack(rows)


def release(world: World, messages: Report, number: int) -> bytes:
    """Seals, frames and shuffles messages; returns the bytes that the analyzer receives."""
    descriptor, size = world.context.descriptor, world.context.descriptor.report_bytes
    sealed, bits = seal_reports(world.seal_keys, messages), descriptor.word_bits
    body = b"".join(
        frame(f"{user:032x}", sealed[user * size : (user + 1) * size])
        for user in range(descriptor.n)
    )
    _, reports = split_frames(body, size)
    opened = open_each(world.outer.private, world.context.report_info, reports)
    seed, key = world.setting.seed, os.urandom(KEY_BYTES)
    if seed is not None:
        key = SeededRandomness.keyed(seed, "permutation", number).read(KEY_BYTES)
    total = sums.empty_sum(descriptor.layout.counters, bits or 16)
    parts = (sums.add(total, report or b"") if bits else report or b"" for report in opened)
    released = permute_messages(
        (([slot], part) for slot, part in enumerate(parts)),
        key,
        n=descriptor.n,
        L=descriptor.padding.messages,
        message_bytes=sums.KEY_BYTES if bits else descriptor.message_bytes,
    )
    return (total.tobytes() if bits else b"") + released.tobytes()


def _count(world: World, messages: bytes) -> Ints:
    layout, private = world.batch.layout, world.analyzer.private
    if bits := world.batch.word_bits:
        total, keys = sums.split_release(messages, layout.counters, bits)
        info, C = world.context.mask_info, layout.counters
        return (total - sums.add_masks(private, info, keys, C, bits)).astype(np.int64)
    histogram, failed = open_histogram(
        private,
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
    """Replaces an HPKE suite: a seal is the plaintext and then OVERHEAD zero bytes."""

    def encrypt(self, plaintext: bytes, key: object, info: bytes) -> bytes:
        """Returns the plaintext and OVERHEAD zero bytes."""
        del key, info
        return plaintext + _TAG

    def decrypt(self, ciphertext: bytes, key: object, info: bytes) -> bytes:
        """Returns the plaintext."""
        del key, info
        return ciphertext[: -hpke.OVERHEAD]


class IdentityKey:
    """Replaces keys: to load an X25519 key would take longer than all else with a seal."""

    from_private_bytes = from_public_bytes = bytes


@contextmanager
def identity_seals() -> Iterator[None]:
    """Turns encryption off within this context. Never use it in a process that serves."""
    key, suite = IdentityKey, IdentitySuite()
    with patch.multiple(hpke, _SUITE=suite, X25519PrivateKey=key, X25519PublicKey=key):
        yield
