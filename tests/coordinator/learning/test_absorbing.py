from __future__ import annotations

import numpy as np

from riffle.coordinator.learning.planning import (
    estimate_rewards,
    estimate_transition,
    infrequent,
    value,
)


def test_rare_tuples_go_to_the_absorbing_state() -> None:
    counts = np.array([[[[60.0, 30.0, 10.0]], [[5.0, 5.0, 0.0]], [[0.0, 0.0, 0.0]]]])
    W = infrequent(counts, 10.0)
    P = estimate_transition(counts, W)
    assert W[0, :, 0].tolist() == [[False, False, True], [True] * 3, [True] * 3]
    assert np.allclose(P[0, :, 0], np.array([[0.6, 0.3, 0.0], [0, 0, 0], [0, 0, 0]]))


def test_the_absorbing_state_earns_nothing() -> None:
    P = np.zeros((3, 1, 1, 1))
    P[0], P[1] = 0.5, 0.25
    r = np.ones((3, 1, 1))
    policy = np.zeros((3, 1), dtype=np.int64)
    assert float(value(P, r, np.ones(1), policy)) == 1 + 0.5 + 0.125


def test_rewards_are_clipped_ratios() -> None:
    rewards = np.array([-5.0, 20.0, 120.0, 3.0])
    visits = np.array([10.0, 40.0, 100.0, 0.0])
    assert estimate_rewards(rewards, visits).tolist() == [0.0, 0.5, 1.0, 0.0]
