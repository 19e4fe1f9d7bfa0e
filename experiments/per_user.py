"""The per-user path: every user's report made one by one, without network or encryption.

Draws are keyed by (run, batch, slot), as at the services' test entry point, and encoding is the
node's own code. So a networked run with the same spec, run id and test seed has the same private
counts, batch by batch, whatever the order of arrival.
"""

from dataclasses import dataclass

import numpy as np

from common.counters import Ints
from common.descriptor import BatchDescriptor
from common.workflow import count
from coordinator.analyzer import add_noise
from coordinator.counts import private_counts
from coordinator.learning.learner import LearnerSummary
from coordinator.planning import Party, issue
from coordinator.registry import Registry
from coordinator.specs import RunSpec
from node_client.environments.environment import Environment
from node_client.report import BatchPlan, slot_report

NOBODY = Party(shuffler_id="simulator", analyzer_key="00" * 32)
NEVER = 1 << 40


@dataclass(frozen=True, slots=True)
class SimulatedBatch:
    """A batch: its descriptor and its histogram (C + 1,), dummies last."""

    descriptor: BatchDescriptor
    histogram: Ints


def run_per_user(
    spec: RunSpec, run_id: str, environment: Environment, registry: Registry | None = None
) -> tuple[list[SimulatedBatch], LearnerSummary]:
    """Run a spec to its end, user by user.

    Raises:
        RemoteError: ``batch-too-small`` or ``invalid-spec``, as the coordinator would.
    """
    learner = (registry or Registry()).build(spec)
    batches: list[SimulatedBatch] = []
    while (deployment := learner.next_deployment()) is not None:
        index = len(batches)
        issued = issue(spec, run_id, NOBODY, deployment, index=index, step=index, expires_at=NEVER)
        histogram = batch_histogram(issued.descriptor, environment)
        learner.observe(private_counts(issued.descriptor, histogram))
        batches.append(SimulatedBatch(issued.descriptor, histogram))
    return batches, learner.summary()


def batch_histogram(descriptor: BatchDescriptor, environment: Environment) -> Ints:
    """What the analyzer makes (C + 1,) of all n reports of a batch."""
    plan = BatchPlan.of(descriptor)
    reports = [
        slot_report(plan, environment, slot, test_entry=True)[1] for slot in range(descriptor.n)
    ]
    symbols = np.concatenate(reports).reshape(-1, descriptor.symbols.count)
    histogram, _ = count(descriptor.trust, plan.layout, symbols)
    return add_noise(descriptor, histogram)
