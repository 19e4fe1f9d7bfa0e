"""Sealing of reports: 99 % of a node's work if they are messages.

Messages are sealed in a pool of processes. HPKE holds the GIL, so threads do not help. Vectors
(`common.mechanism.sums`) are masked and sealed in threads. That is one key agreement a report, and
large vectors are not copied to another process. A chunk is several whole reports of one batch,
`LEAST_CHUNK` to `MOST_CHUNK` messages in all. Its reports are leased, marked as asked and uploaded
together, and share the cost of each request. A chunk is sealed in tasks of about `TASK_MESSAGES`;
each takes one bytes object of indices and returns one of sealed reports.
"""

import asyncio
import os
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np

from riffle.common.mechanism import sums
from riffle.common.mechanism.workflow import Report, Symbols
from riffle.common.process.tracing import in_span
from riffle.common.process.workers import process_pool
from riffle.common.protocol.descriptor import Context
from riffle.common.protocol.errors import LocalError
from riffle.common.protocol.hpke import seal, seal_indices

LEAST_CHUNK = 36_000
# Two cores seal this in about two seconds, so no lease ends while its chunk waits for others.
MOST_CHUNK = 48_000
TASK_MESSAGES = 1_500
MESSAGE_BYTES = 50
"""About the size of a sealed message: a vector takes as much room as its bytes in messages."""
_INDEX = np.dtype("<u4")
_BREAKS_IN_A_ROW = 3


@dataclass(frozen=True, slots=True)
class SealKeys:
    """Public keys and sizes that sealing a batch's reports needs; L = ``messages``."""

    analyzer_key: bytes
    message_info: bytes
    batch_key: bytes
    report_info: bytes
    symbols: Symbols
    messages: int
    entries: int
    report_bytes: int
    word_bits: int | None

    @classmethod
    def of(cls, context: Context, batch_key: bytes) -> "SealKeys":
        """Collects the keys and sizes of a batch."""
        descriptor, bits = context.descriptor, context.descriptor.word_bits
        L, symbols = descriptor.padding.messages, descriptor.symbols
        return cls(
            analyzer_key=bytes.fromhex(descriptor.analyzer_key),
            message_info=context.mask_info if bits else context.message_info,
            batch_key=batch_key,
            report_info=context.report_info,
            symbols=symbols,
            messages=L,
            entries=descriptor.layout.counters if bits else L * symbols.count,
            report_bytes=descriptor.report_bytes,
            word_bits=bits,
        )

    def zeros(self) -> Report:
        """Returns one unsealed report (1, entries) of zeros."""
        dtype = np.dtype(f"<u{self.word_bits // 8}") if self.word_bits else np.dtype(np.int64)
        return np.zeros((1, self.entries), dtype=dtype)

    @property
    def size(self) -> int:
        """The report's size in messages: L or, for a vector, its bytes in messages."""
        return -(-self.report_bytes // MESSAGE_BYTES) if self.word_bits else self.messages


def whole_reports(room: int, size: int) -> int:
    """Returns how many reports of ``size`` messages fit into ``room`` messages, at least one."""
    return max(1, room // size)


def pack(messages: Report) -> bytes:
    """Packs reports (reports, L count) for `seal_reports`, 4 bytes a symbol."""
    return messages.astype(_INDEX).tobytes()


def mask_reports(keys: SealKeys, vectors: Report) -> bytes:
    """Masks every vector under a fresh key from the CSPRNG, and seals it to the batch key.

    Returns the sealed reports, concatenated.
    """
    masked = (
        sums.mask(vector, os.urandom(sums.KEY_BYTES), keys.analyzer_key, keys.message_info)
        for vector in vectors
    )
    return b"".join(seal(keys.batch_key, keys.report_info, report) for report in masked)


def seal_reports(keys: SealKeys, packed: bytes) -> bytes:
    """Seals every message to the analyzer, then every report to the batch key.

    Returns the sealed reports, concatenated; each is 48 bytes longer than its L messages.
    """
    symbols = keys.symbols
    reports = np.frombuffer(packed, dtype=_INDEX).reshape(-1, keys.messages * symbols.count)
    return b"".join(
        seal(
            keys.batch_key,
            keys.report_info,
            seal_indices(
                keys.analyzer_key, keys.message_info, report, symbols.width, symbols.count
            ),
        )
        for report in reports
    )


async def seal_in_thread(keys: SealKeys, messages: Report) -> bytes:
    """Does what `SealingPool.seal` does, in a thread: an app has few reports, and no workers."""
    if keys.word_bits:
        return await asyncio.to_thread(mask_reports, keys, messages)
    return await asyncio.to_thread(seal_reports, keys, pack(messages))


class SealingPool(AbstractContextManager["SealingPool"]):
    """Worker processes that seal for all nodes of this process. Use as a context manager."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._pool = process_pool(workers)

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    @in_span("seal")
    async def seal(self, keys: SealKeys, messages: Report) -> bytes:
        """Returns the sealed reports of unsealed ones (reports, entries), concatenated.

        Raises LocalError ``unavailable`` if workers keep dying, most likely for lack of memory.
        """
        if keys.word_bits:
            shares = np.array_split(messages, min(self._workers, len(messages)))
            masked = (asyncio.to_thread(mask_reports, keys, share) for share in shares)
            return b"".join(await asyncio.gather(*masked))
        step = whole_reports(TASK_MESSAGES, keys.messages)
        parts = (pack(messages[start : start + step]) for start in range(0, len(messages), step))
        return b"".join(await asyncio.gather(*(self._seal(keys, part) for part in parts)))

    async def _seal(self, keys: SealKeys, packed: bytes) -> bytes:
        """Seals one task. If a worker dies, repeats its task, whose output was not sent."""
        for _ in range(_BREAKS_IN_A_ROW):
            pool = self._pool
            try:
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(pool, seal_reports, keys, packed)
            except BrokenProcessPool:
                if self._pool is pool:  # many tasks see the same dead pool; the first replaces it
                    pool.shutdown(wait=False, cancel_futures=True)
                    self._pool = process_pool(self._workers)
        raise LocalError("unavailable", "the sealing processes keep dying; is memory short?")
