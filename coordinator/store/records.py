"""What the store keeps, as values: rows in, rows out."""

import json
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from sqlalchemy import Connection, Row, case, func, select

from riffle.common.mechanism.counters import Ints
from riffle.common.protocol.descriptor import BatchDescriptor, parse
from riffle.common.protocol.errors import LocalError
from riffle.coordinator.batches.counts import ValueEstimate
from riffle.coordinator.batches.issue import Issue
from riffle.coordinator.batches.ledger import Spend
from riffle.coordinator.learning.learner import Deployment, LearnerSummary, Purpose, StageResult
from riffle.coordinator.metrics import Census
from riffle.coordinator.specs import RunSpec
from riffle.coordinator.states import DeploymentState, RunState
from riffle.coordinator.store import schema

Timings = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A run. ``message`` says why it ended, when it did not simply finish."""

    id: str
    spec: RunSpec
    state: RunState
    message: str
    created_at: float
    ended_at: float | None
    summary: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class DeploymentRecord:
    """A deployment as issued, with where it stands; ``data`` are the descriptor's bytes."""

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
    episodes_executed: int
    issued_at: float
    opened_at: float | None
    settled_at: float | None
    timings: Timings

    @property
    def descriptor(self) -> BatchDescriptor:
        """The descriptor, parsed from its stored bytes."""
        return parse(self.data).descriptor

    @property
    def executed(self) -> int:
        """Episodes executed for it, at most: what regret, result and K count."""
        return executed(self.state, self.n, self.episodes_executed)

    @property
    def deployment(self) -> Deployment:
        """What the learner asked for."""
        mixture = self.descriptor.mixture
        return Deployment(self.stage, self.purpose, mixture, self.n, self.layer)


def executed(state: DeploymentState, n: int, reported: int) -> int:
    """Episodes executed for a deployment, at most; ``reported`` is the shuffler's count."""
    full = state in ("sealed", "counted", "rejected")
    return max(reported, n if full else 0)


@dataclass(frozen=True, slots=True)
class Tally:
    """How many deployments a run has, and how many episodes were counted."""

    deployments: int = 0
    episodes: int = 0


@dataclass(frozen=True, slots=True)
class LedgerRecord:
    """What a batch that was opened spent."""

    index: int
    spend: Spend
    messages: int
    opened: int
    failed: int
    recorded_at: float


@dataclass(frozen=True, slots=True)
class EventRecord:
    """Something that happened in a run."""

    id: int
    kind: str
    at: float
    data: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Released:
    """What came of a batch's messages: counts with all their noise, and conservation's numbers."""

    histogram: Ints
    opened: int
    failed: int
    messages_sha256: str


@dataclass(frozen=True, slots=True)
class Settlement:
    """All that one opened batch changes; the store commits it as one transaction.

    ``following`` is the next deployment (or the same one again, after a rejected batch); without
    it ``failure`` tells why the run cannot go on, ``finished`` that it is over. With none of them
    the run waits (manual mode) or was over before.
    """

    index: int
    spend: Spend
    released: Released
    timings: Timings
    stage: StageResult | None = None
    summary: LearnerSummary | None = None
    following: Issue | None = None
    finished: bool = False
    failure: str | None = None
    estimate: ValueEstimate | None = None

    @property
    def state(self) -> DeploymentState:
        """What becomes of the deployment."""
        return "counted" if self.spend.within_promise else "rejected"

    @property
    def goes_on(self) -> bool:
        """Whether the run's state or next deployment depends on it; not so once a run is over."""
        return self.following is not None or self.finished or self.failure is not None


def run_record(row: Row[Any]) -> RunRecord:
    """A row of the table of runs."""
    summary = None if row.summary is None else json.loads(row.summary)
    spec = RunSpec.model_validate_json(row.spec)
    return RunRecord(row.id, spec, row.state, row.message, row.created_at, row.ended_at, summary)


def deployment_record(row: Row[Any]) -> DeploymentRecord:
    """A row of the table of deployments."""
    values = dict(row._mapping)
    values["data"] = values.pop("descriptor")
    values["timings"] = json.loads(values["timings"])
    return DeploymentRecord(**values)


def ledger_record(row: Row[Any]) -> LedgerRecord:
    """A row of the ledger."""
    spend = Spend(row.epsilon_lower, row.epsilon_upper, row.beta, row.dishonest, row.within_promise)
    # `index` is also a method of tuples, and so of rows.
    index = cast("int", row._mapping["index"])
    return LedgerRecord(index, spend, row.messages, row.opened, row.failed, row.recorded_at)


HISTOGRAM_ITEM_BYTES = 8


def pack(histogram: Ints) -> bytes:
    """A histogram as bytes: little-endian 64-bit integers."""
    return histogram.astype("<i8").tobytes()


def unpack(data: bytes) -> Ints:
    """The histogram of `pack`.

    Raises:
        LocalError: ``unavailable``: the store is damaged.
    """
    if len(data) % HISTOGRAM_ITEM_BYTES:
        raise LocalError(
            "unavailable", f"the store is damaged: a histogram of {len(data)} bytes; restore a copy"
        )
    return np.frombuffer(data, dtype="<i8").astype(np.int64)


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
        runs=Counter({row[0]: row[1] for row in connection.execute(runs)}),
        batches=Counter({row[0]: row[1] for row in connection.execute(rows)}),
        opened=int(spent.opened or 0),
        failed=int(spent.failed or 0),
        epsilon=spent.epsilon or 0.0,
        seeded=spent.seeded,
    )
