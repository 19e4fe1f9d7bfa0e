"""Noise, padding, guarantees, and the number of reports whose noise counts."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from riffle.common.mechanism.parameters import (
    BatchNoise,
    FairBits,
    Flips,
    Guarantee,
    Laplace,
    Noise,
    Padding,
    honest_reports,
)


def test_p_is_exact_in_a_double() -> None:
    noise = Noise(bits=3, p_numerator=2**31 + 1, p_log2=32)
    assert Fraction(noise.p) == Fraction(2**31 + 1, 2**32)


def test_moments_of_a_counter() -> None:
    noise = Noise(bits=126, p_numerator=1, p_log2=10)
    assert noise.mean(4096) == 504.0
    assert noise.variance(4096) == 504.0 * (1 - 2**-10)


@pytest.mark.parametrize(
    ("bits", "numerator", "log2", "message"),
    [
        (0, 1, 1, "noise bits"),
        (-1, 1, 1, "noise bits"),
        (2**53 + 1, 1, 1, "noise bits"),
        (1, 0, 1, "strictly between 0 and 1"),
        (1, 2, 1, "strictly between 0 and 1"),
        (1, -1, 4, "strictly between 0 and 1"),
        (1, 1, 0, "p_log2"),
        (1, 1, 33, "p_log2"),
    ],
)
def test_impossible_noise_is_refused(bits: int, numerator: int, log2: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Noise(bits, numerator, log2)


def test_messages_are_data_plus_noise_slots() -> None:
    assert Padding(18, 82).messages == 100
    assert Padding(0, 0).messages == 0


@pytest.mark.parametrize("slots", [(-1, 3), (3, -1)])
def test_negative_slots_are_refused(slots: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="must not be negative"):
        Padding(*slots)


@pytest.mark.parametrize(
    ("epsilon", "beta", "fraction", "message"),
    [
        (-1.0, 1e-5, 0.0, "epsilon"),
        (float("nan"), 1e-5, 0.0, "epsilon"),
        (1.0, -1e-9, 0.0, "beta"),
        (1.0, 1.5, 0.0, "beta"),
        (1.0, float("nan"), 0.0, "beta"),
        (1.0, 1e-5, 1.0, "dishonest_fraction"),
        (1.0, 1e-5, -0.1, "dishonest_fraction"),
        (1.0, 1e-5, float("nan"), "dishonest_fraction"),
    ],
)
def test_impossible_guarantees_are_refused(
    epsilon: float, beta: float, fraction: float, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Guarantee(epsilon, beta, fraction)


def test_an_infinite_epsilon_is_a_guarantee_that_promises_nothing() -> None:
    assert Guarantee(float("inf"), 1.0).epsilon == float("inf")


@given(st.integers(1, 10**9), st.floats(0, 1, exclude_max=True))
def test_honest_reports_are_the_honest_share_rounded_up(n: int, f: float) -> None:
    honest = honest_reports(n, f)
    assert 1 <= honest <= n
    assert 0 <= honest - (1 - Fraction(str(f))) * n < 1


def test_honest_reports_at_known_values() -> None:
    assert honest_reports(4096, 0.0) == 4096
    assert honest_reports(4096, 0.25) == 3072
    assert honest_reports(1, 0.5) == 1
    assert honest_reports(10, 0.1) == 9  # the double 0.1 is a little more than a tenth
    assert honest_reports(100, 0.29) == 71  # 0.29 * 100 is a double below 29


@given(st.integers(1, 10**9), st.integers(0, 999))
def test_a_fraction_means_its_decimal(n: int, thousandths: int) -> None:
    assert honest_reports(n, thousandths / 1000) == n - n * thousandths // 1000


def test_three_tenths_of_ten_are_three() -> None:
    assert honest_reports(10, 0.3) == 7  # the double 0.3 is a little less than three tenths


@pytest.mark.parametrize(("n", "f"), [(0, 0.0), (-5, 0.1), (10, 1.0), (10, -0.5)])
def test_impossible_batches_are_refused(n: int, f: float) -> None:
    with pytest.raises(ValueError, match=r"n >= 1|dishonest_fraction"):
        honest_reports(n, f)


@pytest.mark.parametrize(
    "noise", [Noise(40, 1, 3), FairBits(57), Laplace(1 << 30), Laplace(4_200_000_000)], ids=str
)
def test_bernsteins_bound_holds_for_the_moment_generating_function(noise: BatchNoise) -> None:
    """log E exp(x Z) <= V x^2 / (2 - 2 b x / 3) on 0 < b x / 3 < 1: what the bound follows from."""
    x = np.linspace(0, 3 / noise.term, 2_000)[1:-1]
    V, c = noise.variance(1), noise.term / 3
    if isinstance(noise, Laplace):
        q = noise.q
        log_mgf = 2 * np.log1p(-q) - np.log1p(-q * np.exp(x)) - np.log1p(-q * np.exp(-x))
    else:
        assert not isinstance(noise, Flips)
        p = noise.p if isinstance(noise, Noise) else 0.5
        log_mgf = noise.bits * (np.log1p(p * np.expm1(x)) - p * x)
    assert (log_mgf <= V * x**2 / (2 - 2 * c * x) + 1e-12).all()


@pytest.mark.parametrize("f", [0.01, 0.25, 0.48])
def test_a_debiased_bit_is_no_larger_than_its_term(f: float) -> None:
    noise = Flips(round(f * 2**32))
    debiased = [(bit - noise.f) / (1 - 2 * noise.f) for bit in (0, 1)]
    sizes = [abs(value - true) for value in debiased for true in (0, 1)]
    assert noise.term == pytest.approx(max(sizes))
