"""Processes that open messages, each with a thread here that hands it work.

Through a `ProcessPoolExecutor` a chunk of messages is copied, pickled and passed by two threads
more, which all of its workers share. Here it goes into a process's pipe as it is: 0.03 us of a core
a message instead of 0.07.

The analyzer: opens a batch's messages in a pool of processes and counts them.

Opening one message costs some 80 microseconds of elliptic-curve work that holds the interpreter
lock, so chunks of 1,000 to 20,000 messages go to worker processes as one piece each, and
histograms come back. Which message failed, or in which chunk, is never said: only sums leave here.
Conservation: opened + failed = n L, checked for every batch.
"""

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import ParamSpec, TypeVar, cast

import numpy as np

from riffle.common.mechanism import central
from riffle.common.mechanism.counters import CounterLayout, Ints
from riffle.common.mechanism.noise import CentralNoise, Trust
from riffle.common.mechanism.randomness import Randomness, SeededRandomness, SystemRandomness
from riffle.common.mechanism.workflow import Symbols, count
from riffle.common.process.tracing import in_span
from riffle.common.process.workers import SPAWN, initialize_worker
from riffle.common.protocol.descriptor import BatchDescriptor, Context
from riffle.common.protocol.errors import LocalError, RemoteError
from riffle.common.protocol.hpke import OVERHEAD, open_each, open_histogram
from riffle.coordinator.batches.keys import Keys
from riffle.coordinator.batches.shuffler_client import Octets

P = ParamSpec("P")
T = TypeVar("T")


