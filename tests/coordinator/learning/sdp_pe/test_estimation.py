from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from riffle.common.mechanism.counters import Families, Sizes
from riffle.common.mechanism.policy import Mixture
from riffle.coordinator.learning.evidence import (
    Evidence,
    batch_weights,
    pool,
    visit_weights,
)
from riffle.coordinator.learning.learner import BoolArray, FloatArray
from riffle.coordinator.learning.planning import Model, plan, value
from riffle.coordinator.learning.postprocess import consistent
from riffle.coordinator.learning.sdp_pe.algorithm import literal_radius
from riffle.coordinator.learning.sdp_pe.constants import PRACTICAL
from riffle.coordinator.learning.sdp_pe.enumeration import EnumeratedPolicies
from riffle.coordinator.learning.sdp_pe.estimation import (
    LIKELY,
    Estimator,
    _resample,
    bootstrap,
)
from tests.coordinator.learning.worlds import random_model

SIZES = Sizes(2, 2, 2)
_POLICIES = np.array(list(product(range(2), repeat=4))).reshape(16, 2, 2)
FAMILIES: tuple[Families, ...] = ("paper", "lean", "joint")
EVERYTHING = Mixture.from_probabilities(_POLICIES, np.full(16, 1 / 16))


def _evidence(n: float, variance: float, seed: int, world: int = 1) -> Evidence:
    """Counts of n episodes spread evenly over (x, a), with Gaussian noise and sampling error."""
    model, _ = random_model(SIZES, world)
    generator = np.random.default_rng(seed)
    transitions = n / 4 * model.P
    noisy = transitions + generator.normal(size=transitions.shape) * np.sqrt(transitions + variance)
    R = n / 4 * model.r
    rewards = R + generator.normal(size=R.shape) * np.sqrt(R + variance)
    mixtures = (EVERYTHING,)
    return Evidence(n, noisy, noisy.sum(-1), rewards, *_noise(noisy, variance), mixtures)


def _noise(N: np.ndarray, variance: float) -> tuple[FloatArray, FloatArray, FloatArray, BoolArray]:
    """Variances of the noise on transitions N, their sums and rewards; all is possible."""
    v = np.full(N.shape[-4:], variance)
    return v, v.sum(-1), v[..., 0], np.ones(v.shape, dtype=np.bool_)


def _estimator() -> Estimator:
    W = np.zeros((SIZES.H, SIZES.X, SIZES.A, SIZES.X), dtype=np.bool_)
    weights = (np.ones(()),)
    return Estimator(H=SIZES.H, W=W, E=0.0, add_on=False, least_visits=0.0, weights=weights)


def test_literal_radius_is_line_9() -> None:
    assert literal_radius(Sizes(1, 1, 1), 4, 0.5, 9.0, 1.0) == pytest.approx(2 * (1.5 + 1.125))
    assert literal_radius(Sizes(4, 2, 6), 100, 3.0, 2.0, 2.0) == pytest.approx(
        4 * ((8 * 216 * 2 / 100) ** 0.5 + 64 * 2 * 7776 * 3 * 2 / 100)
    )


def test_the_radius_covers_the_optimal_policys_apparent_gap() -> None:
    """Level 0.95 over 200 independent data sets, at the practical scale: at least 180 covered."""
    model, d1 = random_model(SIZES, 1)
    best = plan(model.P, model.r, d1).policy
    active = EnumeratedPolicies.all_policies(SIZES, d1)
    covered = 0
    for seed in range(200):
        parts = (_evidence(1000, 50.0, seed),)
        P, r = _estimator().model(parts)
        gap = float(plan(P, r, d1).value - value(P, r, d1, best))
        radius = bootstrap(
            np.random.default_rng(seed), parts, _estimator(), active, level=0.95, families="lean"
        ).radius
        covered += gap <= PRACTICAL.radius_scale * radius
    assert covered >= 180


def test_the_radius_shrinks_with_the_data() -> None:
    active = EnumeratedPolicies.all_policies(SIZES, np.array([1.0, 0.0]))
    for families in FAMILIES:
        radii = [
            bootstrap(
                np.random.default_rng(1),
                (_evidence(n, 50.0, 3),),
                _estimator(),
                active,
                level=0.99,
                families=families,
            ).radius
            for n in (100, 1000, 100_000)
        ]
        assert radii[0] > radii[1] >= radii[2] >= 0


def _bandit(counts: np.ndarray, variance: float) -> Evidence:
    """Family `joint`, X = 1: counters (..., A, 2) of reward 0 and 1 with noise of this variance."""
    N, R = counts.sum(-1)[..., None, None, :, None], counts[..., 1][..., None, None, :]
    arms = counts.shape[-2]
    even = Mixture.from_probabilities(np.arange(arms).reshape(arms, 1, 1), np.full(arms, 1 / arms))
    n = 400.0 * arms
    v, both, _, possible = _noise(N, 2 * variance)
    return Evidence(n, N, N[..., 0], R, v, both, both / 2, possible, (even,))


def _arms(arms: int) -> Estimator:
    W = np.zeros((1, 1, arms, 1), dtype=np.bool_)
    return Estimator(1, W, E=0.0, add_on=False, least_visits=1.0, weights=(np.ones(()),))


