"""Seals reports: 99 % of a node's work if reports consist of messages.

Messages are sealed in processes, because HPKE holds the GIL. Vectors (`common.mechanism.sums`) are
masked and sealed in threads. A vector needs only one key agreement, and threads copy no vectors.
The users of a chunk share one lease request, one write that marks them as asked, and one upload.
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
# Two cores seal this many in about two seconds, so no lease ends while its chunk waits for others.
MOST_CHUNK = 48_000
TASK_MESSAGES = 1_500
MESSAGE_BYTES = 50
"""About the size of a sealed message. A vector's size is given as a number of such messages."""
_BREAKS_IN_A_ROW = 3


@dataclass(frozen=True, slots=True)
class SealKeys:
    """Public keys and sizes for sealing a batch's reports. ``messages`` is L."""

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
        """A report's size in messages: L or, for a vector, its bytes divided by `MESSAGE_BYTES`."""
        return -(-self.report_bytes // MESSAGE_BYTES) if self.word_bits else self.messages


def whole_reports(room: int, size: int) -> int:
    """Returns how many reports of ``size`` messages fit into ``room`` messages, at least one."""
    return max(1, room // size)


def seal_reports(keys: SealKeys, reports: Report) -> bytes:
    """Seals every report (reports, entries) to the batch key; returns them concatenated.

    Before that, every message is sealed to the analyzer, or every vector is masked under a fresh
    key from the CSPRNG.
    """
    analyzer_key, info, symbols = keys.analyzer_key, keys.message_info, keys.symbols
    if keys.word_bits:
        inner = (sums.mask(row, os.urandom(sums.KEY_BYTES), analyzer_key, info) for row in reports)
    else:
        width, count = symbols.width, symbols.count
        inner = (seal_indices(analyzer_key, info, row, width, count) for row in reports)
    return b"".join(seal(keys.batch_key, keys.report_info, each) for each in inner)


class SealingPool(AbstractContextManager["SealingPool"]):
    """Worker processes that seal for all nodes of this process. Use as a context manager."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._pool = process_pool(workers)

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    @in_span("seal")
    async def seal(self, keys: SealKeys, messages: Report) -> bytes:
        """Seals reports (reports, entries); returns the sealed reports, concatenated.

        Raises LocalError ``unavailable`` if workers keep dying, most likely for lack of memory.
        """
        if keys.word_bits:
            shares = np.array_split(messages, min(self._workers, len(messages)))
            masked = (asyncio.to_thread(seal_reports, keys, share) for share in shares)
            return b"".join(await asyncio.gather(*masked))
        step = whole_reports(TASK_MESSAGES, keys.messages)
        rows = messages.astype(np.uint32)
        parts = (rows[start : start + step] for start in range(0, len(rows), step))
        return b"".join(await asyncio.gather(*(self._seal(keys, part) for part in parts)))

    async def _seal(self, keys: SealKeys, rows: Report) -> bytes:
        """Seals one task's reports. If a worker dies, repeats the task: nothing was sent yet."""
        for _ in range(_BREAKS_IN_A_ROW):
            pool = self._pool
            try:
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(pool, seal_reports, keys, rows)
            except BrokenProcessPool:
                if self._pool is pool:  # many tasks see the same dead pool; the first replaces it
                    pool.shutdown(wait=False, cancel_futures=True)
                    self._pool = process_pool(self._workers)
        raise LocalError("unavailable", "the sealing processes keep dying; is memory short?")
