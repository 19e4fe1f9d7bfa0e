"""Counts the shuffler's work in metrics, records and a log, and decides who may see the counts.

**Metrics** for Prometheus show single uploads, so only the operator may read them. Counters and
histograms cover this process only. Gauges that are read from the store are the same at every
replica: take their maximum over replicas, not their sum.

**Conservation records** account for everything sent to a batch: accepted = held + forwarded +
dropped. Each term is counted separately, so the equation reveals a lost report. A report is
accepted once it is stored, and held until its hand-over. A batch without a hand-over drops its
reports.

The coordinator sees every message. The accountant does not cover who was slow, late or refused, so
the coordinator must not learn this. Its record (`for_coordinator`) of a full batch has only what
follows from state, n and L. If n is at least 100, its record of an open or abandoned batch shows
how many tenths of n have reported. This number of tenths changes at most once in
`REFRESH_SECONDS`.

**The log** has only the fields of `JOURNAL`, which name no node, user, lease or slot. A log of who
sent something when would undo the shuffle for anyone who reads the log.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeVar, get_args

import prometheus_client as prometheus
from prometheus_client import CollectorRegistry
from sqlalchemy import Connection, func, select

from riffle.common.process.journal import Journal
from riffle.common.protocol.wire import Conservation, LeaseReply, MessageFlow
from riffle.common.server.monitoring import LATENCY_BUCKETS, RequestMetrics, start_at_zero
from riffle.shuffler.rules import SMALLEST_SHOWN, Closed, Decision, Outcome
from riffle.shuffler.states import ORDER, TRANSITIONS
from riffle.shuffler.store import batch_rows
from riffle.shuffler.store.schema import batches, dropped, nodes, reports

JOURNAL = Journal(
    "shuffler",
    *("batch_id", "state", "n", "reports", "messages", "batches", "keys"),
    *("database", "listens_at"),
)
note = JOURNAL.note

M = TypeVar("M")


def _metric(
    kind: Callable[..., M], registry: CollectorRegistry, name: str, text: str, *labels: str
) -> M:
    return kind(f"riffle_shuffler_{name}", text, labels, registry=registry)


class ShufflerMetrics:
    """The metrics of one shuffler process. The registry ``of_store`` has the store's gauges."""

    def __init__(self) -> None:
        self.registry, self.of_store = CollectorRegistry(), CollectorRegistry()
        self.requests = RequestMetrics(self.registry)
        counter = partial(_metric, prometheus.Counter, self.registry)
        gauge = partial(_metric, prometheus.Gauge, self.registry)
        stored = partial(_metric, prometheus.Gauge, self.of_store)
        histogram = partial(
            _metric, partial(prometheus.Histogram, buckets=LATENCY_BUCKETS), self.registry
        )
        self.frames = counter("frames", "frames of uploads, by outcome", "outcome")
        self.leases = counter("leases", "slots asked for: granted, or why not", "outcome")
        self.uploading = histogram("upload_seconds", "from an upload's head until it was durable")
        self.opening = counter("opening_seconds", "processor time of opening outer seals")
        self.shuffling = histogram("shuffle_seconds", "opening and permuting one batch")
        self.shuffled = counter("shuffled_messages", "messages permuted")
        self._batches = stored("batches", "batches in the store", "state")
        self._held = stored("reports_stored", "reports whose bytes are stored")
        self._discarded = stored(
            "reports_dropped",
            "accepted reports that were never handed over, by what ended their batch",
            "reason",
        )
        self._refused = stored(
            "frames_refused", "frames refused in all batches of the store", "problem"
        )
        self._failed = stored("messages_failed", "messages that coordinators named as failed")
        self._blamed = stored("nodes_failed", "nodes that sent some of these")
        self._nodes = stored("nodes", "nodes that are enrolled and not revoked")
        self._users_left = stored("users_left", "users whom these nodes may still name")
        self.inflight = gauge("inflight_bytes", "bytes of uploads under way")
        self.waiting = gauge("writes_waiting", "writes that wait for the store")
        self.free = gauge("disk_free_bytes", "free space for the data folder, not for PostgreSQL")
        outcomes = {*get_args(Outcome), "wrong-size"}
        start_at_zero(self.frames, outcomes)
        start_at_zero(self._refused, outcomes - {"accepted"})
        decisions = {"granted", *get_args(Closed), *get_args(Decision)}
        start_at_zero(self.leases, decisions - {"grant"})

    def count_leases(self, reply: LeaseReply) -> None:
        """Counts the leases and refusals in the answer to a lease request."""
        self.leases.labels("granted").inc(len(reply.leases))
        for refusal in reply.refused:
            self.leases.labels(refusal.problem).inc()

    def count_upload(self, outcomes: Mapping[str, int], seconds: float) -> None:
        """Counts the frames of an upload by outcome."""
        for outcome, count in outcomes.items():
            self.frames.labels(outcome).inc(count)
        self.uploading.observe(seconds)

    def measure_store(self, connection: Connection) -> None:
        """Sets the gauges that describe the store."""
        c, d = batches.c, dropped.c
        states = select(c.state, func.count()).group_by(c.state)
        ended = select(c.ended_by, func.sum(c.discarded)).where(c.ended_by.is_not(None))
        refused = select(d.problem, func.sum(d.frames)).group_by(d.problem)
        reasons = {event for (_, event), state in TRANSITIONS.items() if state == "abandoned"}
        for gauge, query, labels in (
            (self._batches, states, (*ORDER, "abandoned")),
            (self._discarded, ended.group_by(c.ended_by), reasons),
            (self._refused, refused, ()),
        ):
            counts = dict.fromkeys(labels, 0) | dict(connection.execute(query).all())
            for label, count in counts.items():
                gauge.labels(label).set(int(count))
        failed = nodes.c.failed_messages
        total, blamed = connection.execute(
            select(func.sum(failed), func.count()).where(failed > 0)
        ).one()
        self._failed.set(int(total or 0))
        self._blamed.set(blamed)
        left = select(func.count(), func.sum(nodes.c.quota - nodes.c.users))
        valid, users = connection.execute(left.where(nodes.c.revoked_at.is_(None))).one()
        self._nodes.set(valid)
        self._users_left.set(int(users or 0))
        self._held.set(int(connection.scalar(select(func.sum(reports.c.held))) or 0))


