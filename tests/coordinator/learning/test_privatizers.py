"""Noise, sensitivities and the bounds that learners rely on."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from riffle.common.mechanism.counters import CounterLayout, Episode, Families, Sizes
from riffle.coordinator.learning.privatizers import (
    NO_NOISE,
    AdditiveNoise,
    LocalPrivatizer,
    NoiseKind,
    Sensitivity,
    least_noise,
)
from tests.coordinator.learning.ucbvi_oracle import contribution, precision

SIZES = Sizes(X=3, A=2, H=4)


def episodes() -> st.SearchStrategy[Episode]:
    def array(size: int, bound: int) -> st.SearchStrategy[np.ndarray[tuple[int], np.dtype]]:
        return st.lists(st.integers(0, bound - 1), min_size=size, max_size=size).map(np.array)

    return st.builds(
        Episode, array(SIZES.H + 1, SIZES.X), array(SIZES.H, SIZES.A), array(SIZES.H, 2)
    )


@given(one=episodes(), other=episodes(), families=st.sampled_from(["paper", "lean"]))
def test_replacing_a_user_moves_the_counters_no_further_than_stated(
    one: Episode, other: Episode, families: Families
) -> None:
    layout = CounterLayout(SIZES, families)
    stated = Sensitivity.of_cells(layout.cells)
    moved = contribution(layout, one) - contribution(layout, other)
    assert np.abs(moved).sum() <= stated.l1
    assert np.linalg.norm(moved) <= stated.l2 + 1e-12


@pytest.mark.parametrize("families", ["paper", "lean"])
def test_the_stated_sensitivity_is_reached(families: Families) -> None:
    layout = CounterLayout(SIZES, families)
    ones = np.ones(SIZES.H, dtype=np.int64)
    one = Episode(np.zeros(SIZES.H + 1, dtype=np.int64), 0 * ones, ones)
    other = Episode(np.ones(SIZES.H + 1, dtype=np.int64), ones, ones)
    moved = contribution(layout, one) - contribution(layout, other)
    stated = Sensitivity.of_cells(layout.cells)
    assert np.abs(moved).sum() == stated.l1
    assert np.linalg.norm(moved) == pytest.approx(stated.l2)


def test_sensitivities_of_families_add_up() -> None:
    together = Sensitivity.of_cells(12) + Sensitivity.of_losses(9)
    assert together == Sensitivity(33.0, math.sqrt(33.0))
    assert Sensitivity(2.0, 3.0).repeated(4) == Sensitivity(8.0, 6.0)


@pytest.mark.parametrize(("kind", "law"), [("laplace", stats.laplace), ("gaussian", stats.norm)])
def test_draws_have_the_stated_law(kind: NoiseKind, law: stats.rv_continuous) -> None:
    noise = AdditiveNoise(kind, 3.0)
    drawn = noise.draw(np.random.default_rng(1), (20_000,))
    # One test at level 1e-3 a kind, with a fixed seed.
    assert stats.kstest(drawn, law(scale=3.0).cdf).pvalue > 1e-3
    assert noise.variance == pytest.approx(float(law(scale=3.0).var()))


def test_laplace_noise_is_tight_and_gaussian_noise_meets_its_delta() -> None:
    sensitivity = Sensitivity.of_cells(12)
    assert least_noise(Sensitivity(24.0, 1e9), 0.5, 1e-5) == AdditiveNoise("laplace", 48.0)
    least = least_noise(sensitivity, 1.0, 1e-5)
    assert least.kind == "gaussian"
    sigma = least.scale
    ratio = sensitivity.l2 / sigma
    # Balle and Wang 2018, Theorem 8, written out.
    delta = stats.norm.cdf(ratio / 2 - 1 / ratio) - math.e * stats.norm.cdf(-ratio / 2 - 1 / ratio)
    assert delta == pytest.approx(1e-5, rel=1e-6)


def test_the_least_noise_depends_on_the_number_of_counters() -> None:
    assert least_noise(Sensitivity.of_cells(1), 1.0, 1e-5).kind == "laplace"
    assert least_noise(Sensitivity.of_cells(12), 1.0, 1e-5).kind == "gaussian"


@pytest.mark.parametrize("kind", ["laplace", "gaussian"])
@pytest.mark.parametrize("terms", [1, 3, 50])
def test_sums_stay_within_their_deviation(kind: NoiseKind, terms: int) -> None:
    noise, log_term, runs = AdditiveNoise(kind, 2.0), 3.0, 20_000
    sums = noise.draw(np.random.default_rng(terms), (terms, runs)).sum(axis=0)
    outside = int((np.abs(sums) > noise.deviation(terms, log_term)).sum())
    # At most 2 exp(-3) = 0.0996 a sum; a binomial test at level 1e-6.
    assert outside <= stats.binom.ppf(1 - 1e-6, runs, 2 * math.exp(-log_term))


def test_no_noise_is_zero() -> None:
    generator = np.random.default_rng(0)
    assert not NO_NOISE.draw(generator, (3,)).any()
    assert (NO_NOISE.variance, NO_NOISE.deviation(5, 9.0)) == (0.0, 0.0)


def test_precision_is_four_deviations_with_the_union_bound_inside() -> None:
    privatizer = LocalPrivatizer((2,), AdditiveNoise("gaussian", 1.0), np.random.default_rng(0))
    E = precision(privatizer, 9, counters=10, times=20, delta=0.1)
    assert pytest.approx(4 * math.sqrt(2 * 9 * math.log(2 * 10 * 20 / 0.1))) == E
