"""A learner of a few small batches, each of which depends on the counts of the one before."""

import numpy as np

from riffle.common.mechanism.policy import Mixture
from riffle.coordinator.learners.registry import Options
from riffle.coordinator.learning.learner import (
    BatchCounts,
    Deployment,
    LearnerSummary,
    Problem,
    StageResult,
)

N = 6


class Steps:
    """K / N deployments of N episodes of horizon one: right in state 0 ever more, or ever less."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.total = problem.K // N
        self.shares = [0.5]

    @property
    def over(self) -> bool:
        return len(self.shares) > self.total

    def next_deployment(self) -> Deployment | None:
        if self.over:
            return None
        both = [np.zeros((1, 2), dtype=np.int64), np.ones((1, 2), dtype=np.int64)]
        share = self.shares[-1]
        mixture = Mixture.from_probabilities(both, [1 - share, share])
        return Deployment(len(self.shares), "fine", mixture, N, 0)

    def observe(self, counts: BatchCounts) -> StageResult | None:
        moved = float(counts.transitions[0, 0, 1, 1] - counts.transitions[0, 0, 0, 0])
        self.shares.append(1 / (1 + np.exp(-moved / 7)))  # every single count shows
        return None

    def summary(self) -> LearnerSummary:
        policy = np.ones((1, 2), dtype=np.int64)
        used = N * (len(self.shares) - 1)
        stage = len(self.shares)
        return LearnerSummary(policy, self.shares[-1], 1, stage, used, self.problem.K, self.over)


def steps(problem: Problem, _: str, __: Options) -> Steps:
    return Steps(problem)
