"""A learner of two deployments."""

import numpy as np

from riffle.common.mechanism.policy import Mixture
from riffle.coordinator.learners.registry import Options
from riffle.coordinator.learning.learner import (
    BatchCounts,
    Deployment,
    Learner,
    LearnerError,
    LearnerSummary,
    Problem,
    StageResult,
)


class Tiny:
    """Two deployments of 20 episodes; the second one depends on the first one's counts."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.seen: list[BatchCounts] = []

    def next_deployment(self) -> Deployment | None:
        shape = (self.problem.sizes.H, self.problem.sizes.X)
        if not self.seen:
            both = [np.zeros(shape, dtype=np.int64), np.ones(shape, dtype=np.int64)]
            mixture = Mixture.from_probabilities(both, [0.5, 0.5])
            return Deployment(1, "crude", mixture, 20, 0)
        if len(self.seen) == 1:
            visits = self.seen[0].visits[0]
            policy = np.tile(visits.argmax(axis=1), (shape[0], 1))
            return Deployment(1, "fine", Mixture.single(policy), 20, None)
        return None

    def observe(self, counts: BatchCounts) -> StageResult | None:
        if len(self.seen) == 2:
            raise LearnerError("the run is over")
        self.seen.append(counts)
        if len(self.seen) == 1:
            return None
        policy = np.zeros((self.problem.sizes.H, self.problem.sizes.X), dtype=np.int64)
        return StageResult(
            stage=1,
            L_b=20,
            episodes=40,
            active_before=8,
            active_after=1,
            eliminated=7,
            decisions_eliminated=1,
            radius=0.5,
            best_value=float(counts.transitions.sum()),
            E=1.0,
            infrequent=0.0,
            coverage_gap=0.0,
            coverage_iterations=1,
            policy=policy,
        )

    def summary(self) -> LearnerSummary:
        policy = np.zeros((self.problem.sizes.H, self.problem.sizes.X), dtype=np.int64)
        used = sum(counts.n for counts in self.seen)
        over = len(self.seen) == 2
        return LearnerSummary(policy, 0.25, 1, len(self.seen), used, 40, over, {"name": "tiny"})


def tiny(problem: Problem, _: str, options: Options) -> Learner:
    if options:
        raise LearnerError(f"there is no option {next(iter(options))!r}")
    return Tiny(problem)
