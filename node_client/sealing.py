"""Sealing of reports in a pool of processes: 99 % of a node's work.

HPKE holds the GIL, so threads do not help. A chunk is several whole reports of one batch,
`LEAST_CHUNK` to `MOST_CHUNK` messages in all. Its reports are leased, marked as asked and uploaded
together, and share the cost of each request. A chunk is sealed in tasks of about `TASK_MESSAGES`;
each takes one bytes object of indices and returns one of sealed reports.
"""

import asyncio
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np

from riffle.common.mechanism.counters import Ints
from riffle.common.mechanism.workflow import Symbols
from riffle.common.process.tracing import in_span
from riffle.common.process.workers import process_pool
from riffle.common.protocol.descriptor import Context
from riffle.common.protocol.errors import LocalError
from riffle.common.protocol.hpke import seal, seal_indices

LEAST_CHUNK = 36_000
# Two cores seal this in about two seconds, so no lease ends while its chunk waits for others.
MOST_CHUNK = 48_000
TASK_MESSAGES = 1_500
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

    @classmethod
    def of(cls, context: Context, batch_key: bytes) -> "SealKeys":
        """Collects the keys and sizes of a batch."""
        return cls(
            analyzer_key=bytes.fromhex(context.descriptor.analyzer_key),
            message_info=context.message_info,
            batch_key=batch_key,
            report_info=context.report_info,
            symbols=context.descriptor.symbols,
            messages=context.descriptor.padding.messages,
        )


def whole_reports(room: int, messages: int) -> int:
    """Returns how many reports of L = ``messages`` fit into ``room`` messages, at least one."""
    return max(1, room // messages)


def pack(messages: Ints) -> bytes:
    """Packs reports (reports, L count) for `seal_reports`, 4 bytes a symbol."""
    return messages.astype(_INDEX).tobytes()


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


class SealingPool(AbstractContextManager["SealingPool"]):
    """Worker processes that seal for all nodes of this process. Use as a context manager."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._pool = process_pool(workers)

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    @in_span("seal")
    async def seal(self, keys: SealKeys, messages: Ints) -> bytes:
        """Returns the sealed reports of symbols (reports, L count), concatenated.

        Raises LocalError ``unavailable`` if workers keep dying, most likely for lack of memory.
        """
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
