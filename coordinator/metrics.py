"""What the coordinator tells Prometheus. It knows of batches and sums only, and tells no more.

Counters and histograms are this process's. Gauges read from the store (``census``) are the same at
every replica: take their maximum, not their sum. No label is a run, a batch or anything smaller.

What the coordinator logs; how: `common.process.journal`. It knows no user, lease or node to name.

``detail`` is a sentence of Riffle's own errors about a run, the one that ``trouble`` shows, or the
learner's why it cannot go on, which knows private counts only.
"""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from riffle.common.process.journal import Journal
from riffle.common.server.monitoring import LATENCY_BUCKETS, RequestMetrics
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


class CoordinatorMetrics:
    """The registry of one coordinator process."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = RequestMetrics(registry)
        self.steps = Histogram(
            "riffle_coordinator_step_seconds",
            "parts of a batch's way: waiting, fetching, opening, planning, storing, acknowledging",
            ("step",),
            buckets=(*LATENCY_BUCKETS, 300.0, 1_800.0, 7_200.0),
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


JOURNAL = Journal("coordinator", "run_id", "deployment", "problem", "detail")
note = JOURNAL.note
