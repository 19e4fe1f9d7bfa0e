"""Private UCB-VI: privatized counts in, the same planning; bonuses; equality without noise."""

from __future__ import annotations

import math

import numpy as np
import pytest

from riffle.common.mechanism.counters import CounterLayout, Episode, Sizes
from riffle.coordinator.learning.privatizers import (
    NO_NOISE,
    AdditiveNoise,
    BinaryMechanism,
    LocalPrivatizer,
    NoiseLevels,
)
from riffle.coordinator.learning.ucbvi_parameters import Bonus, Trust, layout_of, noise_of
from tests.coordinator.learning.ucbvi_oracle import (
    UCBVI,
    Estimates,
    PrivateUCBVI,
    expectation,
    privatizer_of,
)

SIZES = Sizes(X=2, A=2, H=3)


def episodes(number: int, seed: int) -> list[Episode]:
    generator = np.random.default_rng(seed)
    X, A, H = SIZES.X, SIZES.A, SIZES.H
    return [
        Episode(
            generator.integers(X, size=H + 1),
            generator.integers(A, size=H),
            generator.integers(2, size=H),
        )
        for _ in range(number)
    ]


@pytest.mark.parametrize("trust", ["central", "local"])
@pytest.mark.parametrize("levels", ["paper", "exact"])
def test_without_noise_it_is_UCBVI(trust: Trust, levels: NoiseLevels) -> None:
    K = 12
    layout = layout_of(SIZES, levels)
    privatizer = privatizer_of(trust, NO_NOISE, layout, K, np.random.default_rng(0))
    private, plain = PrivateUCBVI(SIZES, K, layout, privatizer), UCBVI(SIZES, K)
    for one in episodes(K - 1, seed=4):
        assert np.array_equal(private.policy(), plain.policy())
        private.observe(one)
        plain.observe(one)
        assert np.allclose(private.estimates().P, plain.estimates().P)
        assert np.allclose(private.estimates().r, plain.estimates().r)


def test_the_last_users_episode_is_not_added() -> None:
    layout = layout_of(SIZES, "exact")
    privatizer = BinaryMechanism(2, (layout.counters,), NO_NOISE, np.random.default_rng(0))
    learner = PrivateUCBVI(SIZES, 3, layout, privatizer)
    for one in episodes(3, seed=5):
        learner.observe(one)
    assert learner.estimates().N.sum() == 2 * SIZES.H


def test_noise_levels_follow_the_documents_or_the_sensitivity() -> None:
    sizes, K = Sizes(X=4, A=2, H=6), 20_000
    assert noise_of("central", "paper", sizes, K, 1.0, 1e-5).scale == 3 * 6 * 15
    assert noise_of("local", "paper", sizes, K, 1.0, 1e-5).scale == 18
    central = noise_of("central", "exact", sizes, K, 1.0, 1e-5)
    local = noise_of("local", "exact", sizes, K, 1.0, 1e-5)
    # Replacing one user moves 24 cells (2 families, 6 steps, up and down); 15 levels of blocks.
    assert local.variance / 24 == pytest.approx(13.92, abs=0.01)
    assert central.variance == pytest.approx(15 * local.variance)


def test_the_layouts_of_the_two_calibrations() -> None:
    assert layout_of(SIZES, "paper") == CounterLayout(SIZES, "paper")
    assert layout_of(SIZES, "exact") == CounterLayout(SIZES, "lean")


def private(bonus: Bonus, noise: AdditiveNoise = NO_NOISE) -> PrivateUCBVI:
    layout = layout_of(SIZES, "paper")
    privatizer = LocalPrivatizer((layout.counters,), noise, np.random.default_rng(1))
    return PrivateUCBVI(SIZES, 100, layout, privatizer, 0.05, bonus)


def test_the_bonuses_written_out() -> None:
    X, H, N = SIZES.X, SIZES.H, 40.0
    P, r = np.full((H, X, 2, X), 0.5), np.full((H, X, 2), 0.5)
    model = Estimates(
        P, r, np.full((H, X, 2), N), transition_variance=9.0, reward_variance=4.0, E=7.0
    )
    V = np.array([0.0, 2.0])
    PV = expectation(P[0], V)
    learner = private(Bonus(noise_scale=0.2))
    iota = learner.iota
    plain = UCBVI(SIZES, 100, bonus=learner.bonus).exploration(model, 0, V, PV)
    added = 0.2 * math.sqrt(iota * (9.0 * 2.0 + 4.0)) / N
    assert learner.exploration(model, 0, V, PV) == pytest.approx(plain + added)
    literal = private(Bonus("paper"))
    width = literal.qiao / N
    first, second = 2 * math.sqrt(1.0 * width), math.sqrt(2 * width)
    expected = first + second + 20 * H * X * 7.0 * width + 4 * H * math.sqrt(width)
    assert literal.exploration(model, 0, V, PV) == pytest.approx(expected)


def test_the_literal_counts_never_fall_below_the_true_ones_and_keep_within_E() -> None:
    learner = private(Bonus("paper"), AdditiveNoise("gaussian", 3.0))
    true = np.zeros(learner.layout.counters)
    for one in episodes(60, seed=6):
        learner.observe(one)
        true[learner.layout.encode(one)] += 1
        model = learner.estimates()
        N = learner.layout.split(true)["visits"]
        # Holds together for all k with probability 1 - delta; the seed is fixed.
        assert (model.N >= N).all()
        assert (model.N <= N + model.E).all()
        assert np.allclose(model.P.sum(axis=-1), 1)
        assert (model.P > 0).all()


def test_hardly_visited_pairs_do_not_look_rewarding_by_noise_alone() -> None:
    generous, careful = (
        private(Bonus(least_visits=least), AdditiveNoise("gaussian", 30.0)) for least in (0.0, 1.0)
    )
    for one in episodes(10, seed=7):
        generous.observe(one)
        careful.observe(one)
    literal, floored = generous.estimates(), careful.estimates()
    counted = literal.N > 0
    assert (floored.r[counted] <= literal.r[counted]).all()
    assert floored.N.min() == pytest.approx(30.0 * math.sqrt(10))
    assert np.array_equal(floored.P, literal.P)
