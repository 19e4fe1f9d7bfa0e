"""What a learner of one's own is built from: a base class, a few first policies, a plain model.

`OwnLearner` keeps the books that every `Learner` must keep (which episodes are left, whether counts
are those that were asked for, the answer so far). What is left to write is the idea:

    class Mine(OwnLearner):
        def next_deployment(self): ...      # what to deploy in this state, or None at the end
        def observe(self, counts): ...      # super().observe(counts), then learn from them

`next_deployment` must depend on nothing but what `observe` has seen: it is asked more than once,
and after a crash a fresh learner is given the same counts again and must ask for the same
deployments. Draws are keyed by `problem.seed`. Counts are private already: whatever is done with
them costs no privacy (post-processing).
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import ArrayLike

from riffle.common.policy import Mixture
from riffle.common.randomness import generator_for
from riffle.coordinator.learning.absorbing import estimate_rewards
from riffle.coordinator.learning.learner import (
    BatchCounts,
    Deployment,
    FloatArray,
    LearnerError,
    LearnerSummary,
    PolicyArray,
    Problem,
    StageResult,
)
from riffle.coordinator.learning.planning import plan
from riffle.coordinator.postprocess import consistent

__all__ = ["BatchCounts", "Deployment", "OwnLearner", "Problem", "StageResult", "estimate", "plan"]

Constant = str | int | float | bool


class OwnLearner(ABC):
    """Base of a learner that writes `next_deployment` and `observe` itself.

    ``left`` counts the episodes that are not observed yet and ``batches`` those that are;
    ``policy`` (H, X) and ``value`` are the answer so far. Constants given by name are recorded in
    every result.
    """

    def __init__(self, problem: Problem, **constants: Constant) -> None:
        self.problem = problem
        self.left = problem.K
        self.batches = 0
        self.policy: PolicyArray = np.zeros((problem.sizes.H, problem.sizes.X), dtype=np.int64)
        self.value = 0.0
        self._constants = constants

    @abstractmethod
    def next_deployment(self) -> Deployment | None:
        """What to deploy now, or None when the run is over; `deploy` makes one."""

    def observe(self, counts: BatchCounts) -> StageResult | None:
        """Check counts and count their episodes: call it first, then learn from them.

        Raises:
            LearnerError: they are not those of the present deployment.
        """
        asked = self.next_deployment()
        if asked is None or (asked.n, asked.layer) != (counts.n, counts.layout.layer):
            raise LearnerError(f"asked for {asked}, got counts of {counts.n} of {counts.layout}")
        self.left -= counts.n
        self.batches += 1
        return None

    def summary(self) -> LearnerSummary:
        """The answer so far."""
        return LearnerSummary(
            policy=self.policy,
            value_estimate=self.value,
            active=0,
            stage=self.batches,
            episodes_used=self.problem.K - self.left,
            episodes_total=self.problem.K,
            finished=self.next_deployment() is None,
            constants=self._constants,
        )

    def deploy(
        self,
        policies: ArrayLike,
        n: int,
        probabilities: ArrayLike | None = None,
        layer: int | None = None,
    ) -> Deployment:
        """A deployment of a policy (H, X), or of policies (M, H, X), alike or with probabilities.

        Raises:
            LearnerError: n is not in 1..left, or these are no policies of this problem.
        """
        if not 1 <= n <= self.left:
            raise LearnerError(f"cannot deploy {n} episodes; {self.left} of K are left")
        stacked = np.asarray(policies, dtype=np.int64)
        stacked = stacked[None] if stacked.ndim == 2 else stacked
        chances = np.ones(len(stacked)) if probabilities is None else probabilities
        try:
            mixture = Mixture.from_probabilities(stacked, chances)
            mixture.check(self.problem.sizes)
        except ValueError as error:
            raise LearnerError(f"deployment {self.batches}: {error}") from error
        return Deployment(self.batches + 1, "fine", mixture, n, layer)

    def explorers(self, count: int = 64) -> PolicyArray:
        """First policies (M, H, X): every action always, and ``count`` random ones."""
        sizes = self.problem.sizes
        generator = generator_for(self.problem.seed, "explorers")
        random = generator.integers(sizes.A, size=(count, sizes.H, sizes.X))
        always = np.arange(sizes.A)[:, None, None] * np.ones_like(random[:1])
        return np.concatenate([always, random])

    def improve(self, counts: BatchCounts) -> None:
        """Make the best policy of the counts' model, and its value there, the answer."""
        found = plan(*estimate(counts), self.problem.d1)
        self.policy, self.value = found.policy, float(found.value)


def estimate(counts: BatchCounts) -> tuple[FloatArray, FloatArray]:
    """A model P (H, X, A, X), r (H, X, A) of a batch that counted everything (Eq. 7, then ratios).

    Visits count as at least one standard deviation of their noise, so that noise on a pair that is
    hardly visited does not look like a reward; what is missing from a row of P then leads nowhere.

    Raises:
        LearnerError: the batch counted one layer only, without rewards.
    """
    if counts.rewards is None:
        raise LearnerError("a model needs counts of all layers: deploy with layer=None")
    N = consistent(counts.transitions, counts.visits, 0.0, add_on=False)
    visits = np.maximum(N.visits, max(1.0, counts.visit_variance**0.5))
    return N.transitions / visits[..., None], estimate_rewards(counts.rewards, visits)
