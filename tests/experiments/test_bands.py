"""Bands cover the mean at their level, and one seed has none."""

import numpy as np
import pytest
from scipy import stats

from riffle.experiments.bands import stack, student_band


def test_a_band_is_scipys_interval() -> None:
    values = np.random.default_rng(0).normal(3, 2, (20, 4))
    band = student_band(values)
    low, high = stats.t.interval(0.95, 19, values.mean(0), stats.sem(values))
    assert band.low == pytest.approx(low)
    assert band.high == pytest.approx(high)
    assert band.sd == pytest.approx(values.std(0, ddof=1))


def test_a_band_covers_the_mean_at_its_level() -> None:
    """Of 4,000 bands of 5 seeds, misses are Bin(4000, .05): 200 +- 14; 5 deviations are allowed."""
    band = student_band(np.random.default_rng(1).normal(0, 1, (5, 4000)))
    missed = int(((band.low > 0) | (band.high < 0)).sum())
    assert abs(missed - 200) < 70


def test_one_seed_has_no_band() -> None:
    band = student_band([[1.0, 2.0]])
    assert band.low.tolist() == band.high.tolist() == [1.0, 2.0]


def test_bands_are_stacked_in_order() -> None:
    both = stack([student_band([1.0, 3.0]), student_band([2.0, 2.0])])
    assert both.mean.tolist() == [2.0, 2.0]
    assert both.low[1] == both.high[1] == 2.0
    assert stack([]).mean.shape == (0,)
