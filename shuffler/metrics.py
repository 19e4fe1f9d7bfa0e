"""What the shuffler tells Prometheus. Who reads it sees single uploads: the operator, nobody else.

Counters and histograms are this process's. Gauges that are read from the store (``census``) are the
same at every replica: take their maximum, not their sum. No label is a node, a user or a batch.

What the shuffler logs; how: `common.process.journal`.

Node, user, lease and slot are not on the list and never will be: a log that says who sent when
undoes the shuffle for whoever reads it.
"""

import shutil
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import prometheus_client as prometheus
from prometheus_client import CollectorRegistry, Gauge, Histogram
from sqlalchemy import Connection, func, select

from riffle.common.process.journal import Journal
from riffle.common.protocol.messages import LeaseReply
from riffle.common.server.monitoring import LATENCY_BUCKETS, RequestMetrics
from riffle.shuffler.states import ORDER
from riffle.shuffler.store.schema import batches, dropped, reports


@dataclass(frozen=True, slots=True)
class Census:
    """What the store holds: batches by state, reports held, reports dropped and frames refused."""

    batches: dict[str, int]
    held: int
    discarded: dict[str, int]
    refused: dict[str, int]


def census(connection: Connection) -> Census:
    """Count what the store holds."""
    states = select(batches.c.state, func.count()).group_by(batches.c.state)
    ended = (
        select(batches.c.ended_by, func.sum(batches.c.discarded))
        .where(batches.c.ended_by.is_not(None))
        .group_by(batches.c.ended_by)
    )
    refused = select(dropped.c.problem, func.sum(dropped.c.frames)).group_by(dropped.c.problem)
    return Census(
        batches={row[0]: row[1] for row in connection.execute(states)},
        held=int(connection.scalar(select(func.sum(reports.c.held))) or 0),
        discarded={row[0]: int(row[1]) for row in connection.execute(ended)},
        refused={row[0]: int(row[1]) for row in connection.execute(refused)},
    )


class ShufflerMetrics:
    """The registry of one shuffler process."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = RequestMetrics(registry)
        self.frames = prometheus.Counter(
            "riffle_shuffler_frames",
            "frames of uploads, by what became of them",
            ("outcome",),
            registry=registry,
        )
        self.leases = prometheus.Counter(
            "riffle_shuffler_leases",
            "slots asked for: granted, or why not",
            ("outcome",),
            registry=registry,
        )
        self.uploading = Histogram(
            "riffle_shuffler_upload_seconds",
            "from an upload's head until it was durable",
            buckets=LATENCY_BUCKETS,
            registry=registry,
        )
        self.opening = prometheus.Counter(
            "riffle_shuffler_opening_seconds",
            "processor time of opening outer seals",
            registry=registry,
        )
        self.shuffling = Histogram(
            "riffle_shuffler_shuffle_seconds",
            "opening and permuting one batch",
            buckets=LATENCY_BUCKETS,
            registry=registry,
        )
        self.shuffled = prometheus.Counter(
            "riffle_shuffler_shuffled_messages", "messages permuted", registry=registry
        )
        self._batches = Gauge(
            "riffle_shuffler_batches", "batches in the store", ("state",), registry=registry
        )
        self._held = Gauge(
            "riffle_shuffler_reports_stored", "reports whose bytes are stored", registry=registry
        )
        self._discarded = Gauge(
            "riffle_shuffler_reports_dropped",
            "accepted reports that were never handed over, by what ended their batch",
            ("reason",),
            registry=registry,
        )
        self._refused = Gauge(
            "riffle_shuffler_frames_refused",
            "frames refused in all batches of the store",
            ("problem",),
            registry=registry,
        )
        self._inflight = Gauge(
            "riffle_shuffler_inflight_bytes", "uploads on their way", registry=registry
        )
        self._waiting = Gauge(
            "riffle_shuffler_writes_waiting", "writes that wait for the store", registry=registry
        )
        self._free = Gauge(
            "riffle_shuffler_disk_free_bytes", "free space for the data", registry=registry
        )

    def leased(self, reply: LeaseReply) -> None:
        """Note a lease request."""
        self.leases.labels("granted").inc(len(reply.leases))
        for problem, count in Counter(refusal.problem for refusal in reply.refused).items():
            self.leases.labels(problem).inc(count)

    def uploaded(self, outcomes: Mapping[str, int], seconds: float) -> None:
        """Note an upload that was decided: its frames by outcome."""
        for outcome, count in outcomes.items():
            self.frames.labels(outcome).inc(count)
        self.uploading.observe(seconds)

    def show(
        self, found: Census, *, inflight_bytes: int, writes_waiting: int, data_dir: Path
    ) -> None:
        """Set the gauges."""
        for state in (*ORDER, "abandoned"):
            self._batches.labels(state).set(found.batches.get(state, 0))
        for reason, count in found.discarded.items():
            self._discarded.labels(reason).set(count)
        for problem, count in found.refused.items():
            self._refused.labels(problem).set(count)
        self._held.set(found.held)
        self._inflight.set(inflight_bytes)
        self._waiting.set(writes_waiting)
        self._free.set(shutil.disk_usage(data_dir).free)


JOURNAL = Journal("shuffler", "batch_id", "state", "n", "reports", "messages", "batches")
note = JOURNAL.note
