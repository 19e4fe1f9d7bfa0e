"""The Local Privatizer: noise levels, and messages that hide one user."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from scipy import stats

from riffle.coordinator.learning.privatizers import (
    NO_NOISE,
    AdditiveNoise,
    LocalPrivatizer,
    Sensitivity,
    noise_of_draw,
)


def test_without_noise_every_sum_is_exact() -> None:
    stream = np.random.default_rng(0).uniform(size=(20, 3))
    privatizer = LocalPrivatizer((3,), NO_NOISE, np.random.default_rng(0))
    for t in range(20):
        assert np.allclose(privatizer.add(stream[t]), stream[: t + 1].sum(axis=0))


def test_the_noise_adds_up_over_users() -> None:
    copies, noise = 4_000, AdditiveNoise("laplace", 3.0)
    privatizer = LocalPrivatizer((copies,), noise, np.random.default_rng(2))
    for t in range(1, 41):
        released = privatizer.add(np.zeros(copies))
        assert privatizer.terms(t) * privatizer.noise.variance == t * 18.0
    # Nearly Gaussian after 40 users; chi-square at level 1e-4, with 20 % slack for the kurtosis.
    law = stats.chi2(copies)
    scaled = float((released**2).sum()) / (40 * 18.0)
    assert 0.9 * law.ppf(5e-5) < scaled < 1.1 * law.ppf(1 - 5e-5)


def test_released_sums_are_not_overwritten_later() -> None:
    privatizer = LocalPrivatizer((1,), NO_NOISE, np.random.default_rng(0))
    first = privatizer.add(np.ones(1))
    privatizer.add(np.ones(1))
    assert first.tolist() == [1.0]


def test_calibrations_are_the_papers_and_the_exact_one() -> None:
    common = partial(noise_of_draw, depth=1, epsilon=1.0, beta=1e-5)
    three, two = Sensitivity.of_cells(18), Sensitivity.of_cells(12)
    assert common("paper", sensitivity=three, H=6).scale == 18.0
    exact = common("exact", sensitivity=two, H=6)
    assert (exact.kind, round(exact.variance)) == ("gaussian", 334)
    bandit = common("exact", sensitivity=Sensitivity.of_cells(2), H=1)
    assert (bandit.kind, bandit.scale) == ("laplace", 4.0)


def test_laplace_messages_keep_the_likelihood_ratio_within_epsilon() -> None:
    sensitivity = Sensitivity.of_cells(1)
    noise = noise_of_draw("exact", sensitivity=sensitivity, H=1, depth=1, epsilon=0.7, beta=1e-9)
    message = np.linspace(-60, 60, 1001)[:, None] + np.zeros(2)
    law = stats.laplace(scale=noise.scale)
    one, other = np.array([1.0, 0.0]), np.array([0.0, 1.0])
    grid = np.stack(np.meshgrid(message[:, 0], message[:, 0]), axis=-1)
    ratio = (law.logpdf(grid - one) - law.logpdf(grid - other)).sum(axis=-1)
    assert np.abs(ratio).max() == pytest.approx(0.7)
