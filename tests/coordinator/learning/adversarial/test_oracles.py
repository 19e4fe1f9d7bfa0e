"""The loops of 004, compiled or not, give their NumPy oracles' answers and refusals."""

from __future__ import annotations

import numpy as np
import pytest

from riffle.coordinator.learning.adversarial import confidence, log_barrier, omd
from riffle.coordinator.learning.adversarial.confidence import everything
from riffle.coordinator.learning.adversarial.layered import Layers, uniform_occupancy
from riffle.coordinator.learning.adversarial.uc_o_reps import Constants
from riffle.coordinator.learning.learner import LearnerError
from tests.coordinator.learning.adversarial import (
    confidence_oracle,
    log_barrier_oracle,
    omd_oracle,
)
from tests.coordinator.learning.adversarial.worlds import SHAPES, random_box, random_policy


def _same(one: omd.Step, other: omd.Step) -> None:
    np.testing.assert_allclose(one.q, other.q, rtol=1e-6, atol=1e-10)
    np.testing.assert_allclose(one.policy, other.policy, rtol=1e-6, atol=1e-10)
    np.testing.assert_allclose(one.transitions, other.transitions, rtol=1e-6, atol=1e-10)
    assert one.iterations == other.iterations
    assert one.residual == pytest.approx(other.residual, abs=1e-9)
    assert one.gap == pytest.approx(other.gap, abs=1e-8)
    np.testing.assert_allclose(one.v, other.v, atol=1e-6)


@pytest.mark.parametrize("case", range(24))
def test_the_ftrl_step_equals_the_oracles(case: int) -> None:
    generator = np.random.default_rng(case)
    layers = Layers(SHAPES[case % len(SHAPES)], 2)
    box = random_box(layers, (0.05, 0.3, 1.0)[case % 3], generator)
    cost = generator.uniform(0, (1, 4, 30)[case % 3], layers.pairs.shape) * layers.pairs
    cold = omd_oracle.ftrl_step(layers, box, cost)
    _same(omd.ftrl_step(layers, box, cost), cold)
    start = cold.v.copy()
    _same(
        omd.ftrl_step(layers, box, 1.1 * cost, cold.v),
        omd_oracle.ftrl_step(layers, box, 1.1 * cost, cold.v),
    )
    assert np.array_equal(start, cold.v)  # the last step's dual values are only read


@pytest.mark.parametrize("case", range(24))
def test_the_log_barrier_step_equals_the_oracles(case: int) -> None:
    generator = np.random.default_rng(case)
    layers = Layers(SHAPES[case % len(SHAPES)], 2)
    box = random_box(layers, (0.05, 0.3, 1.0)[case % 3], generator)
    q = uniform_occupancy(layers)
    cost = generator.uniform(0, 2, layers.pairs.shape) * layers.pairs
    expected = log_barrier_oracle.log_barrier_step(layers, box, cost, q)
    step = log_barrier.log_barrier_step(layers, box, cost, q)
    _same(step, expected)
    assert step.gap <= log_barrier.GAP


@pytest.mark.parametrize("case", range(24))
def test_the_confidence_set_equals_the_oracles(case: int) -> None:
    generator = np.random.default_rng(case)
    layers, E = Layers(SHAPES[case % len(SHAPES)], 2), (0.0, 0.5, 40.0)[case % 3]
    N = generator.poisson(300, layers.cells.shape) * layers.cells * 1.0
    noisy = N + generator.normal(0, 1 + E, N.shape) * layers.cells
    visits = N.sum(axis=-1) + generator.normal(0, 1 + E, layers.pairs.shape)
    # Without widening, and with factors so small that rows would have no interior.
    scale = (1.0, 0.3, 1e-9)[case % 4 % 3]
    constants = Constants(layers, 1000, 0.1, 0.1, scale)
    ln_iota = confidence.log_iota(layers, constants.K, constants.delta)
    counts = confidence.post_process(layers, noisy, visits, E)
    expected = confidence_oracle.confidence_set(layers, counts, ln_iota, scale)
    box = constants.confidence_set(noisy, visits, E)
    np.testing.assert_allclose(box.lower, expected.lower, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(box.upper, expected.upper, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(box.widened, expected.widened, atol=1e-14)


@pytest.mark.parametrize("case", range(24))
def test_upper_occupancy_bounds_equal_the_oracles(case: int) -> None:
    generator = np.random.default_rng(case)
    layers = Layers(SHAPES[case % len(SHAPES)], 2)
    box = random_box(layers, (0.05, 0.3, 1.0)[case % 3], generator)
    policy = random_policy(layers, generator)
    expected = confidence_oracle.upper_occupancy(layers, box, policy)
    np.testing.assert_allclose(
        confidence.upper_occupancy(layers, box, policy), expected, rtol=1e-12
    )


def test_costs_that_are_no_numbers_are_refused() -> None:
    layers = Layers((1, 2, 2, 1), 2)
    q, none = uniform_occupancy(layers), np.full(layers.pairs.shape, np.nan)
    with pytest.raises(LearnerError, match="FTRL"):
        omd.ftrl_step(layers, everything(layers), none)
    with pytest.raises(LearnerError, match="log-barrier"):
        log_barrier.log_barrier_step(layers, everything(layers), none, q)
