"""The analyzer: opens a batch's messages in a pool of processes and counts them.

Opening one message takes about 80 microseconds and holds the interpreter lock. Therefore processes
do this work, not threads.

Only sums and the positions of failed messages leave this module. The positions are for the
shuffler's operator alone (`common.protocol.wire.Acknowledgement`). A position in the permuted order
says nothing about a sender. Nothing else may show whether a particular message failed: somebody who
changes a ciphertext must not learn whether it still opens.
"""

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, Executor
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TypeVar

import numpy as np

from riffle.common.mechanism import central_model, sums
from riffle.common.mechanism.counters import CounterLayout, Ints
from riffle.common.mechanism.parameters import CentralNoise, Trust
from riffle.common.mechanism.randomness import Randomness, SeededRandomness, SystemRandomness
from riffle.common.mechanism.workflow import Symbols, count
from riffle.common.process.tracing import in_span
from riffle.common.process.workers import process_pool
from riffle.common.protocol.descriptor import BatchDescriptor, Context
from riffle.common.protocol.errors import LocalError, RemoteError
from riffle.common.protocol.hpke import OVERHEAD, open_each, open_histogram
from riffle.common.protocol.wire import MAX_NAMED
from riffle.coordinator.batches.shuffler_client import Messages, Octets

T = TypeVar("T")

LEAST_CHUNK, MOST_CHUNK = 1_000, 20_000
CHUNKS_A_WORKER = 4


@dataclass(frozen=True, slots=True)
class OpenedBatch:
    """An opened batch. ``histogram`` (C + 1,) has the entries of `workflow.count`, with noise.

    ``opened`` is the number of counted messages. ``failed`` is the number of messages that did not
    open, or named no counter. ``named`` has the positions of up to `MAX_NAMED` failed messages.
    """

    histogram: Ints
    opened: int
    failed: int
    messages_sha256: str
    named: tuple[int, ...] = ()