class Openers(ThreadPoolExecutor):
    """Calls functions in processes: of the arguments, the last is a buffer, and becomes bytes.

    Who called for a process that died gets BrokenExecutor, and so does all that its thread is given
    from then on. A process ends with its thread, and never outlives this one.
    """

    def __init__(self, workers: int) -> None:
        super().__init__(workers, initializer=self._start)
        self._own = threading.local()

    def submit(self, work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """See `concurrent.futures.Executor`."""
        return super().submit(partial(self._ask, work, *args, **kwargs))

    def _start(self) -> None:
        ours, theirs = SPAWN.Pipe()
        with theirs:
            SPAWN.Process(target=_serve, args=(theirs,), daemon=True).start()
        self._own.pipe = ours

    def _ask(self, work: Callable[..., T], *arguments: object, **named: object) -> T:
        pipe: Connection = self._own.pipe
        try:
            pipe.send((work, arguments[:-1], named))
            pipe.send_bytes(cast("bytes", arguments[-1]))
            done, found = pipe.recv()
        except (EOFError, OSError) as error:
            raise BrokenExecutor("a process that opens messages has died") from error
        if not done:
            raise found
        return cast("T", found)


def _serve(pipe: Connection) -> None:
    """Do what is asked until nobody can ask any more."""
    initialize_worker()
    while True:
        try:
            work, arguments, named = pipe.recv()
            data = pipe.recv_bytes()
        except EOFError:
            return
        try:
            answer = True, work(*arguments, data, **named)
        except Exception as error:
            answer = False, error
        pipe.send(answer)


LEAST_CHUNK, MOST_CHUNK = 1_000, 20_000
CHUNKS_A_WORKER = 4
STATE_OF_POOL = "the analyzer's worker processes stopped; they are being started again"


@dataclass(frozen=True, slots=True)
class Opening:
    """What a batch counts, its noise included: histogram (C + 1,), see
    `common.mechanism.workflow.count`.

    ``opened`` messages were counted; ``failed`` ones did not open or made no sense.
    """

    histogram: Ints
    opened: int
    failed: int


class Analyzer:
    """Opens batches with the keys they are sealed to."""

    def __init__(self, keys: Keys, workers: int, pool: Callable[[int], Executor] = Openers) -> None:
        self._keys = keys
        self._workers = workers
        self._make_pool = pool
        self._pool = pool(workers)

    @property
    def public_key(self) -> str:
        """The analyzer's active public key, hex, as new descriptors carry it."""
        return self._keys.active()

    @in_span("open")
    async def open(self, context: Context, messages: Octets) -> Opening:
        """Open and count all messages of a batch.

        Raises:
            RemoteError: ``wrong-size``, when there are not exactly n L messages.
            LocalError: ``unavailable`` when the batch was sealed to another key, or the worker
                processes died.
        """
        private = self.check_key(context)
        _check_size(context, messages)
        try:
            parts = await self._all_chunks(private, context, messages)
        except BrokenExecutor as error:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = self._make_pool(self._workers)
            raise LocalError("unavailable", STATE_OF_POOL) from error
        histogram = np.asarray(np.sum([part for part, _ in parts], axis=0), dtype=np.int64)
        failed, descriptor = sum(failed for _, failed in parts), context.descriptor
        opened = int(histogram.sum() if descriptor.trust == "shuffle" else histogram[-1])
        if opened + failed != descriptor.n * descriptor.padding.messages:
            raise LocalError("internal", "opened and failed messages do not add up to n L")
        return Opening(add_noise(descriptor, histogram), opened, failed)

    def check_key(self, context: Context) -> bytes:
        """The private key that opens the batch.

        Raises:
            LocalError: ``unavailable``: there is no such key here. Wrong keys at start are mended
                by a restart, so they must not cost the run.
        """
        descriptor = context.descriptor
        private = self._keys.private(descriptor.analyzer_key)
        if private is None:
            raise LocalError(
                "unavailable",
                f"batch {descriptor.batch_id} is sealed to the analyzer key "
                f"{descriptor.analyzer_key_id}, which is not here or was erased; start the "
                "coordinator with the folder of keys that it had",
            )
        return private

    def close(self) -> None:
        """Stop the workers."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    async def _all_chunks(
        self, private: bytes, context: Context, messages: Octets
    ) -> list[tuple[Ints, int]]:
        descriptor, view = context.descriptor, memoryview(messages)
        # Between a large batch's chunks there is room for those of another run.
        loop, room = asyncio.get_running_loop(), asyncio.Semaphore(2 * self._workers)

        async def one(span: slice) -> tuple[Ints, int]:
            async with room:
                return await loop.run_in_executor(
                    self._pool,
                    open_messages,
                    private,
                    context.message_info,
                    descriptor.trust,
                    descriptor.layout,
                    view[span],
                )

        size = descriptor.message_bytes
        return list(await asyncio.gather(*map(one, chunks(len(messages), size, self._workers))))


def open_messages(
    private_key: bytes, info: bytes, trust: Trust, layout: CounterLayout, sealed: Octets
) -> tuple[Ints, int]:
    """Open messages end to end and count them: histogram (C + 1,), and how many failed."""
    if trust == "shuffle":
        return open_histogram(private_key, info, sealed, layout.width, layout.counters)
    symbols = Symbols.of(trust, layout)
    size = OVERHEAD + symbols.size
    each = (sealed[start : start + size] for start in range(0, len(sealed), size))
    opened = [plaintext for plaintext in open_each(private_key, info, each) if plaintext]
    histogram, failed = count(trust, layout, symbols.read(b"".join(opened)))
    return histogram, failed + len(sealed) // size - len(opened)


def add_noise(descriptor: BatchDescriptor, histogram: Ints) -> Ints:
    """The histogram as anything but the analyzer may see it: trust ``central`` adds its noise.

    Noise comes from the system's CSPRNG, or from the batch's own stream where a test seeds it.
    """
    noise = descriptor.to_noise()
    if not isinstance(noise, CentralNoise):
        return histogram
    randomness: Randomness = SystemRandomness()
    if descriptor.test_seed is not None:
        key = (descriptor.run_id, descriptor.batch_id, "analyzer")
        randomness = SeededRandomness.keyed(descriptor.test_seed, *key)
    return central.add_noise(histogram, noise, randomness)


def chunks(total: int, size: int, workers: int) -> Iterator[slice]:
    """Spans of ``total`` bytes in whole messages of ``size`` bytes: enough for all workers."""
    messages = total // size
    rounds = max(CHUNKS_A_WORKER, -(-messages // (MOST_CHUNK * workers)))
    each = max(-(-messages // (rounds * workers)), LEAST_CHUNK)
    return (slice(start, start + each * size) for start in range(0, total, each * size))


def _check_size(context: Context, messages: Octets) -> None:
    descriptor = context.descriptor
    expected = descriptor.n * descriptor.padding.messages * descriptor.message_bytes
    if len(messages) != expected:
        raise RemoteError(
            "wrong-size",
            f"batch {descriptor.batch_id} has {expected} bytes of messages, "
            f"the shuffler sent {len(messages)}",
        )
