"""What the shuffler counts, and who may see it: metrics, conservation records, the log.

**Metrics** for Prometheus are for the operator alone, since they show single uploads. Counters and
histograms are this process's. Gauges that are read from the store are the same at every
replica: take their maximum, not their sum. No label is a node, a user or a batch.

**Conservation records** say what became of everything sent to a batch: accepted = held + forwarded
+ dropped. Each term is counted where it arises: accepted when a report is stored, held by counting
what the store holds now, forwarded from the bytes that were handed over, dropped by counting what
the store held in the transaction that ended the batch. So the equation can fail, and then shows a
fault. The coordinator sees every message, so it must not learn when single reports come. Of an open
batch it learns at most how many tenths are full (`for_coordinator`), a tenth being ten reports or
more, and a new value once in `REFRESH_SECONDS`. It learns refusals and latencies only when the
batch is full or over, and of small batches no latencies, which would be those of single uploads.

**The log** (`common.process.journal`) may never name a node, user, lease or slot: a log that says
who sent when would undo the shuffle for its reader.
"""

import math
from collections import Counter
from collections.abc import Mapping
from functools import partial

import prometheus_client as prometheus
from prometheus_client import CollectorRegistry
from sqlalchemy import Connection, func, select

from riffle.common.process.journal import Journal
from riffle.common.protocol.messages import Conservation, Latencies, LeaseReply, MessageFlow
from riffle.common.server.monitoring import LATENCY_BUCKETS, RequestMetrics
from riffle.shuffler.states import ORDER
from riffle.shuffler.store import transitions
from riffle.shuffler.store.committer import Store
from riffle.shuffler.store.schema import batches, dropped, latencies, reports

JOURNAL = Journal("shuffler", "batch_id", "state", "n", "reports", "messages", "batches")
note = JOURNAL.note


class ShufflerMetrics:
    """The registry of one shuffler process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = RequestMetrics(self.registry)
        counter = partial(prometheus.Counter, registry=self.registry)
        histogram = partial(prometheus.Histogram, buckets=LATENCY_BUCKETS, registry=self.registry)
        gauge = partial(prometheus.Gauge, registry=self.registry)
        self.frames = counter(
            "riffle_shuffler_frames", "frames of uploads, by outcome", ["outcome"]
        )
        self.leases = counter(
            "riffle_shuffler_leases", "slots asked for: granted, or why not", ["outcome"]
        )
        self.uploading = histogram(
            "riffle_shuffler_upload_seconds", "from an upload's head until it was durable"
        )
        self.opening = counter(
            "riffle_shuffler_opening_seconds", "processor time of opening outer seals"
        )
        self.shuffling = histogram(
            "riffle_shuffler_shuffle_seconds", "opening and permuting one batch"
        )
        self.shuffled = counter("riffle_shuffler_shuffled_messages", "messages permuted")
        self._batches = gauge("riffle_shuffler_batches", "batches in the store", ["state"])
        self._held = gauge("riffle_shuffler_reports_stored", "reports whose bytes are stored")
        self._discarded = gauge(
            "riffle_shuffler_reports_dropped",
            "accepted reports that were never handed over, by what ended their batch",
            ["reason"],
        )
        self._refused = gauge(
            "riffle_shuffler_frames_refused",
            "frames refused in all batches of the store",
            ["problem"],
        )
        self.inflight = gauge("riffle_shuffler_inflight_bytes", "bytes of uploads under way")
        self.waiting = gauge("riffle_shuffler_writes_waiting", "writes that wait for the store")
        self.free = gauge("riffle_shuffler_disk_free_bytes", "free space for the data")

    def count_leases(self, reply: LeaseReply) -> None:
        """Counts the answer to a lease request."""
        self.leases.labels("granted").inc(len(reply.leases))
        for problem, count in Counter(refusal.problem for refusal in reply.refused).items():
            self.leases.labels(problem).inc(count)

    def count_upload(self, outcomes: Mapping[str, int], seconds: float) -> None:
        """Counts the frames of an upload by outcome."""
        for outcome, count in outcomes.items():
            self.frames.labels(outcome).inc(count)
        self.uploading.observe(seconds)

    def measure_store(self, connection: Connection) -> None:
        """Sets the gauges of what the store holds."""
        c, d = batches.c, dropped.c
        states = select(c.state, func.count()).group_by(c.state)
        ended = select(c.ended_by, func.sum(c.discarded)).where(c.ended_by.is_not(None))
        refused = select(d.problem, func.sum(d.frames)).group_by(d.problem)
        counts = dict.fromkeys((*ORDER, "abandoned"), 0) | dict(connection.execute(states).all())
        for state, count in counts.items():
            self._batches.labels(state).set(count)
        for reason, count in connection.execute(ended.group_by(c.ended_by)):
            self._discarded.labels(reason).set(int(count))
        for problem, count in connection.execute(refused):
            self._refused.labels(problem).set(int(count))
        self._held.set(int(connection.scalar(select(func.sum(reports.c.held))) or 0))


SMALLEST_SHOWN = 100
"""Smallest n of a batch whose tenths and latencies the coordinator may see."""

REFRESH_SECONDS = 10
MAX_BATCHES = 1_024
FLUSH_SECONDS = 1.0
BUCKETS = 64
SHORTEST_SECONDS = 0.001


def bucket(seconds: float) -> int:
    """Returns the bucket of a latency: bucket k has latencies up to `edge` (k)."""
    if seconds <= SHORTEST_SECONDS:
        return 0
    return min(BUCKETS - 1, math.ceil(4 * math.log2(seconds / SHORTEST_SECONDS)))


def edge(index: int) -> float:
    """Returns a bucket's longest latency in seconds; the last one (55 s) has longer ones too."""
    return float(SHORTEST_SECONDS * 2 ** (index / 4))


