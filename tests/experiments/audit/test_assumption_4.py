"""Assumption 4 (`000`, section III-C) with the real noise law, over 1e4 batches of each kind.

E is `coordinator.learning.postprocess.precision` at delta over all noisy counters that enter. In a
batch the assumption holds when, for every cell, the visits are the sums of the transitions, not
below the true visits, and both are within E of the true counts. At most delta of all batches may
fail: more than the 1e-6 quantile of Binomial(1e4, delta) has probability below 1e-6 at a failure
rate of delta.
"""

import numpy as np
import numpy.typing as npt
import pytest
from scipy import stats

from riffle.common.accounting import calibrate
from riffle.common.mechanism.counters import CounterLayout, Sizes
from riffle.common.mechanism.parameters import Guarantee, Noise
from riffle.common.mechanism.randomness import SystemRandomness
from riffle.common.mechanism.shuffle_model import debias, draw_noise
from riffle.coordinator.learning.postprocess import consistent, precision

BATCHES, ALPHA = 10_000, 1e-6
Floats = npt.NDArray[np.float64]


def exact_noise(layout: CounterLayout, n: int, epsilon: float, beta: float) -> Noise:
    return calibrate(layout, n, Guarantee(epsilon, beta)).noise


def failures(true: Floats, transitions: Floats, visits: Floats, E: float) -> int:
    """Batches in which Assumption 4 does not hold; arrays (batches, layers, X, A[, X])."""
    counts = consistent(transitions, visits, E)
    assert np.allclose(counts.visits, counts.transitions.sum(axis=-1))
    true_visits = true.sum(axis=-1)
    axes = tuple(range(1, true_visits.ndim))
    above = (counts.visits >= true_visits - 1e-6).all(axis=axes)
    near = (np.abs(counts.visits - true_visits) <= E + 1e-6).all(axis=axes)
    each = (np.abs(counts.transitions - true) <= E + 1e-6).all(axis=(*axes, true.ndim - 1))
    return int((~(above & near & each)).sum())


def binomial_noise(
    generator: np.random.Generator, shape: tuple[int, ...], n: int, noise: Noise
) -> Floats:
    """Noise of n users on every counter, its mean taken off."""
    drawn = generator.binomial(n * noise.bits, noise.p, shape)
    return np.asarray(drawn - noise.mean(n), dtype=np.float64)


@pytest.mark.parametrize("delta", [0.1, 0.01])
def test_assumption_4_over_ten_thousand_batches_of_riverswims_size(delta: float) -> None:
    """X=4, A=2, H=6, n=4,096, epsilon 1, beta 1e-5, families ``paper``."""
    layout, n = CounterLayout(Sizes(4, 2, 6), "paper"), 4_096
    noise = exact_noise(layout, n, 1.0, 1e-5)
    counters = layout.counters - int(np.prod(layout.shapes["rewards"]))
    E = precision(noise.variance(n), counters, delta)
    generator = np.random.default_rng(41)
    failed = 0
    for _ in range(10):
        size = BATCHES // 10
        chances = generator.dirichlet(np.full(32, 0.2), (size, 6))
        true = generator.multinomial(n, chances).reshape(size, 6, 4, 2, 4).astype(np.float64)
        transitions = true + binomial_noise(generator, true.shape, n, noise)
        visits = true.sum(-1) + binomial_noise(generator, true.shape[:-1], n, noise)
        failed += failures(true, transitions, visits, E)
    assert failed <= stats.binom.isf(ALPHA, BATCHES, delta)


def test_assumption_4_with_the_mechanisms_own_sampler() -> None:
    """Small batches whose noise bits are drawn one by one from the system's CSPRNG."""
    layout, n, delta = CounterLayout(Sizes(2, 1, 1), "paper"), 64, 0.1
    noise = exact_noise(layout, n, 4.0, 1e-2)
    true = np.array([[[[40.0, 0.0]], [[20.0, 4.0]]]])
    both = np.concatenate([true.ravel(), true.sum(-1).ravel(), np.zeros(2)]).astype(np.int64)
    everyone = Noise(n * noise.bits, noise.p_numerator, noise.p_log2)
    source = SystemRandomness()
    noisy = np.empty((BATCHES, layout.counters))
    for batch in range(BATCHES):
        ones = draw_noise(layout.counters, everyone, source)
        counts = both + np.bincount(ones, minlength=layout.counters)
        noisy[batch] = debias(counts, n, noise)
    parts = [layout.split(row) for row in noisy]
    transitions, visits = (
        np.stack([part[key] for part in parts]) for key in ("transitions", "visits")
    )
    E = precision(noise.variance(n), 6, delta)
    failed = failures(np.broadcast_to(true, transitions.shape), transitions, visits, E)
    assert failed <= stats.binom.isf(ALPHA, BATCHES, delta)


def test_the_check_detects_an_E_that_is_too_small() -> None:
    """A quarter of E: three standard deviations no longer cover 240 counters."""
    layout, n = CounterLayout(Sizes(4, 2, 6), "paper"), 4_096
    noise = exact_noise(layout, n, 1.0, 1e-5)
    E = precision(noise.variance(n), 240, 0.01) / 4
    generator = np.random.default_rng(42)
    true = np.full((200, 6, 4, 2, 4), 21.0)
    transitions = true + binomial_noise(generator, true.shape, n, noise)
    visits = true.sum(-1) + binomial_noise(generator, true.shape[:-1], n, noise)
    assert failures(true, transitions, visits, E) > 100
