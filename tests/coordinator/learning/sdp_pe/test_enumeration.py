from __future__ import annotations

import time

import numpy as np
import pytest

from riffle.common.mechanism.counters import Sizes
from riffle.coordinator.learning.planning import Model, occupancy, plan, value
from riffle.coordinator.learning.sdp_pe.enumeration import (
    EnumeratedPolicies,
    EnumerationTooLarge,
    classes,
)
from riffle.node_client.environments.tabular import riverswim
from tests.coordinator.learning.worlds import random_model

TINY = [Sizes(2, 2, 3), Sizes(3, 2, 2), Sizes(1, 5, 1), Sizes(2, 3, 2), Sizes(2, 2, 1)]


def _every_policy(active: EnumeratedPolicies) -> np.ndarray:
    total = active.shape[0] * active.shape[1]
    return np.stack([active.policy(i) for i in range(total)])


def test_one_action_makes_one_policy_of_any_number_of_states() -> None:
    active = EnumeratedPolicies.all_policies(Sizes(X=70, A=1, H=2), np.full(70, 1 / 70))
    assert active.size == 1
    assert not active.policy(0).any()


@pytest.mark.parametrize("sizes", TINY)
def test_values_are_those_of_every_policy(sizes: Sizes) -> None:
    model, d1 = random_model(sizes, 11, mass=0.9)
    active = EnumeratedPolicies.all_policies(sizes, d1)
    policies = _every_policy(active)
    assert len(np.unique(policies, axis=0)) == active.size == sizes.A ** (sizes.X * sizes.H)
    assert np.allclose(active.values(model).ravel(), value(model.P, model.r, d1, policies))
    assert [active.index(policy) for policy in policies] == list(range(len(policies)))


def test_policies_that_agree_from_the_start_are_enumerated_once() -> None:
    d1 = np.array([0.0, 1.0, 0.0, 0.0])
    assert classes(Sizes(4, 2, 6), d1) == 2**21
    active = EnumeratedPolicies.all_policies(Sizes(4, 2, 3), d1)
    assert active.size == 2**9
    assert len(np.unique(_every_policy(active), axis=0)) == 2**9


def test_one_step_takes_any_number_of_states() -> None:
    sizes, d1 = Sizes(754, 6, 1), np.eye(754)[0]
    assert EnumeratedPolicies.all_policies(sizes, d1).size == 6


def test_too_large_names_the_number_and_the_limit() -> None:
    with pytest.raises(EnumerationTooLarge, match=r"2\^25 .* at most 16777216"):
        EnumeratedPolicies.all_policies(Sizes(4, 2, 7), np.array([1.0, 0, 0, 0]))


@pytest.mark.parametrize("seed", range(5))
def test_a_full_mask_and_backward_induction_agree(seed: int) -> None:
    sizes = Sizes(3, 2, 3)
    model, d1 = random_model(sizes, seed, mass=0.95)
    free = EnumeratedPolicies.all_policies(sizes, d1)
    mask = np.ones(free.shape, dtype=np.bool_)
    masked = EnumeratedPolicies(free.d1, free.step_actions, free.cut, mask)
    assert float(masked.best(model).value) == pytest.approx(float(free.best(model).value))
    for h in range(sizes.H):
        a, b = free.best_visits(model.P, h, model), masked.best_visits(model.P, h, model)
        assert np.allclose(a.value, b.value)


@pytest.mark.parametrize("radius", [0.0, 0.05, 0.3, 5.0])
def test_elimination_keeps_exactly_the_close_policies(radius: float) -> None:
    sizes = Sizes(2, 2, 3)
    model, d1 = random_model(sizes, 4)
    active = EnumeratedPolicies.all_policies(sizes, d1)
    values = value(model.P, model.r, d1, _every_policy(active))
    smaller, best = active.eliminate(model, radius)
    kept = (values > best - radius) | (values >= best - 1e-15)
    assert best == pytest.approx(values.max())
    assert smaller.size == kept.sum() >= 1
    assert [smaller.contains(policy) for policy in _every_policy(active)] == kept.tolist()
    assert smaller.contains(plan(model.P, model.r, d1).policy)


@pytest.mark.parametrize("sizes", TINY)
def test_best_visits_within_an_active_set_against_brute_force(sizes: Sizes) -> None:
    model, d1 = random_model(sizes, 21, mass=0.9)
    active, _ = EnumeratedPolicies.all_policies(sizes, d1).eliminate(model, 0.2)
    policies = np.stack([p for p in _every_policy(active) if active.contains(p)])
    d = occupancy(model.P, d1, policies)
    for h in range(sizes.H):
        visits_plan = active.best_visits(model.P, h, model)
        assert np.allclose(visits_plan.value, d[:, h].max(axis=0))
        for x, a in np.ndindex(sizes.X, sizes.A):
            policy = visits_plan.policy[x, a]
            assert active.contains(policy)
            visits = occupancy(model.P, d1, policy)[h, x, a]
            assert visits == pytest.approx(visits_plan.value[x, a])


def test_best_continuation_after_the_visit() -> None:
    sizes = Sizes(2, 2, 3)
    model, d1 = random_model(sizes, 8)
    free = EnumeratedPolicies.all_policies(sizes, d1)
    mask = np.ones(free.shape, dtype=np.bool_)
    masked = EnumeratedPolicies(free.d1, free.step_actions, free.cut, mask)
    best = plan(model.P, model.r, d1).policy
    for active in (free, masked):
        visits_plan = active.best_visits(model.P, 0, model)
        assert np.array_equal(visits_plan.policy[0, 0, 1:], best[1:])


def test_riverswim_takes_a_tenth_of_a_second() -> None:
    mdp = riverswim(4, 6)
    model = Model(mdp.P, mdp.r)
    active = EnumeratedPolicies.all_policies(mdp.sizes, mdp.d1)
    assert active.size == 2**21
    active.values(model)
    times = []
    for _ in range(3):
        start = time.perf_counter()
        values = active.values(model)
        times.append(time.perf_counter() - start)
    assert values.max() == pytest.approx(0.475791, abs=5e-7)
    assert min(times) < 0.1


@pytest.mark.parametrize("seed", range(5))
def test_the_best_of_a_scattered_set_is_the_best_of_all_values(seed: int) -> None:
    sizes = Sizes(3, 2, 3)
    model, d1 = random_model(sizes, seed, mass=0.95)
    free = EnumeratedPolicies.all_policies(sizes, d1)
    mask = np.random.default_rng(seed).random(free.shape) < 0.05
    active = EnumeratedPolicies(free.d1, free.step_actions, free.cut, mask)
    values = np.where(mask, free.values(model), -np.inf)
    assert np.array_equal(active.best(model).policy, free.policy(int(values.argmax())))
    smaller, best = active.eliminate(model, 0.1)
    assert best == values.max()
    assert smaller.active is not None
    assert np.array_equal(smaller.active, mask & (values > best - 0.1))
    taken = np.stack([free.policy(int(i)) for i in np.flatnonzero(mask)])
    assert np.array_equal(active.actions, (taken[..., None] == np.arange(sizes.A)).any(axis=0))