SHORT = ("open", "abandoned")
"""States in which n does not determine the counts of a batch."""

REFRESH_SECONDS = 10
MAX_RECORDS = 1_024


def conservation(connection: Connection, batch_id: str) -> Conservation:
    """Returns the operator's record of a batch's messages; raises RemoteError ``unknown-batch``."""
    batch = batch_rows.find(connection, batch_id)
    ended = select(batches.c.forwarded, batches.c.discarded, batches.c.ended_by)
    row = connection.execute(ended.where(batches.c.batch_id == batch_id)).one()
    held = batch_rows.count_stored(connection, batch_id) if batch.state in ("open", "sealed") else 0
    flow = MessageFlow(
        accepted=batch.reports * batch.L,
        held=held * batch.L,
        forwarded=row.forwarded,
        dropped=row.discarded * batch.L,
    )
    refused = connection.execute(select(dropped).where(dropped.c.batch_id == batch_id))
    return Conservation(
        batch_id=batch_id,
        state=batch.state,
        n=batch.n,
        messages_a_report=batch.L,
        fill_tenths=10 * batch.reports // batch.n if batch.state in SHORT else None,
        accepted=batch.reports,
        held=held,
        forwarded=row.forwarded // batch.L,
        dropped={row.ended_by: row.discarded} if row.ended_by else {},
        rejected={row.problem: row.frames for row in refused},
        messages=flow,
        balanced=flow.accepted == flow.held + flow.forwarded + flow.dropped,
    )


def for_coordinator(record: Conservation, *, show_fill: bool) -> Conservation:
    """Returns what the coordinator may see. ``fill_tenths`` is None if ``show_fill`` is false."""
    if record.state not in SHORT:
        return record.model_copy(update={"rejected": None})
    return Conservation(
        batch_id=record.batch_id,
        state=record.state,
        n=record.n,
        messages_a_report=record.messages_a_report,
        fill_tenths=record.fill_tenths if show_fill and record.n >= SMALLEST_SHOWN else None,
        balanced=record.balanced,
    )
