"""Padding's charge against exact binomial tails."""

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from riffle.common.accounting import BatchEvent
from riffle.common.accounting.binomial import charge, fewest_slots, overflow_probability, tail
from riffle.common.mechanism.parameters import Noise, Padding
from tests.common.accounting.exact import binomial


@given(st.integers(1, 80), st.sampled_from([1, 3, 16, 200]), st.integers(0, 80))
def test_tail_is_above_the_exact_one_by_a_millionth(trials: int, k: int, slots: int) -> None:
    exact = float(sum(binomial(trials, Fraction(k, 256))[slots + 1 :]))
    assert exact * (1 - 1e-12) <= tail(trials, k / 256, slots) <= exact * (1 + 2e-6)


@given(
    st.integers(1, 10**7),
    st.integers(1, 5000),
    st.sampled_from([0.5, 2.0**-10, 1e-4]),
    st.floats(0.1, 4.0),
    st.sampled_from([1e-5, 1e-7, 1e-11]),
)
def test_slots_are_the_fewest_that_fit(
    n: int, trials: int, p: float, epsilon: float, beta: float
) -> None:
    slots = fewest_slots(n, trials, p, epsilon, beta)
    assert 0 <= slots <= trials
    assert charge(epsilon, overflow_probability(n, trials, p, slots)) <= beta
    if slots:
        assert charge(epsilon, overflow_probability(n, trials, p, slots - 1)) > beta


def test_a_sum_has_no_slots_and_is_charged_for_words_that_overflow() -> None:
    def event(n: int, word_bits: int | None) -> BatchEvent:
        return BatchEvent(Noise(1, 1, 1), Padding(1, 0), n, 0.0, 1, 7, word_bits)

    assert event(100, None).overflow == 1.0
    assert event(100, 16).overflow < 1e-300
    # 44,000 users leave room for 21,535 of at most 44,000 noise bits, fewer than their mean.
    exact = 7 * float(stats.binom(44_000, 0.5).sf(65_535 - 44_000))
    assert event(44_000, 16).overflow == min(1.0, exact)
    exact = 7 * float(stats.binom(43_000, 0.5).sf(65_535 - 43_000))
    assert event(43_000, 16).overflow == pytest.approx(exact, rel=1e-5)


def test_charge_counts_both_sides_of_the_inequality() -> None:
    assert charge(1.0, 1e-7) == pytest.approx((1 + math.e) * 1e-7)
    assert charge(math.inf, 0.0) == 0.0
    assert overflow_probability(10**9, 100, 0.5, 10) == 1.0


def test_tails_that_underflow_are_charged_too() -> None:
    """2^-2000 is no double, and e^epsilon may be larger than 2^2000."""
    assert 0.0 < tail(2000, 0.5, 1999) < 1e-300
    assert charge(100.0, tail(2000, 0.5, 1999)) < 1e-250
    assert charge(800.0, tail(2000, 0.5, 1999)) == math.inf
    assert charge(800.0, -1e-9) == -math.inf
    assert charge(800.0, tail(2000, 0.5, 2000)) == 0.0


def test_slots_for_every_bit_never_overflow() -> None:
    assert overflow_probability(10**9, 100, 0.5, 100) == 0.0
    assert fewest_slots(1, 1, 0.5, 1.0, 1e-30) == 1
