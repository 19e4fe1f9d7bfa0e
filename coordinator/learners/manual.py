"""Manual mode: an outside learner asks for deployments and reads their private counts.

`ManualLearner` is a learner without a will of its own: `submit` gives it the next deployment, and
its run is over when K episodes were executed, also for batches that were
not counted. Its answer is the mixture with the largest lower bound of its
estimated value. Everything an outside learner may see is private already, so nothing is spent by
looking at it.
"""

import numpy as np

from riffle.coordinator.batches.counts import ValueEstimate, value_estimate
from riffle.coordinator.learning.learner import (
    BatchCounts,
    Deployment,
    LearnerError,
    LearnerSummary,
    Problem,
    StageResult,
)


class ManualLearner:
    """A `Learner` whose deployments come from outside, one at a time."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._pending: Deployment | None = None
        self._best: tuple[Deployment, ValueEstimate] | None = None
        self._used = 0
        self._deployed = 0

    def submit(self, deployment: Deployment) -> None:
        """Take the next deployment.

        Raises:
            LearnerError: another one is under way.
        """
        if self._pending is not None:
            raise LearnerError("a deployment is under way; wait until it is counted")
        self._pending = deployment

    def next_deployment(self) -> Deployment | None:
        """What was submitted and not yet observed."""
        return self._pending

    def observe(self, counts: BatchCounts) -> StageResult | None:
        """Take the counts; manual mode has no stages."""
        if self._pending is None:
            raise LearnerError("nothing is deployed that these counts belong to")
        estimate = value_estimate(counts, self._problem.delta)
        if estimate is not None and estimate.value - estimate.radius > self._lower_bound():
            self._best = (self._pending, estimate)
        self._used += counts.n
        self._deployed += 1
        self._pending = None
        return None

    def summary(self) -> LearnerSummary:
        """The best mixture's likeliest policy, with the mixture's estimated value."""
        sizes = self._problem.sizes
        policy = np.zeros((sizes.H, sizes.X), dtype=np.int64)
        value = 0.0
        if self._best is not None:
            deployment, estimate = self._best
            policy = deployment.mixture.policies[int(deployment.mixture.weights.argmax())]
            value = estimate.value
        return LearnerSummary(
            policy=policy,
            value_estimate=value,
            active=0,
            stage=self._deployed,
            episodes_used=self._used,
            episodes_total=self._problem.K,
            finished=self._used >= self._problem.K,
        )

    def _lower_bound(self) -> float:
        if self._best is None:
            return -np.inf
        return self._best[1].value - self._best[1].radius
