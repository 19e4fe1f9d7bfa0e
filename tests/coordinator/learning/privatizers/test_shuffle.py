"""The shuffle adapter has the law of the simulator's private counts."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from riffle.common.noise import Noise
from riffle.coordinator.learning.privatizers.shuffle import ShufflePrivatizer
from riffle.coordinator.postprocess import precision

NOISE = Noise(bits=3, p_numerator=1, p_log2=4)


def test_a_batch_carries_centred_binomial_noise() -> None:
    n, copies = 50, 5_000
    privatizer = ShufflePrivatizer((copies,), NOISE, n, np.random.default_rng(3))
    noise = privatizer.release(np.full(copies, 7.0)) - 7.0
    law = stats.binom(n * NOISE.bits, NOISE.p)
    seen = np.bincount(np.rint(noise + law.mean()).astype(np.int64), minlength=31)[:31]
    expected = copies * law.pmf(np.arange(31))
    keep = expected >= 5
    rest = [seen[~keep].sum(), expected[~keep].sum()]
    counts, means = np.append(seen[keep], rest[0]), np.append(expected[keep], rest[1])
    # One chi-square test at level 1e-3 with a fixed seed.
    assert stats.chisquare(counts, means * counts.sum() / means.sum()).pvalue > 1e-3


def test_sums_over_batches_add_variances() -> None:
    privatizer = ShufflePrivatizer((2,), NOISE, 50, np.random.default_rng(3))
    privatizer.add(np.zeros(2))
    assert privatizer.add(np.zeros(2)).shape == (2,)
    assert privatizer.variance(2) == 2 * NOISE.variance(50)


def test_the_deviation_is_bernsteins_as_in_E() -> None:
    privatizer = ShufflePrivatizer((2,), NOISE, 50, np.random.default_rng(3))
    log_term = math.log(2 * 12 / 0.05)
    E = precision(NOISE.variance(50), 12, 0.05)
    assert 4 * privatizer.deviation(1, log_term) == pytest.approx(E)
