"""The steps of both algorithms: cvxpy's answers, certificates, polytope, hard numbers."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from riffle.coordinator.learning.adversarial.confidence import everything
from riffle.coordinator.learning.adversarial.layered import (
    Layers,
    induced_policy,
    occupancy,
    uniform_occupancy,
    violation,
)
from riffle.coordinator.learning.adversarial.log_barrier import log_barrier_step
from riffle.coordinator.learning.adversarial.omd import ftrl_step
from riffle.coordinator.learning.learner import FloatArray, LearnerError
from tests.coordinator.learning.adversarial.convex import solve
from tests.coordinator.learning.adversarial.worlds import (
    SHAPES,
    holds,
    random_box,
    random_policy,
    transitions,
)


@pytest.fixture(scope="module")
def cp() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("cvxpy")


def entropic(q: FloatArray, cost: FloatArray) -> float:
    positive = q[q > 0]
    return float((q.sum(axis=-1) * cost).sum() + (positive * np.log(positive)).sum())


@pytest.mark.parametrize("case", range(12))
def test_the_ftrl_step_equals_cvxpys(cp: Any, case: int) -> None:
    generator = np.random.default_rng(case)
    layers = Layers(SHAPES[case % len(SHAPES)], 2)
    box = random_box(layers, (0.05, 0.3, 1.0)[case % 3], generator)
    cost = generator.uniform(0, 4, layers.pairs.shape) * layers.pairs
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = solve(cp, layers, box, cost, None)
    step = ftrl_step(layers, box, cost, tolerance=1e-10)
    np.testing.assert_allclose(step.q, expected, atol=1e-6)


@pytest.mark.parametrize("case", range(12))
def test_the_log_barrier_step_equals_cvxpys(cp: Any, case: int) -> None:
    generator = np.random.default_rng(case)
    layers = Layers(SHAPES[case % len(SHAPES)], 2)
    box = random_box(layers, (0.05, 0.3, 1.0)[case % 3], generator)
    previous = occupancy(transitions(layers, generator), random_policy(layers, generator))
    previous = 0.5 * previous + 0.5 * uniform_occupancy(layers)
    cost = generator.uniform(0, 1, layers.pairs.shape) * layers.pairs
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = solve(cp, layers, box, cost, previous)
    step = log_barrier_step(layers, box, cost, previous)
    np.testing.assert_allclose(step.q, expected, atol=1e-6)


@given(
    st.sampled_from(SHAPES),
    st.integers(1, 3),
    st.floats(0.001, 1.0),
    st.floats(0.01, 1000.0),
    st.integers(0, 10**6),
)
def test_an_ftrl_step_is_in_the_polytope_and_certified(
    shape: tuple[int, ...], A: int, width: float, size: float, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    layers = Layers(shape, A)
    box = random_box(layers, width, generator)
    cost = generator.uniform(-size, size, layers.pairs.shape) * layers.pairs
    step = ftrl_step(layers, box, cost)
    assert violation(layers, step.q) < 1e-12
    assert holds(box, step.transitions, layers, 1e-9)
    assert step.residual <= 1e-7
    assert -1e-11 * (1 + size) <= step.gap <= 1e-6 * (1 + size)
    # no other occupancy measure of the set is better than the gap allows
    other = random_policy(layers, generator)
    q = occupancy(step.transitions, other)
    assert entropic(q, cost) >= entropic(step.q, cost) - step.gap - 1e-10 * (1 + size)


@given(st.sampled_from(SHAPES), st.floats(0.01, 1.0), st.floats(0.001, 3.0), st.integers(0, 10**6))
def test_a_log_barrier_step_is_in_the_polytope_and_certified(
    shape: tuple[int, ...], width: float, size: float, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    layers = Layers(shape, 2)
    box = random_box(layers, width, generator)
    cost = generator.uniform(0, size, layers.pairs.shape) * layers.pairs
    step = log_barrier_step(layers, box, cost, uniform_occupancy(layers))
    assert violation(layers, step.q) < 1e-9
    assert holds(box, step.transitions, layers, 1e-9)
    assert abs(step.gap) < 1e-5
    assert (step.q[layers.cells] > 0).all()


def test_without_costs_the_ftrl_step_on_everything_is_uniform() -> None:
    layers = Layers((1, 3, 3, 3, 1), 2)
    step = ftrl_step(layers, everything(layers), np.zeros(layers.pairs.shape))
    np.testing.assert_allclose(step.q, uniform_occupancy(layers), atol=1e-9)


def test_without_costs_the_log_barrier_step_stays_at_q() -> None:
    layers = Layers((1, 3, 2, 1), 2)
    generator = np.random.default_rng(5)
    q = occupancy(transitions(layers, generator), random_policy(layers, generator))
    step = log_barrier_step(layers, everything(layers), np.zeros(layers.pairs.shape), q)
    np.testing.assert_allclose(step.q, q, atol=1e-6)


def test_one_layer_of_actions_is_a_softmax() -> None:
    layers = Layers((1, 1), 4)
    cost = np.array([[[0.0, 1.0, 2.0, 700.0]]])
    step = ftrl_step(layers, everything(layers), cost)
    expected = np.exp(-cost[0, 0]) / np.exp(-cost[0, 0]).sum()
    np.testing.assert_allclose(step.policy[0, 0], expected, atol=1e-12)


def test_logarithms_of_q_outlive_its_underflow() -> None:
    layers = Layers((1, 2, 1), 2)
    cost = np.zeros(layers.pairs.shape)
    cost[1, :, 1] = 5000.0
    step = ftrl_step(layers, everything(layers), cost)
    assert step.q[1, 0, 1, 0] == 0.0
    ratio = step.log_q[1, 0, 1, 0] - step.log_q[1, 0, 0, 0]
    assert ratio == pytest.approx(-5000.0)


def test_a_warm_start_changes_nothing_but_the_iterations() -> None:
    generator = np.random.default_rng(1)
    layers = Layers((1, 3, 3, 3, 1), 2)
    box = random_box(layers, 0.3, generator)
    cost = generator.uniform(0, 20, layers.pairs.shape) * layers.pairs
    cold = ftrl_step(layers, box, cost, tolerance=1e-11)
    moved = ftrl_step(layers, box, cost * 1.02)
    warm = ftrl_step(layers, box, cost, moved.v, tolerance=1e-11)
    np.testing.assert_allclose(warm.q, cold.q, atol=1e-9)
    assert warm.iterations <= cold.iterations
    np.testing.assert_allclose(induced_policy(layers, warm.q), warm.policy, atol=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_huge_costs_are_still_answered_and_certified(seed: int) -> None:
    generator = np.random.default_rng(seed)
    layers = Layers((1, 5, 4, 5, 1), 2)
    box = random_box(layers, 1.0, generator)
    cost = generator.uniform(0, 1e4, layers.pairs.shape) * layers.pairs
    step = ftrl_step(layers, box, cost)
    assert violation(layers, step.q) < 1e-12
    assert step.residual < 1e-4
    assert -1e-8 < step.gap < 1e-2  # of a value near 10^4


def test_costs_out_of_the_log_barriers_reach_are_refused() -> None:
    generator = np.random.default_rng(0)
    layers = Layers((1, 3, 3, 3, 1), 2)
    box = random_box(layers, 0.01, generator)
    cost = np.zeros(layers.pairs.shape)
    cost[1, 0] = 1e300
    with pytest.raises(LearnerError, match="stopped at a gap"):
        log_barrier_step(layers, box, cost, uniform_occupancy(layers))
