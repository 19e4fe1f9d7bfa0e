"""What became of everything that was sent to a batch: accepted = held + forwarded + dropped.

Each side is counted where it happens: accepted when a report is stored, held by counting what the
store holds now, forwarded from the bytes that were handed over, dropped by counting what the store
held in the transaction that ended the batch. So the equation can fail, and then something did.

The coordinator sees every message, so it must not have a clock of single reports: of an open batch
it learns the tenths it is full at most (`for_coordinator`), a batch's tenth being ten reports or
more, and looked at once in `LOOK_SECONDS`; refusals and latencies only when the batch is full or
over, and of small batches no latencies, which would be those of single uploads.
"""

import math
from collections import Counter
from collections.abc import Mapping
from functools import partial

from sqlalchemy import Connection, insert, select, update

from riffle.common.protocol.messages import Conservation, Latencies, MessageFlow
from riffle.shuffler.store import records
from riffle.shuffler.store.committer import Access
from riffle.shuffler.store.schema import batches, dropped, latencies

LEAST_SHOWN = 100
"""Smallest n of which the coordinator is told tenths and latencies."""

LOOK_SECONDS = 10
KEPT = 1_024
FLUSH_SECONDS = 1.0
BUCKETS = 64
LEAST_SECONDS = 0.001


def bucket(seconds: float) -> int:
    """The bucket of a latency: k holds those up to `edge` (k)."""
    if seconds <= LEAST_SECONDS:
        return 0
    return min(BUCKETS - 1, math.ceil(4 * math.log2(seconds / LEAST_SECONDS)))


def edge(index: int) -> float:
    """The longest latency of a bucket, in seconds; the last bucket (55 s) also holds longer."""
    return float(LEAST_SECONDS * 2 ** (index / 4))


def quantiles(buckets: Mapping[int, int]) -> Latencies | None:
    """Quantiles of a histogram; None when it is empty."""
    total = sum(buckets.values())
    if total == 0:
        return None

    def quantile(share: float) -> float:
        seen = 0
        for index in sorted(buckets):
            seen += buckets[index]
            if seen >= share * total:
                break
        return edge(index)

    return Latencies(uploads=total, p50=quantile(0.5), p95=quantile(0.95), p99=quantile(0.99))


def conservation(connection: Connection, batch_id: str) -> Conservation:
    """A batch's whole record, for the shuffler's operator.

    Raises:
        RemoteError: ``unknown-batch``.
    """
    batch = records.find(connection, batch_id)
    ended = select(batches.c.forwarded, batches.c.discarded, batches.c.ended_by)
    row = connection.execute(ended.where(batches.c.batch_id == batch_id)).one()
    held = records.count_stored(connection, batch_id) if batch.state in ("open", "sealed") else 0
    flow = MessageFlow(
        accepted=batch.reports * batch.L,
        held=held * batch.L,
        forwarded=row.forwarded,
        dropped=row.discarded * batch.L,
    )
    refused = connection.execute(select(dropped).where(dropped.c.batch_id == batch_id))
    spent = connection.execute(select(latencies).where(latencies.c.batch_id == batch_id))
    return Conservation(
        batch_id=batch_id,
        state=batch.state,
        n=batch.n,
        messages_a_report=batch.L,
        fill_tenths=10 * batch.reports // batch.n if batch.state == "open" else None,
        accepted=batch.reports,
        held=held,
        forwarded=row.forwarded // batch.L,
        dropped={row.ended_by: row.discarded} if row.ended_by else {},
        rejected={found.problem: found.frames for found in refused},
        messages=flow,
        upload_seconds=quantiles({found.bucket: found.uploads for found in spent}),
        balanced=flow.accepted == flow.held + flow.forwarded + flow.dropped,
    )


def for_coordinator(record: Conservation, *, show_fill: bool) -> Conservation:
    """What the coordinator may know of a record; see this module's text."""
    large = record.n >= LEAST_SHOWN
    if record.state != "open":
        return record if large else record.model_copy(update={"upload_seconds": None})
    return Conservation(
        batch_id=record.batch_id,
        state=record.state,
        n=record.n,
        messages_a_report=record.messages_a_report,
        fill_tenths=record.fill_tenths if show_fill and large else None,
        balanced=record.balanced,
    )


def add_latencies(connection: Connection, batch_id: str, buckets: Mapping[int, int]) -> None:
    """Add a histogram to a batch's."""
    for index, uploads in buckets.items():
        here = (latencies.c.batch_id == batch_id) & (latencies.c.bucket == index)
        grown = update(latencies).where(here).values(uploads=latencies.c.uploads + uploads)
        if connection.execute(grown).rowcount == 0:
            connection.execute(
                insert(latencies).values(batch_id=batch_id, bucket=index, uploads=uploads)
            )


class Books:
    """Reads records, and keeps latencies until they are written.

    An upload's latency is known when its transaction is over, so it goes with a later upload's
    (`due`) or before a record is read. A stop loses what waits, and so do batches beyond `KEPT`:
    statistics, never a report.
    """

    def __init__(self, access: Access, *, show_fill: bool) -> None:
        self._access = access
        self._show_fill = show_fill
        self._waiting: dict[str, Counter[int]] = {}
        self._written: dict[str, float] = {}
        self._shown: dict[str, tuple[object, Conservation]] = {}

    def took(self, batch_id: str, seconds: float) -> None:
        """Note how long an upload took."""
        if batch_id not in self._waiting and len(self._waiting) >= KEPT:
            self._waiting.pop(next(iter(self._waiting)))  # the oldest: most likely it is over
        self._waiting.setdefault(batch_id, Counter())[bucket(seconds)] += 1

    def due(self, batch_id: str, clock: float) -> Counter[int]:
        """Latencies to write with an upload at ``clock`` (seconds, monotonic): once a second."""
        if clock - self._written.get(batch_id, -math.inf) < FLUSH_SECONDS:
            return Counter()
        if len(self._written) >= KEPT:
            self._written.clear()
        self._written[batch_id] = clock
        return self._waiting.pop(batch_id, Counter())

    async def record(self, batch_id: str, now: int, *, whole: bool) -> Conservation:
        """A batch's record at ``now``; not ``whole``: what the coordinator may know.

        Raises:
            RemoteError: ``unknown-batch``.
        """
        if waiting := self._waiting.pop(batch_id, None):
            await self._access.write(partial(add_latencies, batch_id=batch_id, buckets=waiting))
        record = await self._access.read(partial(conservation, batch_id=batch_id))
        return record if whole else self._glance(record, now)

    def _glance(self, record: Conservation, now: int) -> Conservation:
        """The same answer for `LOOK_SECONDS`, unless the state changed, which it may know."""
        key = (record.state, now // LOOK_SECONDS)
        held = self._shown.pop(record.batch_id, None)
        if held is None or held[0] != key:
            held = (key, for_coordinator(record, show_fill=self._show_fill))
        if len(self._shown) >= KEPT:
            self._shown.pop(next(iter(self._shown)))
        self._shown[record.batch_id] = held
        return held[1]
