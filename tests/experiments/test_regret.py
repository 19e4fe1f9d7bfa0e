from __future__ import annotations

import numpy as np
import pytest

from riffle.common.mechanism.policy import Mixture
from riffle.coordinator.learning.learner import Deployment
from riffle.coordinator.learning.planning import plan
from riffle.experiments.regret import (
    mixture_value,
    optimal_value,
    policy_value,
    regret,
)
from riffle.node_client.environments.tabular import TabularMDP, riverswim
from tests.coordinator.learning.worlds import suboptimality

LEFT = np.zeros((6, 4), dtype=np.int64)


def test_exact_values_of_riverswim() -> None:
    mdp = riverswim()
    best = plan(mdp.P, mdp.r, mdp.d1).policy
    assert optimal_value(mdp) == pytest.approx(0.475791, abs=5e-7)
    assert policy_value(mdp, LEFT) == pytest.approx(0.03)
    half = Mixture.from_probabilities(np.stack([LEFT, best]), [0.5, 0.5])
    assert mixture_value(mdp, half) == pytest.approx((0.03 + optimal_value(mdp)) / 2)
    assert suboptimality(mdp, best) == pytest.approx(0)


def test_regret_is_the_sum_of_gaps_and_counts_switches() -> None:
    mdp = riverswim()
    left = Mixture.single(LEFT)
    best = Mixture.single(plan(mdp.P, mdp.r, mdp.d1).policy)
    runs = [Deployment(1, "fine", m, n, None) for m, n in ((left, 100), (left, 50), (best, 1000))]
    result = regret(mdp, runs)
    assert result.total == pytest.approx(150 * (optimal_value(mdp) - 0.03))
    assert result.episodes.tolist() == [100, 150, 1150]
    assert result.switches == 1


def test_without_rewards_there_is_no_regret() -> None:
    mdp = TabularMDP(np.ones((2, 1, 2, 1)), np.zeros((2, 1, 2)), np.ones(1))
    assert suboptimality(mdp, np.zeros((2, 1), dtype=np.int64)) == 0
    assert regret(mdp, []).total == 0
