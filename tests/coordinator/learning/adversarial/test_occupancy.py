"""Layers, occupancy measures, and the best fixed policy against brute force."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from riffle.coordinator.learning.adversarial.layered import (
    Layers,
    best_policy,
    induced_policy,
    induced_transitions,
    occupancy,
    state_action,
    uniform_occupancy,
    uniform_policy,
    violation,
)
from tests.coordinator.learning.adversarial.worlds import SHAPES, random_policy, transitions


@given(st.sampled_from(SHAPES), st.integers(1, 3), st.integers(0, 10**6))
def test_occupancy_measures_are_in_the_polytope_and_induce_their_policy(
    shape: tuple[int, ...], A: int, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    layers = Layers(shape, A)
    P, policy = transitions(layers, generator), random_policy(layers, generator)
    q = occupancy(P, policy)
    assert violation(layers, q) < 1e-12
    np.testing.assert_allclose(induced_policy(layers, q), policy, atol=1e-9)
    np.testing.assert_allclose(induced_transitions(layers, q), P, atol=1e-9)


def test_the_first_occupancy_measure_is_uniform_on_every_layer() -> None:
    layers = Layers((1, 3, 2, 1), 2)
    q = uniform_occupancy(layers)
    assert q[1, 0, 0, 0] == pytest.approx(1 / 12)
    assert violation(layers, q) < 1e-15
    np.testing.assert_allclose(induced_policy(layers, q), uniform_policy(layers))


def test_violations_are_seen() -> None:
    layers = Layers((1, 2, 1), 2)
    q = uniform_occupancy(layers)
    q[1, 0, 0, 0] += 0.1
    assert violation(layers, q) == pytest.approx(0.1)


@pytest.mark.parametrize("seed", range(10))
def test_the_best_fixed_policy_is_the_best_of_all_policies(seed: int) -> None:
    generator = np.random.default_rng(seed)
    layers = Layers((1, 2, 2, 1), 2)
    P = transitions(layers, generator)
    loss = generator.uniform(0, 1, layers.pairs.shape) * layers.pairs
    states = [tuple(state) for state in np.argwhere(layers.states)]
    values = []
    for actions in itertools.product(range(layers.A), repeat=len(states)):
        policy = np.zeros(layers.pairs.shape)
        for (h, x), a in zip(states, actions, strict=True):
            policy[h, x, a] = 1.0
        values.append((state_action(P, policy) * loss).sum())
    best, value = best_policy(layers, P, loss)
    assert value == pytest.approx(min(values), abs=1e-12)
    chosen = np.eye(layers.A)[best] * layers.pairs
    assert (state_action(P, chosen) * loss).sum() == pytest.approx(value)


@pytest.mark.parametrize("widths", [(1,), (2, 1), (1, 0, 1), (1, 3)])
def test_invalid_layers_are_refused(widths: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="layer"):
        Layers(widths, 2)