@pytest.mark.parametrize("r", [0.5, 0.9])
def test_draws_of_joint_counts_spread_as_the_counts_do(r: float) -> None:
    """Standard deviations of 4000 estimates and 4000 draws: 10 % apart is over six errors."""
    generator, variance = np.random.default_rng(1), 30.0
    visits = generator.poisson(400, (4000, 1))
    ones = generator.binomial(visits, r)
    true = np.stack([visits - ones, ones], axis=-1)
    data = true + generator.normal(0, variance**0.5, true.shape)
    observed = _arms(1).model([_bandit(data, variance)]).r.std()
    centre = _bandit(np.array([[400 * (1 - r), 400 * r]]), variance)
    counts = consistent(centre.transitions, centre.visits, 0.0, add_on=False)
    drawn = _resample(generator, 4000, centre, counts, np.full((1, 1, 1), r), "joint")
    assert _arms(1).model([drawn]).r.std() == pytest.approx(observed, rel=0.1)


def test_an_uncertain_policy_keeps_its_place() -> None:
    """Arm 1 was hardly pulled: its estimate says nothing, so the radius is as wide as its gap."""
    counts = np.array([[40.0, 360.0], [3.0, 3.0]])
    active = EnumeratedPolicies.all_policies(Sizes(1, 2, 1), np.ones(1))
    part, generator = _bandit(counts, 30.0), np.random.default_rng(1)
    resampled = bootstrap(generator, (part,), _arms(2), active, level=0.99, families="joint")
    model = _arms(2).model([part])
    assert resampled.radius >= float(np.ptp(model.r)) > 0.3
    assert 0 < (resampled.likely == 1).mean() < 0.6


def test_weights_favour_the_batch_with_more_signal() -> None:
    large, noisy = _evidence(10_000, 50.0, 1), _evidence(10, 50.0, 2)
    w = batch_weights((large, noisy))
    assert w[0] > 0.9
    assert w[1] < 0.1
    both = pool((large, noisy), batch_weights((large, noisy)))
    assert np.allclose(both.transitions, w[0] * large.transitions + w[1] * noisy.transitions)
    assert np.allclose(both.transition_variance, 50 * (w[0] ** 2 + w[1] ** 2))
    alone = pool((noisy,), batch_weights((noisy,)))
    assert alone.transitions is not None
    assert np.all(alone.transition_variance == 50)


def test_a_batch_that_never_goes_there_adds_no_noise_there() -> None:
    """Pairs that the narrow batch does not take are estimated from the other batch alone."""
    model, d1 = random_model(SIZES, 1)
    one = Mixture.single(np.zeros((2, 2), dtype=np.int64))
    everywhere = _evidence(1000, 50.0, 1)
    narrow = replace(_evidence(1000, 50.0, 2), mixtures=(one,))
    weights = visit_weights((everywhere, narrow), model.P, d1)
    assert np.all(weights[1][..., 1] == 0)
    assert np.all(weights[1][0, 0, 0] > weights[0][0, 0, 0])
    both = pool((everywhere, narrow), weights)
    expected = (weights[0][..., None] * everywhere.transitions)[:, :, 1]
    assert np.allclose(both.transitions[:, :, 1], expected)


def test_actions_that_no_active_policy_takes_do_not_widen_the_radius() -> None:
    """A bandit whose second arm is eliminated: only one policy is left, so nothing can beat it."""
    active = EnumeratedPolicies.all_policies(Sizes(1, 2, 1), np.ones(1))
    left, _ = active.eliminate(Model(np.ones((1, 1, 2, 1)), np.array([[[0.9, 0.1]]])), 0.5)
    both = Mixture.from_probabilities(np.array([[[0]], [[1]]]), np.array([0.5, 0.5]))
    counts = np.array([[[[50.0], [50.0]]]])
    noise = _noise(counts, 9.0)
    part = Evidence(100, counts, counts.sum(-1), counts[..., 0] / 2, *noise, (both,))
    W = np.zeros((1, 1, 2, 1), dtype=np.bool_)
    estimator = Estimator(1, W, E=0.0, add_on=False, least_visits=1.0, weights=(np.ones(()),))
    radii = [
        bootstrap(
            np.random.default_rng(1), (part,), estimator, phi, level=0.99, families="lean"
        ).radius
        for phi in (active, left)
    ]
    assert radii[0] > 0.05
    assert radii[1] == 0


def test_draws_one_by_one_have_the_law_of_draws_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large problems are drawn one by one; a quantile of 400 draws is within a third of another."""
    active = EnumeratedPolicies.all_policies(SIZES, np.array([1.0, 0.0]))
    parts = (_evidence(100, 50.0, 3),)

    def radius(seed: int) -> float:
        generator = np.random.default_rng(seed)
        resampled = bootstrap(generator, parts, _estimator(), active, level=0.9, families="joint")
        assert resampled.likely.shape == (LIKELY, SIZES.H, SIZES.X)
        return resampled.radius

    together = radius(1)
    monkeypatch.setattr("riffle.coordinator.learning.sdp_pe.estimation.LARGEST_STACK", 1)
    assert radius(2) == pytest.approx(together, rel=1 / 3)
    assert together > 0
