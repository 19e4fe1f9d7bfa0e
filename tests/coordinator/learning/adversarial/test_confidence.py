"""The confidence set of Eq. 3.1: coverage, consistency, and what an empty set becomes."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from riffle.coordinator.learning.adversarial.confidence import (
    MARGIN,
    box,
    confidence_set,
    estimate,
    everything,
    log_iota,
    post_process,
    upper_occupancy,
)
from riffle.coordinator.learning.adversarial.layered import Layers, occupancy
from riffle.coordinator.learning.adversarial.omd import ftrl_step
from tests.coordinator.learning.adversarial.worlds import (
    SHAPES,
    holds,
    random_box,
    random_policy,
    transitions,
)

LAYERS = Layers((1, 3, 3, 3, 1), 2)


@pytest.mark.parametrize("noise", [0.0, 20.0])
def test_the_set_holds_the_true_transitions_at_the_stated_rate(noise: float) -> None:
    """Lemma 3.1: all rows together in at least 1 - 6 delta of cases; refuted at level 1e-6."""
    generator = np.random.default_rng(3)
    delta, K, runs = 0.05, 400, 300
    held = 0
    for _ in range(runs):
        P = transitions(LAYERS, generator)
        n = generator.integers(0, K, LAYERS.pairs.shape)
        N = generator.multinomial(n, np.where(LAYERS.cells, P, 0) + _rest(P)).astype(float)
        N *= LAYERS.cells
        cells = N + generator.uniform(-noise / 4, noise / 4, N.shape)
        visits = N.sum(axis=-1) + generator.uniform(-noise / 4, noise / 4, n.shape)
        counts = post_process(LAYERS, cells, visits, noise)
        held += holds(confidence_set(LAYERS, counts, log_iota(LAYERS, K, delta)), P, LAYERS)
    assert stats.binom.cdf(held, runs, 1 - 6 * delta) > 1e-6


def _rest(P: np.ndarray) -> np.ndarray:
    """Rows of padding states need a distribution to draw from."""
    rest = np.zeros_like(P)
    rest[..., 0] = 1 - P.sum(axis=-1)
    return rest


def test_private_counts_satisfy_assumption_2_3() -> None:
    generator = np.random.default_rng(0)
    E = 40.0
    true = generator.integers(0, 100, LAYERS.cells.shape) * LAYERS.cells * 1.0
    noisy = true + generator.uniform(-E / 4, E / 4, true.shape)
    visits = true.sum(axis=-1) + generator.uniform(-E / 4, E / 4, LAYERS.pairs.shape)
    counts = post_process(LAYERS, noisy, visits, E)
    np.testing.assert_allclose(counts.transitions.sum(axis=-1), counts.visits)
    assert (counts.visits >= true.sum(axis=-1) - 1e-9)[LAYERS.pairs].all()
    assert (np.abs(counts.visits - true.sum(axis=-1)) <= E + 1e-9)[LAYERS.pairs].all()
    assert (np.abs(counts.transitions - true) <= E + 1e-9).all()
    assert (counts.transitions[LAYERS.cells] > 0).all()
    assert not counts.transitions[~LAYERS.cells].any()


def test_the_width_is_eq_3_1() -> None:
    layers = Layers((1, 2, 1), 1)
    transitions_, visits = np.zeros((2, 2, 1, 2)), np.zeros((2, 2, 1))
    transitions_[0, 0, 0], visits[0, 0, 0] = [300.0, 700.0], 1000.0
    counts = post_process(layers, transitions_, visits, 0.0)
    got = confidence_set(layers, counts, 5.0)
    beta = math.sqrt(2 * 0.3 * 0.7 * 5 / 1000) + 35 / 1000
    np.testing.assert_allclose(got.upper[0, 0, 0], [0.3 + beta, 0.7 + beta])
    np.testing.assert_allclose(got.lower[0, 0, 0], [0.3 - beta, 0.7 - beta])
    half = confidence_set(layers, counts, 5.0, scale=0.5)
    np.testing.assert_allclose(half.upper[0, 0, 0], [0.3 + beta / 2, 0.7 + beta / 2])


def test_without_counts_the_set_holds_all_transitions() -> None:
    zero = post_process(LAYERS, np.zeros(LAYERS.cells.shape), np.zeros(LAYERS.pairs.shape), 0.0)
    known = confidence_set(LAYERS, zero, 10.0)
    np.testing.assert_array_equal(known.lower[LAYERS.cells], 0.0)
    np.testing.assert_array_equal(known.upper[LAYERS.cells], 1.0)
    np.testing.assert_allclose(estimate(LAYERS, zero, 10.0)[0][1, 0, 0], 1 / 3)


@given(st.sampled_from(SHAPES), st.floats(0, 2), st.floats(0, 0.3), st.integers(0, 10**6))
def test_an_empty_row_gets_the_least_widening(
    shape: tuple[int, ...], spread: float, width: float, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    layers = Layers(shape, 2)
    centre = generator.uniform(-spread / 4, spread, layers.cells.shape)
    got = box(layers, centre, np.full(centre.shape, width))
    lower, upper = got.lower.sum(axis=-1), got.upper.sum(axis=-1)
    several = layers.pairs & (layers.successors > 1)
    assert (lower[several] <= 1 - MARGIN + 1e-12).all()
    assert (upper[several] >= 1 + MARGIN - 1e-12).all()
    touched = (got.widened > 1e-9) & several
    tight = np.minimum(1 - MARGIN - lower, upper - 1 - MARGIN)
    np.testing.assert_allclose(tight[touched], 0.0, atol=1e-9)
    assert (got.widened[~several] == 0).all()


def test_lower_bounds_above_one_give_the_projection_on_the_simplex() -> None:
    layers = Layers((1, 3, 1), 1)
    centre = np.zeros(layers.cells.shape)
    centre[0, 0, 0] = [0.9, 0.6, 0.1]
    got = box(layers, centre, np.zeros(centre.shape))
    assert got.widened[0, 0, 0] == pytest.approx(0.25, abs=1e-5)
    np.testing.assert_allclose(got.lower[0, 0, 0], [0.65, 0.35, 0.0], atol=1e-5)
    step = ftrl_step(layers, got, np.zeros(layers.pairs.shape))
    np.testing.assert_allclose(step.transitions[0, 0, 0, :2], [0.65, 0.35], atol=1e-5)


@given(st.sampled_from(SHAPES), st.floats(0.01, 1.0), st.integers(0, 10**6))
def test_upper_occupancy_bounds_every_member_of_the_set(
    shape: tuple[int, ...], width: float, seed: int
) -> None:
    """u >= q of any member of the set, and of the step's own q; on a single P it is q."""
    generator = np.random.default_rng(seed)
    layers = Layers(shape, 2)
    box_ = random_box(layers, width, generator)
    cost = generator.uniform(0, 5, layers.pairs.shape) * layers.pairs
    step = ftrl_step(layers, box_, cost)
    u = upper_occupancy(layers, box_, step.policy)
    assert (u >= step.q.sum(axis=-1) - 1e-9).all()
    assert (u <= 1 + 1e-9).all()
    P = step.transitions
    one = box(layers, P, np.zeros(P.shape))
    policy = random_policy(layers, generator)
    exact = occupancy(P, policy).sum(axis=-1)
    np.testing.assert_allclose(upper_occupancy(layers, one, policy), exact, atol=1e-4)


def test_upper_occupancy_is_reached_by_a_member_of_the_set() -> None:
    layers = Layers((1, 2, 2, 1), 1)
    u = upper_occupancy(layers, everything(layers), np.ones(layers.pairs.shape) * layers.pairs)
    np.testing.assert_allclose(u[layers.pairs], 1.0)
