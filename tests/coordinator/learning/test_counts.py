from __future__ import annotations

import numpy as np
import pytest

from riffle.common.mechanism.counters import CounterLayout, Families, Sizes
from riffle.coordinator.learning.learner import batch_counts

SIZES = Sizes(X=3, A=2, H=4)


@pytest.mark.parametrize("families", ["paper", "lean", "joint"])
@pytest.mark.parametrize("layer", [None, 2])
def test_variances_are_those_of_the_sums(families: Families, layer: int | None) -> None:
    """Sample variances of 4,000 draws stay within 15 % (6 standard errors) of the stated ones."""
    layout = CounterLayout(SIZES, families, layer)
    generator = np.random.default_rng(1)
    draws = [
        batch_counts(layout, 10, generator.normal(0, 3, layout.counters), 9.0) for _ in range(4000)
    ]
    stated = draws[0]
    transitions = np.stack([d.transitions for d in draws])
    assert transitions.shape[1:] == (layout.layers, 3, 2, 3)
    assert transitions.var(axis=0) == pytest.approx(stated.transition_variance, rel=0.15)
    visits = np.stack([d.visits for d in draws])
    assert visits.var(axis=0) == pytest.approx(stated.visit_variance, rel=0.15)
    assert (stated.rewards is None) == (layer is not None)
    if layer is None:
        rewards = np.stack([d.rewards for d in draws if d.rewards is not None])
        assert rewards.var(axis=0) == pytest.approx(stated.reward_variance, rel=0.15)


def test_wrong_length_is_an_error() -> None:
    with pytest.raises(ValueError, match="expected 96 counters"):
        batch_counts(CounterLayout(SIZES, "lean"), 1, np.zeros(3), 1.0)
