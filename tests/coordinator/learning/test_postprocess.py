"""Eq. 7 in closed form against an LP solver, Assumption 4, and the absorbing MDP."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.optimize import linprog

from riffle.coordinator.learning.postprocess import (
    consistent,
    estimate_rewards,
    estimate_transition,
    precision,
    project,
)
from tests.coordinator.learning.eq_7 import solve

Floats = NDArray[np.float64]


def _instances(seed: int, count: int, X: int) -> tuple[Floats, Floats, float]:
    """Rows around zero and above, totals that agree with them or not."""
    generator = np.random.default_rng(seed)
    c = generator.normal(0, 20, (count, X)) + generator.choice([0, 50], (count, X))
    total = c.sum(axis=1) + generator.normal(0, 40, count)
    return c, total, float(generator.uniform(0, 30))


def _linear_program(c: Floats, total: float, tolerance: float) -> float | None:
    """t* of Eq. 7 by HiGHS, None when infeasible. Variables n(1..X), t."""
    X = len(c)
    eye, one = np.eye(X), np.ones((X, 1))
    sums = np.append(np.ones(X), 0.0)
    A = np.vstack([np.hstack([eye, -one]), np.hstack([-eye, -one]), sums, -sums])
    b = np.concatenate([c, -c, [total + tolerance, tolerance - total]])
    cost = np.append(np.zeros(X), 1.0)
    result = linprog(cost, A_ub=A, b_ub=b, bounds=[(0, None)] * (X + 1), method="highs")
    return None if result.fun is None else float(result.fun)


@pytest.mark.parametrize("X", [1, 2, 4, 7])
def test_closed_form_is_the_linear_programs_optimum(X: int) -> None:
    c, total, tolerance = _instances(X, 600, X)
    solved = solve(c, total, tolerance)
    for row in range(len(c)):
        optimum = _linear_program(c[row], total[row], tolerance)
        assert solved.feasible[row] == (optimum is not None)
        if optimum is not None:
            assert solved.t[row] == pytest.approx(optimum, abs=1e-6)


@pytest.mark.parametrize("X", [1, 3, 8])
def test_projection_is_feasible_and_certified(X: int) -> None:
    c, total, tolerance = _instances(100 + X, 20_000, X)
    solved = solve(c, total, tolerance)
    sums = solved.n.sum(axis=-1)
    ok = solved.feasible
    assert (solved.n >= 0).all()
    assert (np.abs(sums - total)[ok] <= tolerance + 1e-9).all()
    assert np.abs(solved.excess[ok]).max() <= 1e-9
    assert (solved.n[~ok] == 0).all()
    assert (~ok).any()


def test_projection_is_the_nearest_point() -> None:
    c, total, tolerance = _instances(7, 2000, 4)
    solved = solve(c, total, tolerance)
    generator = np.random.default_rng(8)
    for _ in range(50):
        other = np.maximum(solved.n + generator.normal(0, 5, c.shape), 0)
        inside = (np.abs(other.sum(axis=-1) - total) <= tolerance) & solved.feasible
        nearer = ((other - c) ** 2).sum(-1) < ((solved.n - c) ** 2).sum(-1) - 1e-9
        assert not (nearer & inside).any()


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=6))
def test_consistent_counts_are_left_alone(counts: list[int]) -> None:
    c = np.array(counts, dtype=np.float64)
    assert np.array_equal(project(c, c.sum(), 0.0), c)


def test_invalid_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="tolerance"):
        project(np.zeros((2, 3)), np.zeros(2), -1.0)
    with pytest.raises(ValueError, match="totals of shape"):
        project(np.zeros((2, 3)), np.zeros(3), 1.0)


def test_assumption_4_holds_when_the_noise_is_within_a_quarter_of_E() -> None:
    generator = np.random.default_rng(5)
    X, A, E = 4, 2, 80.0
    true = generator.integers(0, 200, (500, X, A, X)).astype(np.float64)
    transitions = true + generator.uniform(-E / 4, E / 4, true.shape)
    visits = true.sum(-1) + generator.uniform(-E / 4, E / 4, true.shape[:-1])
    counts = consistent(transitions, visits, E)
    assert np.allclose(counts.visits, counts.transitions.sum(-1))
    assert (counts.visits >= true.sum(-1) - 1e-9).all()
    assert (np.abs(counts.visits - true.sum(-1)) <= E + 1e-9).all()
    assert (np.abs(counts.transitions - true) <= E + 1e-9).all()
    assert (counts.transitions > 0).all()


def test_precision_bounds_binomial_noise() -> None:
    """2,000 batches of 200 counters at delta = 0.05: a failure rate above .05 has chance < 1e-6."""
    n, p, counters, delta = 4000, 1 / 64, 200, 0.05
    generator = np.random.default_rng(3)
    noise = generator.binomial(n, p, (2000, counters)) - n * p
    E = precision(n * p * (1 - p), counters, delta)
    assert (np.abs(noise).max(axis=1) > E / 4).mean() <= delta


def test_rare_tuples_go_to_the_absorbing_state() -> None:
    counts = np.array([[[[60.0, 30.0, 10.0]], [[5.0, 5.0, 0.0]], [[0.0, 0.0, 0.0]]]])
    W = counts <= 10.0
    P = estimate_transition(counts, W)
    assert W[0, :, 0].tolist() == [[False, False, True], [True] * 3, [True] * 3]
    assert np.allclose(P[0, :, 0], np.array([[0.6, 0.3, 0.0], [0, 0, 0], [0, 0, 0]]))


def test_rewards_are_clipped_ratios() -> None:
    rewards = np.array([-5.0, 20.0, 120.0, 3.0])
    visits = np.array([10.0, 40.0, 100.0, 0.0])
    assert estimate_rewards(rewards, visits).tolist() == [0.0, 0.5, 1.0, 0.0]