class Analyzer:
    """Opens batches with the keys to which they are sealed.

    ``private_key`` returns the private half of a public key (hex), or None if this coordinator
    lacks it.
    """

    def __init__(
        self,
        private_key: Callable[[str], bytes | None],
        workers: int,
        pool: Callable[[int], Executor] = process_pool,
    ) -> None:
        self._private_key = private_key
        self._workers = workers
        self._make_pool = pool
        self._pool = pool(workers)

    @in_span("open")
    async def open(self, context: Context, messages: Messages) -> OpenedBatch:
        """Opens and counts all messages of a batch.

        Raises RemoteError ``wrong-size`` if the length of ``messages`` is not the batch's
        ``release_bytes``. Raises LocalError ``unavailable`` if the worker processes died, or if
        this coordinator lacks the batch's key.
        """
        private, descriptor = self.check_key(context), context.descriptor
        if len(messages.data) != descriptor.release_bytes:
            raise RemoteError(
                "wrong-size",
                f"batch {descriptor.batch_id} has {descriptor.release_bytes} bytes of messages, "
                f"the shuffler sent {len(messages.data)}",
            )
        try:
            if descriptor.word_bits:
                return await self._unmask(private, context, messages)
            parts = await self._open_chunks(private, context, messages.data)
        except BrokenExecutor as error:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = self._make_pool(self._workers)
            raise LocalError(
                "unavailable", "the analyzer's worker processes stopped; they are started again"
            ) from error
        histogram = np.asarray(np.sum([part for part, *_ in parts], axis=0), dtype=np.int64)
        failed = sum(failed for _, failed, _ in parts)
        opened = int(histogram.sum() if descriptor.trust == "shuffle" else histogram[-1])
        if opened + failed != descriptor.n * descriptor.padding.messages:
            raise LocalError("internal", "opened and failed messages do not add up to n L")
        # Messages are permuted, so the first failures are a random sample of all failures.
        named = tuple(chain.from_iterable(places for *_, places in parts))[:MAX_NAMED]
        noisy = add_noise(descriptor, histogram)
        return OpenedBatch(noisy, opened, failed, messages.sha256, named)

    def check_key(self, context: Context) -> bytes:
        """Returns the private key that opens the batch.

        Raises LocalError ``unavailable`` if this coordinator lacks the key. The run then waits for
        the operator to bring the key back.
        """
        descriptor = context.descriptor
        private = self._private_key(descriptor.analyzer_key)
        if private is None:
            raise LocalError(
                "unavailable",
                f"batch {descriptor.batch_id} is sealed to the analyzer key "
                f"{descriptor.analyzer_key_id}, which is not here or was erased; start the "
                "coordinator with the folder of keys that it had",
            )
        return private

    def close(self) -> None:
        """Stops the workers."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    async def _unmask(self, private: bytes, context: Context, messages: Messages) -> OpenedBatch:
        """Opens a batch of sums: subtracts all masks from the sum of the masked vectors.

        Every masked vector opens, so ``failed`` is 0.
        """
        descriptor = context.descriptor
        C, bits = descriptor.layout.counters, descriptor.word_bits or 0
        total, keys = sums.split_release(messages.data, C, bits)
        work = partial(sums.add_masks, private, context.mask_info, counters=C, bits=bits)
        masks = await self._map_chunks(work, keys, sums.KEY_BYTES)
        counts = total - np.sum([mask for _, mask in masks], axis=0, dtype=total.dtype)
        histogram = np.append(counts.astype(np.int64), 0)  # there are no dummies
        return OpenedBatch(histogram, descriptor.n, 0, messages.sha256)

    async def _open_chunks(
        self, private: bytes, context: Context, messages: Octets
    ) -> list[tuple[Ints, int, list[int]]]:
        descriptor = context.descriptor
        trust, layout = descriptor.trust, descriptor.layout
        work = partial(open_messages, private, context.message_info, trust, layout)
        parts = await self._map_chunks(work, memoryview(messages), descriptor.message_bytes)
        return [
            (histogram, len(failed), [first + place for place in failed[:MAX_NAMED]])
            for first, (histogram, failed) in parts
        ]

    async def _map_chunks(
        self, work: Callable[[bytes], T], data: memoryview, size: int
    ) -> list[tuple[int, T]]:
        """Applies ``work`` in processes to chunks of ``data``, which has items of ``size`` bytes.

        Returns, for each chunk, its first item's position and its result.
        """
        # Few chunks wait for the pool at a time, so other runs get a turn during a large batch.
        loop, room = asyncio.get_running_loop(), asyncio.Semaphore(2 * self._workers)

        async def apply(span: slice) -> tuple[int, T]:
            async with room:
                result = await loop.run_in_executor(self._pool, work, bytes(data[span]))
            return span.start // size, result

        return list(await asyncio.gather(*map(apply, chunks(len(data), size, self._workers))))


def open_messages(
    private_key: bytes, info: bytes, trust: Trust, layout: CounterLayout, sealed: Octets
) -> tuple[Ints, list[int]]:
    """Opens concatenated messages. Returns a histogram (C + 1,) and the positions of failures."""
    if trust == "shuffle":
        return open_histogram(private_key, info, sealed, layout.width, layout.counters)
    symbols = Symbols.of(trust, layout)
    size = OVERHEAD + symbols.size
    each = (sealed[start : start + size] for start in range(0, len(sealed), size))
    plaintexts = list(open_each(private_key, info, each))
    opened = [place for place, plaintext in enumerate(plaintexts) if plaintext]
    histogram, wrong = count(trust, layout, symbols.read(b"".join(filter(None, plaintexts))))
    counted = np.delete(opened, wrong)
    return histogram, np.setdiff1d(np.arange(len(plaintexts)), counted).tolist()


def add_noise(descriptor: BatchDescriptor, histogram: Ints) -> Ints:
    """Returns the histogram that may leave the analyzer. With trust ``central``, adds the noise.

    In a seeded batch, the noise is drawn from the test seed.
    """
    noise = descriptor.batch_noise
    if not isinstance(noise, CentralNoise):
        return histogram
    randomness: Randomness = SystemRandomness()
    if descriptor.test_seed is not None:
        key = (descriptor.run_id, descriptor.batch_id, "analyzer")
        randomness = SeededRandomness.keyed(descriptor.test_seed, *key)
    return central_model.add_noise(histogram, noise, randomness)


def chunks(total: int, size: int, workers: int) -> Iterator[slice]:
    """Splits ``total`` bytes of messages into enough spans to occupy all workers."""
    messages = total // size
    rounds = max(CHUNKS_A_WORKER, -(-messages // (MOST_CHUNK * workers)))
    each = max(-(-messages // (rounds * workers)), LEAST_CHUNK)
    return (slice(start, start + each * size) for start in range(0, total, each * size))
