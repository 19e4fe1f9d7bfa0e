"""Exact values, regret, and bands over seeds."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from riffle.common.mechanism.policy import Mixture
from riffle.coordinator.learning.learner import Deployment
from riffle.coordinator.learning.planning import plan
from riffle.experiments.regret import (
    mixture_value,
    optimal_value,
    policy_value,
    regret,
    stack,
    student_band,
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


def test_a_band_is_scipys_interval() -> None:
    values = np.random.default_rng(0).normal(3, 2, (20, 4))
    band = student_band(values)
    low, high = stats.t.interval(0.95, 19, values.mean(0), stats.sem(values))
    assert band.low == pytest.approx(low)
    assert band.high == pytest.approx(high)
    assert band.sd == pytest.approx(values.std(0, ddof=1))


def test_a_band_covers_the_mean_at_its_level() -> None:
    """Of 4,000 bands of 5 seeds, misses are Bin(4000, .05): 200 +- 14; 5 deviations are allowed."""
    band = student_band(np.random.default_rng(1).normal(0, 1, (5, 4000)))
    missed = int(((band.low > 0) | (band.high < 0)).sum())
    assert abs(missed - 200) < 70


def test_one_seed_has_no_band() -> None:
    band = student_band([[1.0, 2.0]])
    assert band.low.tolist() == band.high.tolist() == [1.0, 2.0]


def test_bands_are_stacked_in_order() -> None:
    both = stack([student_band([1.0, 3.0]), student_band([2.0, 2.0])])
    assert both.mean.tolist() == [2.0, 2.0]
    assert both.low[1] == both.high[1] == 2.0
    assert stack([]).mean.shape == (0,)