def quantiles(buckets: Mapping[int, int]) -> Latencies | None:
    """Returns quantiles of a histogram, or None if it is empty."""
    total = sum(buckets.values())
    if total == 0:
        return None

    def quantile(share: float) -> float:
        cumulated = 0
        for index in sorted(buckets):
            cumulated += buckets[index]
            if cumulated >= share * total:
                break
        return edge(index)

    return Latencies(uploads=total, p50=quantile(0.5), p95=quantile(0.95), p99=quantile(0.99))


def conservation(connection: Connection, batch_id: str) -> Conservation:
    """Returns a batch's whole record, for the operator; raises RemoteError ``unknown-batch``."""
    batch = transitions.find(connection, batch_id)
    ended = select(batches.c.forwarded, batches.c.discarded, batches.c.ended_by)
    row = connection.execute(ended.where(batches.c.batch_id == batch_id)).one()
    held = (
        transitions.count_stored(connection, batch_id) if batch.state in ("open", "sealed") else 0
    )
    flow = MessageFlow(
        accepted=batch.reports * batch.L,
        held=held * batch.L,
        forwarded=row.forwarded,
        dropped=row.discarded * batch.L,
    )
    refused = connection.execute(select(dropped).where(dropped.c.batch_id == batch_id))
    uploads = connection.execute(select(latencies).where(latencies.c.batch_id == batch_id))
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
        rejected={row.problem: row.frames for row in refused},
        messages=flow,
        upload_seconds=quantiles({row.bucket: row.uploads for row in uploads}),
        balanced=flow.accepted == flow.held + flow.forwarded + flow.dropped,
    )


def for_coordinator(record: Conservation, *, show_fill: bool) -> Conservation:
    """Returns what the coordinator may know of a record; see the module's text."""
    large = record.n >= SMALLEST_SHOWN
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


class BatchStatistics:
    """Reads conservation records, and buffers the latencies of uploads.

    An upload's latency is known when its transaction is over, so it is written with a later upload
    (`take_due`) or before a record is read. A stop of the process loses the buffered latencies, as
    do more than `MAX_BATCHES` batches: these are statistics, never reports.
    """

    def __init__(self, store: Store, *, show_fill: bool) -> None:
        self._store = store
        self._show_fill = show_fill
        self._buffered: dict[str, Counter[int]] = {}
        self._written_at: dict[str, float] = {}
        self._shown: dict[str, tuple[object, Conservation]] = {}

    def add_upload(self, batch_id: str, seconds: float) -> None:
        """Buffers the latency of an upload."""
        if batch_id not in self._buffered and len(self._buffered) >= MAX_BATCHES:
            self._buffered.pop(next(iter(self._buffered)))  # the oldest: most likely it is over
        self._buffered.setdefault(batch_id, Counter())[bucket(seconds)] += 1

    def take_due(self, batch_id: str, clock: float) -> Counter[int]:
        """Returns latencies to write with an upload, at most once in `FLUSH_SECONDS`.

        ``clock`` is a monotonic time in seconds.
        """
        if clock - self._written_at.get(batch_id, -math.inf) < FLUSH_SECONDS:
            return Counter()
        if len(self._written_at) >= MAX_BATCHES:
            self._written_at.clear()
        self._written_at[batch_id] = clock
        return self._buffered.pop(batch_id, Counter())

    async def record(self, batch_id: str, now: int, *, whole: bool) -> Conservation:
        """Returns the `conservation` record at ``now``, or what the coordinator may see of it."""
        if buckets := self._buffered.pop(batch_id, None):
            await self._store.write(transitions.add_counts, latencies, batch_id, buckets)
        record = await self._store.read(conservation, batch_id)
        return record if whole else self._coarsen(record, now)

    def _coarsen(self, record: Conservation, now: int) -> Conservation:
        """Returns one answer for `REFRESH_SECONDS`, unless the state changed, which may show."""
        key = (record.state, now // REFRESH_SECONDS)
        shown = self._shown.pop(record.batch_id, None)
        if shown is None or shown[0] != key:
            shown = (key, for_coordinator(record, show_fill=self._show_fill))
        if len(self._shown) >= MAX_BATCHES:
            self._shown.pop(next(iter(self._shown)))
        self._shown[record.batch_id] = shown
        return shown[1]
