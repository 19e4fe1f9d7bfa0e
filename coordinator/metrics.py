"""The coordinator's metrics and journal. They show batches and sums, never single reports.

Gauges of runs, batches, messages and epsilon are read from the store (`Census`), so they are equal
on all replicas: do not add them up. No label names a run or a batch.

The journal names no user, no lease of a slot and no node. The journal's field ``detail`` is one
sentence about a run: the text of a Riffle error, or a learner's reason why it cannot go on. A
learner knows only private counts, so its reason tells nothing about single users.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from riffle.common.process.journal import Journal
from riffle.common.protocol.errors import PROBLEMS
from riffle.common.server.monitoring import LATENCY_BUCKETS, RequestMetrics, start_at_zero
from riffle.coordinator.states import DeploymentState, RunState


@dataclass(frozen=True, slots=True)
class Census:
    """Runs and batches by state, numbers of messages, and the largest finite epsilon spent.

    ``waiting`` counts runs that cannot go on now. ``opened`` and ``failed`` count messages.
    ``seeded`` counts batches with an infinite epsilon. ``suspicious`` counts suspicious batches.
    """

    runs: Mapping[str, int]
    waiting: int
    batches: Mapping[str, int]
    opened: int
    failed: int
    epsilon: float
    seeded: int
    suspicious: int


SUMS = {
    "waiting": ("runs_waiting", "runs that cannot go on at the moment"),
    "opened": ("messages_opened", "messages opened, all batches"),
    "failed": ("messages_failed", "messages that did not open"),
    "epsilon": ("epsilon_spent", "largest epsilon that any user's batch spent"),
    "seeded": ("seeded_batches", "batches without privacy: the test entry"),
    "suspicious": ("suspicious_batches", "batches whose counts honest reports hardly give"),
}
"""Name and help text of the gauge for each field of `Census` that is a single number."""


class CoordinatorMetrics:
    """The metrics of one coordinator process. The registry ``of_store`` has the store's gauges."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.of_store = stored = CollectorRegistry()
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
            "steps of runs that failed; log lines run-waits and run-failed say what failed",
            ("problem",),
            registry=registry,
        )
        start_at_zero(self.trouble, PROBLEMS)
        self._runs = _gauge(stored, "runs", "runs in the store", "state")
        self._batches = _gauge(stored, "batches", "batches in the store", "state")
        self._sums = {field: _gauge(stored, *about) for field, about in SUMS.items()}
        self.free = _gauge(
            registry, "disk_free_bytes", "free space for the data folder, not for PostgreSQL"
        )

    def observe(self, timings: Mapping[str, float]) -> None:
        """Records how many seconds each step of a batch took."""
        for step, seconds in timings.items():
            self.steps.labels(step).observe(seconds)

    def show(self, census: Census) -> None:
        """Sets the store's gauges."""
        for run_state in get_args(RunState):
            self._runs.labels(run_state).set(census.runs.get(run_state, 0))
        for state in get_args(DeploymentState):
            self._batches.labels(state).set(census.batches.get(state, 0))
        for field, gauge in self._sums.items():
            gauge.set(getattr(census, field))


def _gauge(registry: CollectorRegistry, name: str, text: str, *labels: str) -> Gauge:
    return Gauge(f"riffle_coordinator_{name}", text, labels, registry=registry)


JOURNAL = Journal(
    "coordinator",
    *("run_id", "deployment", "batch_id", "problem", "detail"),
    *("n", "messages", "failed", "runs", "database", "listens_at"),
)
note = JOURNAL.note
