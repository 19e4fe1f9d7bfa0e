"""Arrivals: at their rate, in order, and memoryless if they are Poisson."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from riffle.deploy.load.generator import Arrivals, schedule

ALPHA = 1e-6


@given(
    st.sampled_from(["poisson", "constant"]),
    st.floats(0.1, 500),
    st.floats(1, 60),
    st.integers(0, 99),
)
def test_arrivals_ascend_and_end_in_time(
    kind: Arrivals, rate: float, seconds: float, seed: int
) -> None:
    times = schedule(kind, rate, seconds, np.random.default_rng(seed))
    assert np.all(np.diff(times) >= 0)
    assert times.size == 0 or (times[0] >= 0 and times[-1] < seconds)


def test_constant_arrivals_are_evenly_spaced() -> None:
    assert schedule("constant", 4, 1, np.random.default_rng()).tolist() == [0, 0.25, 0.5, 0.75]


def test_poisson_arrivals_have_exponential_gaps_and_poisson_counts() -> None:
    times = schedule("poisson", 50, 400, np.random.default_rng(3))
    assert stats.kstest(np.diff(times), stats.expon(scale=1 / 50).cdf).pvalue > ALPHA
    assert stats.poisson(20_000).cdf(times.size) == pytest.approx(0.5, abs=0.5 - ALPHA)
