"""A store with many long runs in it, written row by row: what a coordinator has after a year.

Only the page's load is of interest: every deployment shares one real descriptor's bytes.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import chain
from types import MappingProxyType
from typing import Any

import numpy as np
from sqlalchemy import Table, insert

from riffle.common.mechanism.policy import Mixture
from riffle.common.protocol.descriptor import parse
from riffle.coordinator.batches.counts import CountCheck
from riffle.coordinator.batches.issue import Issuer
from riffle.coordinator.learners.registry import problem
from riffle.coordinator.learning.learner import Deployment
from riffle.coordinator.specs import RunSpec
from riffle.coordinator.store import schema

EPOCH = 1_750_000_000.0
STAGE = 25
SINGLE = 11  # the stage after which one policy is left
LONGEST = 10_000
LAST_EVENT = 1_000_000
"""Number of the event that ends a seeded run."""
Rows = list[dict[str, Any]]

SPEC: dict[str, Any] = {
    "environment": "RiverSwim-v0",
    "states": 4,
    "actions": 2,
    "horizon": 6,
    "epsilon": 1.0,
    "beta": 1e-5,
}


def seeded_id(run: int, name: str = "nightly") -> str:
    """The id of seeded run number ``run`` of this name."""
    return hashlib.sha256(f"{name} {run}".encode()).hexdigest()[:32]


def seed(
    url: str,
    runs: int,
    deployments: int,
    n: int = 1000,
    *,
    name: str = "nightly",
    enumerated: bool = True,
    checks: Mapping[int, CountCheck] = MappingProxyType({}),
) -> None:
    """Write ``runs`` finished runs of one spec, each of so many deployments of n episodes.

    ``checks`` has what the check of its counts found, by deployment.
    """
    engine = schema.open_store(url)
    spec = RunSpec.model_validate({**SPEC, "name": name, "episodes": n * deployments})
    data = descriptor(spec, n)
    with engine.begin() as connection:
        for run in range(runs):
            one = Seeded(spec, run, deployments, n, data, enumerated=enumerated, checks=checks)
            for table, rows in one.tables():
                connection.execute(insert(table), rows)
            over = {"run_id": one.id, "kind": "run_finished", "at": one.start, "data": "{}"}
            connection.execute(insert(schema.events), {"id": LAST_EVENT, **over})
    engine.dispose()


def descriptor(spec: RunSpec, n: int) -> bytes:
    """Bytes of a real descriptor of n reports."""
    policy = np.ones((spec.horizon, spec.states), dtype=np.int64)
    deployment = Deployment(1, "fine", Mixture.single(policy), n, None)
    issuer = Issuer("shuffler", lambda: "0" * 64, lambda: EPOCH)
    made = issuer.issue("0" * 32, spec, deployment, index=0, step=0)
    assert spec.episodes == problem(spec).K
    return made.data


class Seeded:
    """One seeded run."""

    def __init__(
        self,
        spec: RunSpec,
        run: int,
        deployments: int,
        n: int,
        data: bytes,
        *,
        enumerated: bool,
        checks: Mapping[int, CountCheck] = MappingProxyType({}),
    ) -> None:
        self.checks = checks
        self.id, self.spec, self.n, self.data = seeded_id(run, spec.name), spec, n, data
        self.enumerated = enumerated
        self.messages = parse(data).descriptor.padding.messages
        self.deployments, self.start = deployments, EPOCH + 86_400 * run
        self.noise = np.random.default_rng(run).normal(size=LONGEST)
        self.values = 0.47 - 0.4 * np.exp(-np.arange(LONGEST) / (60 + 5 * run))

    def tables(self) -> Iterator[tuple[Table, Rows]]:
        """Rows in the order that foreign keys ask for."""
        last = self.deployments // STAGE
        active = self._stage(last)["active_after"] if last else None
        summary = {
            "policy": self._policy(last),
            "value_estimate": 0.47,
            "radius": self._stage(last)["radius"] if last else None,
            "active": active,
            "stage": last,
        }
        end = self.start + 60 * self.deployments
        run = {"id": self.id, "spec": self.spec.model_dump_json(), "state": "finished"}
        times = {"message": "", "trouble": "", "created_at": self.start, "ended_at": end}
        yield schema.runs, [run | times | {"summary": json.dumps(summary)}]
        yield from self.grown(range(self.deployments))

    def grown(self, every: range, last: int = 0) -> Iterator[tuple[Table, Rows]]:
        """Rows of some deployments; their events have numbers above ``last``."""
        yield schema.deployments, [self._deployment(i) for i in every]
        yield schema.ledger, [self._spend(i) for i in every]
        yield (
            schema.true_values,
            [
                {"run_id": self.id, "index": i, "optimal": 0.475791, "value": float(self.values[i])}
                for i in every
            ],
        )
        events = list(chain.from_iterable(self._events(i) for i in every))
        yield (
            schema.events,
            [
                {"run_id": self.id, "id": number, **event}
                for number, event in enumerate(events, last + 1)
            ],
        )

    def _policy(self, stage: int) -> list[list[int]]:
        stage = min(stage, SINGLE) if self.enumerated else stage
        return [[int((h + x + stage) % 3 > 0) for x in range(4)] for h in range(6)]

    def _deployment(self, i: int) -> dict[str, Any]:
        at = self.start + 60 * i
        return {
            "run_id": self.id,
            "index": i,
            "step": i,
            "stage": 1 + i // STAGE,
            "purpose": "fine",
            "n": self.n,
            "layer": None,
            "batch_id": self.id[:16] + f"{i:016x}",
            "descriptor": self.data,
            "state": "counted",
            "acknowledged": True,
            "episodes_executed": self.n,
            "issued_at": at,
            "opened_at": at + 1,
            "settled_at": at + 50,
            "timings": json.dumps({"waiting": 45.0, "opening": 4.0}),
        }

    def _spend(self, i: int) -> dict[str, Any]:
        return {
            "run_id": self.id,
            "index": i,
            "epsilon_lower": 0.99,
            "epsilon_upper": 0.9999,
            "beta": 1e-5,
            "dishonest": 0,
            "within_promise": True,
            "messages": self.messages * self.n,
            "opened": self.messages * self.n,
            "failed": 0,
            "recorded_at": self.start + 60 * i + 50,
            **dict.fromkeys(("test", "deviation", "chance")),
            **self._check(i),
        }

    def _check(self, i: int) -> dict[str, Any]:
        return asdict(self.checks[i]) if i in self.checks else {}

    def _events(self, i: int) -> Iterator[dict[str, Any]]:
        at = self.start + 60 * i
        asked = {"index": i, "step": i, "stage": 1 + i // STAGE, "purpose": "fine", "n": self.n}
        yield self._event(
            "deployment_issued", at, {**asked, "layer": None, "messages": self.messages}
        )
        yield self._event("batch_sealed", at + 45, {"index": i, "n": self.n, "episodes": self.n})
        spent = {"epsilon": 0.9999, "beta": 1e-5, "dishonest": 0}
        value = {"value": float(self.values[i] + 0.05 * self.noise[i]), "radius": 0.3}
        sent = {"index": i, "n": self.n, "messages": self.messages * self.n, "failed": 0}
        if i in self.checks:
            sent |= self._check(i) | {"suspicious": self.checks[i].suspicious}
        yield self._event("batch_counted", at + 50, {**sent, **spent, **value})
        if i % STAGE == STAGE - 1:
            yield self._event("stage_finished", at + 50, self._stage(1 + i // STAGE))

    def _event(self, kind: str, at: float, data: dict[str, Any]) -> dict[str, Any]:
        return {"kind": kind, "at": at, "data": json.dumps(data)}

    def _stage(self, stage: int) -> dict[str, Any]:
        before = max(1, (1 << 21) >> 2 * (stage - 1))
        after = max(1, (1 << 21) >> 2 * stage)
        return {
            "stage": stage,
            "L_b": STAGE * self.n,
            "episodes": STAGE * self.n,
            "active_before": before if self.enumerated else None,
            "active_after": after if self.enumerated else None,
            "eliminated": before - after if self.enumerated else None,
            "decisions_eliminated": min(24, 6 * stage),
            "radius": max(0.3 / stage, 0.01),
            "best_value": 0.47,
            "E": 100.0,
            "infrequent": 0.1,
            "coverage_gap": 0.01,
            "coverage_iterations": 20,
            "policy": self._policy(stage),
        }
