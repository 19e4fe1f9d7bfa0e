"""What the coordinator tells Prometheus. It knows of batches and sums only, and tells no more.

Counters and histograms are this process's. Gauges read from the store (``census``) are the same at
every replica: take their maximum, not their sum. No label is a run, a batch or anything smaller.
"""

import shutil
import sys
from collections import Counter as Tally
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from sqlalchemy import Connection, case, func, select

from riffle.common.metrics import SECONDS, RequestMetrics
from riffle.coordinator import schema
from riffle.coordinator.states import DEPLOYMENT, RUN


@dataclass(frozen=True, slots=True)
class Census:
    """What the store holds: runs and batches by state, messages, and the largest epsilon spent.

    ``seeded`` batches are the test entry's, whose epsilon has no bound.
    """

    runs: Mapping[str, int]
    batches: Mapping[str, int]
    opened: int
    failed: int
    epsilon: float
    seeded: int


_LEDGER = schema.ledger.c
_FINITE = _LEDGER.epsilon_upper <= sys.float_info.max
_SPENT = select(
    func.sum(_LEDGER.opened).label("opened"),
    func.sum(_LEDGER.failed).label("failed"),
    func.max(case((_FINITE, _LEDGER.epsilon_upper))).label("epsilon"),
    func.count(case((~_FINITE, 1))).label("seeded"),
)


def census(connection: Connection) -> Census:
    """Count what the store holds."""
    runs = select(schema.runs.c.state, func.count()).group_by(schema.runs.c.state)
    rows = select(schema.deployments.c.state, func.count()).group_by(schema.deployments.c.state)
    spent = connection.execute(_SPENT).one()
    return Census(
        runs=Tally({row[0]: row[1] for row in connection.execute(runs)}),
        batches=Tally({row[0]: row[1] for row in connection.execute(rows)}),
        opened=int(spent.opened or 0),
        failed=int(spent.failed or 0),
        epsilon=spent.epsilon or 0.0,
        seeded=spent.seeded,
    )


class CoordinatorMetrics:
    """The registry of one coordinator process."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = RequestMetrics(registry)
        self.steps = Histogram(
            "riffle_coordinator_step_seconds",
            "parts of a batch's way: waiting, fetching, opening, planning, storing, acknowledging",
            ("step",),
            buckets=(*SECONDS, 300.0, 1_800.0, 7_200.0),
            registry=registry,
        )
        self.trouble = Counter(
            "riffle_coordinator_steps_failed",
            "steps of runs that failed and are tried again, or ended their run",
            ("problem",),
            registry=registry,
        )
        self._runs = _gauge(registry, "runs", "runs in the store", "state")
        self._batches = _gauge(registry, "batches", "batches in the store", "state")
        self._opened = _gauge(registry, "messages_opened", "messages opened, all batches")
        self._failed = _gauge(registry, "messages_failed", "messages that did not open")
        self._epsilon = _gauge(
            registry, "epsilon_spent", "largest epsilon that any user's batch spent"
        )
        self._seeded = _gauge(registry, "seeded_batches", "batches without privacy: the test entry")
        self._free = _gauge(registry, "disk_free_bytes", "free space for the data")

    def took(self, timings: Mapping[str, float]) -> None:
        """Note the parts of a batch's way, in seconds."""
        for step, seconds in timings.items():
            self.steps.labels(step).observe(seconds)

    def show(self, found: Census, data_dir: Path) -> None:
        """Set the gauges."""
        for run_state in RUN:
            self._runs.labels(run_state).set(found.runs.get(run_state, 0))
        for state in DEPLOYMENT:
            self._batches.labels(state).set(found.batches.get(state, 0))
        self._opened.set(found.opened)
        self._failed.set(found.failed)
        self._epsilon.set(found.epsilon)
        self._seeded.set(found.seeded)
        self._free.set(shutil.disk_usage(data_dir).free)


def _gauge(registry: CollectorRegistry, name: str, text: str, *labels: str) -> Gauge:
    return Gauge(f"riffle_coordinator_{name}", text, labels, registry=registry)
