from __future__ import annotations

import itertools

import numpy as np
import pytest

from riffle.common.mechanism.counters import Sizes
from riffle.coordinator.learning.planning import occupancy, plan, value
from riffle.node_client.environments.tabular import riverswim
from tests.coordinator.learning.worlds import random_model


def test_riverswim_has_the_literatures_values() -> None:
    mdp = riverswim(X=4, H=6)
    left = np.zeros((6, 4), dtype=np.int64)
    assert float(plan(mdp.P, mdp.r, mdp.d1).value) == pytest.approx(0.475791, abs=5e-7)
    assert float(value(mdp.P, mdp.r, mdp.d1, left)) == pytest.approx(0.03)


def test_plan_is_the_best_of_all_policies() -> None:
    sizes = Sizes(X=2, A=2, H=3)
    model, d1 = random_model(sizes, 1, mass=0.9)
    policies = np.array(list(itertools.product(range(2), repeat=6))).reshape(-1, 3, 2)
    values = value(model.P, model.r, d1, policies)
    best = plan(model.P, model.r, d1)
    assert float(best.value) == pytest.approx(values.max())
    assert float(value(model.P, model.r, d1, best.policy)) == pytest.approx(values.max())


def test_value_is_occupancy_times_reward() -> None:
    sizes = Sizes(X=4, A=3, H=5)
    model, d1 = random_model(sizes, 2, mass=0.8)
    policies = np.random.default_rng(3).integers(0, 3, (10, 5, 4))
    d = occupancy(model.P, d1, policies)
    assert np.allclose((d * model.r).sum(axis=(1, 2, 3)), value(model.P, model.r, d1, policies))
    assert np.allclose(d.sum(axis=(2, 3)), 0.8 ** np.arange(5))


def test_stacks_are_planned_one_by_one() -> None:
    sizes = Sizes(X=3, A=2, H=4)
    models = [random_model(sizes, seed)[0] for seed in range(5)]
    d1 = np.array([0.2, 0.3, 0.5])
    P, r = np.stack([m.P for m in models]), np.stack([m.r for m in models])
    stacked = plan(P, r, d1)
    for i, model in enumerate(models):
        single = plan(model.P, model.r, d1)
        assert np.array_equal(stacked.policy[i], single.policy)
        assert stacked.value[i] == pytest.approx(float(single.value))
    again = value(P, r, d1, stacked.policy[0])
    assert again[0] == pytest.approx(float(stacked.value[0]))
    assert (again <= stacked.value + 1e-12).all()


def test_the_absorbing_state_earns_nothing() -> None:
    P = np.zeros((3, 1, 1, 1))
    P[0], P[1] = 0.5, 0.25
    r = np.ones((3, 1, 1))
    policy = np.zeros((3, 1), dtype=np.int64)
    assert float(value(P, r, np.ones(1), policy)) == 1 + 0.5 + 0.125
