"""UCBVI's bonuses and optimism, and what it learns on small problems."""

from __future__ import annotations

import math

import numpy as np
import pytest

from riffle.common.mechanism.counters import Episode, Sizes
from riffle.coordinator.learning.planning import plan
from riffle.coordinator.learning.ucbvi_parameters import Bonus, log_terms
from tests.coordinator.learning.ucbvi_oracle import UCBVI, Estimates, expectation, spread
from tests.coordinator.learning.worlds import random_model

SIZES = Sizes(X=2, A=2, H=2)


def episode(states: list[int], actions: list[int], rewards: list[int]) -> Episode:
    return Episode(np.array(states), np.array(actions), np.array(rewards))


def test_before_any_episode_the_first_action_is_taken_everywhere() -> None:
    assert not UCBVI(SIZES, K=10).policy().any()


def test_estimates_are_ratios_of_counts() -> None:
    learner = UCBVI(SIZES, K=10)
    learner.observe(episode([0, 1, 0], [1, 0], [1, 0]))
    learner.observe(episode([0, 0, 1], [1, 1], [0, 1]))
    learner.observe(episode([0, 0, 0], [1, 1], [0, 0]))
    model = learner.estimates()
    assert model.N[0].tolist() == [[0, 3], [0, 0]]
    assert model.P[0, 0, 1].tolist() == pytest.approx([2 / 3, 1 / 3])
    assert model.r[0, 0, 1] == pytest.approx(1 / 3)
    assert model.r[1, 0, 1] == 0.5
    assert not model.P[0, 1].any()


def test_an_untried_action_has_the_largest_possible_value() -> None:
    learner = UCBVI(SIZES, K=10, bonus=Bonus(bonus_scale=0.0))
    for _ in range(3):
        learner.observe(episode([0, 0, 0], [0, 0], [1, 1]))
    # Q(0, 0, action 0) = 1 + min(1, max(1, H - h = 1)) ties with H - h = 2: the first action wins.
    assert learner.policy()[0, 0] == 0
    learner.observe(episode([0, 0, 0], [0, 0], [0, 0]))
    assert learner.policy()[0, 0] == 1


def test_the_bonuses_written_out() -> None:
    sizes, N, K, delta = Sizes(X=2, A=1, H=3), 50.0, 1000, 0.05
    P = np.full((3, 2, 1, 2), 0.5)
    model = Estimates(P, np.full((3, 2, 1), 0.25), np.full((3, 2, 1), N))
    V = np.array([0.0, 1.0])
    PV = expectation(P[0], V)
    iota = math.log(2 * 3 * 2 * K / delta)
    practical = UCBVI(sizes, K, delta, Bonus(bonus_scale=0.3)).exploration(model, 0, V, PV)
    variance = 0.25 + 0.25 * 0.75
    assert practical[0, 0] == pytest.approx(0.3 * (math.sqrt(iota * variance / N) + 3 * iota / N))
    literal = UCBVI(sizes, K, delta, Bonus("paper")).exploration(model, 0, V, PV)
    assert literal[0, 0] == pytest.approx(7 * 3 * math.log(5 * 2 * K * 3 / delta) / math.sqrt(N))


def test_the_confidence_terms() -> None:
    practical, azar, qiao = log_terms(Sizes(X=4, A=2, H=6), 20_000, 0.05)
    assert practical == pytest.approx(math.log(2 * 48 * 20_000 / 0.05))
    assert azar == pytest.approx(math.log(5 * 48 * 20_000 / 0.05))
    assert qiao == pytest.approx(math.log(30 * 48 * 120_000 / 0.05))


def test_spread_is_the_variance_of_a_row() -> None:
    model, _ = random_model(Sizes(4, 3, 1), seed=1)
    V = np.array([0.3, 2.0, -1.0, 0.5])
    PV = expectation(model.P[0], V)
    assert np.allclose(PV, model.P[0] @ V)
    assert np.allclose(spread(model.P[0], V, PV), model.P[0] @ V**2 - (model.P[0] @ V) ** 2)


@pytest.mark.parametrize("seed", range(3))
def test_without_bonus_and_noise_planning_is_backward_induction(seed: int) -> None:
    sizes = Sizes(X=4, A=3, H=5)
    model, d1 = random_model(sizes, seed)
    learner = UCBVI(sizes, K=10, bonus=Bonus(bonus_scale=0.0))
    policy = learner.optimistic(Estimates(model.P, model.r, np.ones_like(model.r)))
    assert np.array_equal(policy, plan(model.P, model.r, d1).policy)


def test_a_bandit_with_a_sure_arm_is_solved() -> None:
    learner = UCBVI(Sizes(X=1, A=3, H=1), K=300)
    chosen = []
    for _ in range(300):
        action = int(learner.policy()[0, 0])
        chosen.append(action)
        learner.observe(episode([0, 0], [action], [int(action == 2)]))
    assert np.mean(np.array(chosen[-200:]) == 2) > 0.95
