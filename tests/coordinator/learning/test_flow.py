"""Flow-consistent counts against their definition, an independent solver and stated variances."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import lsq_linear

from riffle.common.mechanism.counters import CounterLayout, Sizes
from riffle.common.mechanism.policy import Mixture
from riffle.coordinator.learning.learner import FloatArray
from riffle.coordinator.learning.postprocess import (
    adjoint,
    conserve,
    divergence,
    imbalance,
    leverage,
)
from riffle.experiments.simulator import joint_counts
from riffle.node_client.environments.tabular import riverswim
from tests.coordinator.learning.flow_projection import project_flow


def _counts(n: int, seed: int, states: int = 4, horizon: int = 6) -> FloatArray:
    """True transition counts of n users of two policies."""
    mdp = riverswim(states, horizon)
    generator = np.random.default_rng(seed)
    policies = generator.integers(0, 2, (2, horizon, states))
    mixture = Mixture.from_probabilities(policies, np.array([0.5, 0.5]))
    N = joint_counts(mdp, mixture, n, generator).sum(axis=-1)
    return np.asarray(N, dtype=np.float64)


def _equations(n: float, count: int) -> FloatArray:
    b = np.zeros(count)
    b[0] = n
    return b


def test_true_counts_satisfy_the_equations_and_stay_as_they_are() -> None:
    N = _counts(1000, 1)
    assert np.allclose(divergence(N), _equations(1000, 21))
    assert np.allclose(conserve(N, 1000), N)
    assert np.allclose(conserve(N, 1000, visits=N.sum(-1), ratio=2.0), N)
    assert np.allclose(project_flow(N, 1000).transitions, N)


@given(
    seed=st.integers(0, 2**32 - 1), X=st.integers(1, 4), A=st.integers(1, 3), H=st.integers(1, 4)
)
def test_adjoint_is_that_of_divergence(seed: int, X: int, A: int, H: int) -> None:
    generator = np.random.default_rng(seed)
    N = generator.normal(size=(H, X, A, X))
    multipliers = generator.normal(size=1 + (H - 1) * X)
    inner = float((adjoint(multipliers, N.shape) * N).sum())
    assert inner == pytest.approx(float(multipliers @ divergence(N)), abs=1e-9)


@given(
    seed=st.integers(0, 2**32 - 1),
    X=st.integers(1, 4),
    A=st.integers(1, 3),
    H=st.integers(1, 4),
    scale=st.floats(0.1, 100),
)
def test_the_projection_carries_its_certificate(
    seed: int, X: int, A: int, H: int, scale: float
) -> None:
    c = np.random.default_rng(seed).normal(5, scale, size=(H, X, A, X))
    projection = project_flow(c, 50.0)
    assert projection.transitions.min() >= 0
    assert np.abs(divergence(projection.transitions) - _equations(50, 1 + (H - 1) * X)).max() < 1e-6
    assert projection.gap < 1e-6


def test_the_projection_equals_that_of_a_general_solver() -> None:
    c = np.random.default_rng(3).normal(2, 6, size=(3, 2, 2, 2))
    B = divergence(np.eye(24).reshape(24, 3, 2, 2, 2)).T
    b = _equations(10, len(B))
    oracle = lsq_linear(
        np.concatenate([np.eye(24), 1e4 * B]),
        np.concatenate([c.ravel(), 1e4 * b]),
        bounds=(0, np.inf),
        method="bvls",
        tol=1e-14,
    )
    assert np.allclose(project_flow(c, 10).transitions.ravel(), oracle.x, atol=1e-4)


def test_conserving_counts_is_weighted_least_squares() -> None:
    """Family paper: transitions and visits as one regression on free counts, solved densely."""
    generator = np.random.default_rng(5)
    shape, n, ratio = (3, 2, 2, 2), 40.0, 0.5
    c, v = generator.normal(5, 3, size=shape), generator.normal(10, 3, size=shape[:-1])
    B = divergence(np.eye(24).reshape(24, *shape)).T
    S = np.kron(np.eye(12), np.ones((1, 2)))
    precision = np.eye(24) + ratio * S.T @ S
    kkt = np.block([[precision, B.T], [B, np.zeros((len(B), len(B)))]])
    right = np.concatenate([c.ravel() + ratio * S.T @ v.ravel(), _equations(n, len(B))])
    N = np.linalg.solve(kkt, right)[:24]
    assert np.allclose(conserve(c, n, visits=v, ratio=ratio).ravel(), N)


@pytest.mark.parametrize("ratio", [0.0, 0.5])
def test_with_a_support_only_possible_transitions_carry_noise(ratio: float) -> None:
    """The same regression on the free counts of possible transitions, solved densely."""
    possible = CounterLayout(
        Sizes(3, 2, 3), "joint", None, riverswim(3, 3).declaration.support
    ).possible
    generator, n, free = np.random.default_rng(5), 40.0, np.flatnonzero(possible)
    c = generator.normal(5, 3, size=possible.shape) * possible
    v = generator.normal(10, 3, size=possible.shape[:-1]) * possible.any(axis=-1)
    B = divergence(np.eye(possible.size).reshape(-1, *possible.shape)).T[:, free]
    S = np.kron(np.eye(v.size), np.ones((1, 3)))[:, free]
    precision = np.eye(free.size) + ratio * S.T @ S
    kkt = np.block([[precision, B.T], [B, np.zeros((len(B), len(B)))]])
    right = [c.ravel()[free] + ratio * S.T @ v.ravel(), _equations(n, len(B))]
    expected = np.zeros(possible.size)
    expected[free] = np.linalg.lstsq(kkt, np.concatenate(right), rcond=None)[0][: free.size]
    visits = {"visits": v, "ratio": ratio} if ratio else {}
    N = conserve(c, n, possible=possible, **visits)  # type: ignore[arg-type]
    assert np.allclose(N.ravel(), expected)


def test_leverage_is_the_variance_of_what_breaks_the_equations() -> None:
    support = riverswim(3, 3).declaration.support
    for layout in (
        CounterLayout(Sizes(3, 2, 3), "joint", None, support),
        CounterLayout(Sizes(3, 2, 3), "joint"),
    ):
        possible = layout.possible
        units = np.eye(possible.size).reshape(-1, *possible.shape)
        columns = imbalance(units, 0.0, possible).reshape(possible.size, -1)
        shares = np.where(possible.ravel(), np.diag(columns), 0.0)
        assert np.allclose(leverage(possible).ravel(), shares)


def test_variance_reduction_is_as_stated() -> None:
    """RiverSwim-v0, sd 18: the equations remove 21 of 192 parts; non-negativity far more.

    Over 200 draws a mean square has a relative deviation of about 0.7 %; 3 % is allowed.
    """
    N = _counts(5000, 2)
    generator = np.random.default_rng(7)
    c = N + generator.normal(0, 18, size=(200, *N.shape))
    error = ((conserve(c, 5000) - N) ** 2).mean() / 18**2
    assert error == pytest.approx(1 - 21 / 192, rel=0.03)
    projected = np.stack([project_flow(row, 5000).transitions for row in c])
    clipped = np.maximum(c, 0)
    assert ((projected - N) ** 2).mean() < 0.5 * 18**2
    assert ((projected - N) ** 2).mean() < 0.9 * ((clipped - N) ** 2).mean()
    states = (conserve(c, 5000) - N).sum(axis=(-2, -1)).var() / (8 * 18**2)
    assert states < 0.6


def test_counts_of_a_batch_a_step_get_their_totals() -> None:
    c = np.random.default_rng(1).normal(3, 2, size=(2, 3, 2, 2, 2))
    totals = conserve(c[..., None, :, :, :], 30)[..., 0, :, :, :]
    assert np.allclose(totals.sum(axis=(-3, -2, -1)), 30)
    assert np.allclose(totals - c, (30 - c.sum(axis=(-3, -2, -1), keepdims=True)) / 8)


def test_negative_n_is_refused() -> None:
    with pytest.raises(ValueError, match="n must be"):
        project_flow(np.zeros((1, 1, 1, 1)), -1.0)
