"""Records: the store's rows as values, and the functions that make them from rows."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from riffle.common.mechanism.counters import Ints
from riffle.common.protocol.descriptor import BatchDescriptor, parse
from riffle.common.protocol.errors import LocalError
from riffle.coordinator.batches.analyzer import OpenedBatch
from riffle.coordinator.batches.counts import CountCheck, ValueEstimate
from riffle.coordinator.batches.issue import Issue
from riffle.coordinator.batches.ledger import Spend
from riffle.coordinator.learning.learner import Deployment, LearnerSummary, Purpose, StageResult
from riffle.coordinator.specs import RunSpec
from riffle.coordinator.states import DeploymentEvent, DeploymentState, RunState

if TYPE_CHECKING:  # commands print records and need no SQLAlchemy
    from sqlalchemy import Row

Timings = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Replica:
    """A replica's name, and the seconds after which its run leases expire if not renewed."""

    name: str
    lease_seconds: float


@dataclass(frozen=True, slots=True)
class RunLease:
    """The right to drive a run. The lease is lost once the store has another fence for the run."""

    run_id: str
    fence: int


class LeaseLostError(LocalError):
    """Raised if another replica drives the run."""

    def __init__(self, run_id: str) -> None:
        super().__init__("wrong-state", f"run {run_id} is driven by another replica now")


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A run. ``message``: why it failed, or "". ``trouble``: why it cannot go on now, or ""."""

    id: str
    spec: RunSpec
    state: RunState
    message: str
    created_at: float
    ended_at: float | None
    summary: dict[str, Any] | None
    trouble: str


@dataclass(frozen=True, slots=True)
class DeploymentRecord:
    """A deployment as issued, and its progress; ``data`` holds the descriptor's bytes.

    ``named`` has the positions of failed messages. It is filled when the batch is settled, and
    emptied when the batch is acknowledged.
    """

    run_id: str
    index: int
    step: int
    stage: int
    purpose: Purpose
    n: int
    layer: int | None
    batch_id: str
    data: bytes
    state: DeploymentState
    acknowledged: bool
    messages_sha256: str | None
    named: tuple[int, ...]
    episodes_executed: int
    issued_at: float
    opened_at: float | None
    settled_at: float | None
    timings: Timings

    @property
    def descriptor(self) -> BatchDescriptor:
        """The descriptor, parsed from its bytes."""
        return parse(self.data).descriptor

    @property
    def executed(self) -> int:
        """An upper bound on the episodes executed. Regret, results and the limit K use it."""
        return executed_at_most(self.state, self.n, self.episodes_executed)

    @property
    def deployment(self) -> Deployment:
        """The deployment as the learner asked for it."""
        mixture = self.descriptor.mixture
        return Deployment(self.stage, self.purpose, mixture, self.n, self.layer)


def executed_at_most(state: DeploymentState, n: int, reported: int) -> int:
    """Returns an upper bound on a deployment's episodes. ``reported`` counts reports."""
    full = state in ("sealed", "counted", "rejected")
    return max(reported, n if full else 0)


@dataclass(frozen=True, slots=True)
class Tally:
    """The numbers of a run's deployments, counted episodes and suspicious batches."""

    deployments: int = 0
    episodes: int = 0
    suspicious_batches: int = 0


@dataclass(frozen=True, slots=True)
class LedgerRecord:
    """An opened batch's entry in the ledger. ``check`` is None if its counts were not tested."""

    index: int
    spend: Spend
    messages: int
    opened: int
    failed: int
    recorded_at: float
    check: CountCheck | None = None


@dataclass(frozen=True, slots=True)
class EventRecord:
    """Something that happened in a run. ``data`` is the event's data in the stream of events."""

    id: int
    kind: str
    at: float
    data: dict[str, Any]


@dataclass(frozen=True, slots=True)
class NextStep:
    """The next step of a run after a batch: another deployment, a failure, or the end.

    If none of these is set, the run waits for a deployment (manual mode) or is over.
    """

    issue: Issue | None = None
    failure: str | None = None
    finished: bool = False


@dataclass(frozen=True, slots=True)
class Settlement:
    """Everything that an opened batch changes. The store commits it as one transaction."""

    index: int
    spend: Spend
    opened: OpenedBatch
    timings: Timings
    check: CountCheck | None = None
    stage: StageResult | None = None
    summary: LearnerSummary | None = None
    estimate: ValueEstimate | None = None
    next: NextStep = field(default_factory=NextStep)

    @property
    def event(self) -> DeploymentEvent:
        """The deployment's event: ``count`` if its counts may be used, ``reject`` otherwise."""
        return "count" if self.spend.within_promise else "reject"


def run_record(row: "Row[Any]") -> RunRecord:
    """Reads a row of the table of runs."""
    values = dict(row._mapping)
    values["summary"] = None if row.summary is None else json.loads(row.summary)
    values["spec"] = RunSpec.model_validate_json(row.spec)
    return RunRecord(**values)


def deployment_record(row: "Row[Any]") -> DeploymentRecord:
    """Reads a row of the table of deployments."""
    values = dict(row._mapping)
    values["data"] = values.pop("descriptor")
    values["timings"] = json.loads(values["timings"])
    values["named"] = tuple(json.loads(values["named"] or "[]"))
    return DeploymentRecord(**values)


def ledger_record(row: "Row[Any]") -> LedgerRecord:
    """Reads a row of the ledger."""
    spend = Spend(row.epsilon_lower, row.epsilon_upper, row.beta, row.dishonest, row.within_promise)
    # `index` is also a method of tuples, and so of rows.
    index = cast("int", row._mapping["index"])
    check = None if row.test is None else CountCheck(row.test, row.deviation, row.chance)
    return LedgerRecord(index, spend, row.messages, row.opened, row.failed, row.recorded_at, check)


HISTOGRAM_ITEM_BYTES = 8


def pack(histogram: Ints) -> bytes:
    """Packs a histogram into bytes: little-endian 64-bit integers."""
    return histogram.astype("<i8").tobytes()


def unpack(data: bytes) -> Ints:
    """Reads the histogram that `pack` wrote.

    Raises LocalError ``unavailable`` if the store is damaged.
    """
    if len(data) % HISTOGRAM_ITEM_BYTES:
        raise LocalError(
            "unavailable", f"the store is damaged: a histogram of {len(data)} bytes; restore a copy"
        )
    return np.frombuffer(data, dtype="<i8").astype(np.int64)
