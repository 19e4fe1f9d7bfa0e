"""The steps of a composition, each against exact arithmetic."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from riffle.common.accounting.binomial import Losses, binomial_losses, trim
from riffle.common.accounting.convolution import (
    GridLosses,
    choose_tilt,
    choose_window,
    connect_the_dots,
    convolve,
    cumulants,
    log_mgf,
    round_down,
)
from riffle.common.accounting.loss_curve import Curve
from tests.common.accounting.exact import binomial

PROBABILITIES = st.sampled_from([(1, 1), (1, 3), (1, 10), (3, 2), (12345, 20)])


@given(st.integers(1, 40), PROBABILITIES)
def test_masses_and_losses_of_one_move_are_exact(N: int, dyadic: tuple[int, int]) -> None:
    p = Fraction(dyadic[0], 2 ** dyadic[1])
    b = binomial(N, p)
    up, down = binomial_losses(N, float(p))
    assert up.loss == pytest.approx([math.log(b[z] / b[z + 1]) for z in range(N)], abs=1e-12)
    assert down.loss == pytest.approx(
        [math.log(b[z] / b[z - 1]) for z in range(1, N + 1)], abs=1e-12
    )
    for part, exact, impossible in ((up, b[:-1], b[-1]), (down, b[1:], b[0])):
        assert np.allclose(part.mass, np.array(exact, dtype=float), rtol=part.mass_error, atol=0)
        assert part.infinite == pytest.approx(float(impossible), rel=part.mass_error)
        assert part.mass_error < 1e-9


@pytest.mark.parametrize(("N", "p"), [(4000, 0.5), (10**6, 2.0**-10), (10**9, 2.0**-4)])
def test_dropped_mass_is_negligible_and_the_rest_sums_to_one(N: int, p: float) -> None:
    for part in binomial_losses(N, p):
        assert part.dropped < 1e-25
        assert part.mass.sum() + part.infinite == pytest.approx(1.0, abs=1e-12)
        assert np.dot(part.mass, np.exp(-part.loss)) == pytest.approx(1.0, abs=1e-9)


@pytest.mark.parametrize(("N", "p"), [(0, 0.5), (3, 0.0), (3, 1.0), (3, float("nan"))])
def test_impossible_noise_has_no_losses(N: int, p: float) -> None:
    with pytest.raises(ValueError, match="binomial noise needs"):
        binomial_losses(N, p)


def test_trimming_moves_mass_to_dropped() -> None:
    up, _ = binomial_losses(200, 0.5)
    cut = trim(up, 1e-6)
    assert 0 < cut.dropped <= 2.1e-6
    assert cut.mass.sum() + cut.dropped == pytest.approx(up.mass.sum(), abs=1e-15)
    assert trim(up, 2.0) is up
    nothing, _ = binomial_losses(40, 2.0**-32)
    kept = trim(nothing, 2.0)
    assert len(kept.mass) < len(nothing.mass)
    assert kept.mass.min() > 0.0


@settings(max_examples=50)
@given(st.floats(0.001, 0.9), st.integers(1, 60), PROBABILITIES)
def test_connected_dots_keep_both_sums_and_rounding_down_keeps_the_first(
    delta: float, N: int, dyadic: tuple[int, int]
) -> None:
    for part in binomial_losses(N, dyadic[0] / 2 ** dyadic[1]):
        dots, down = connect_the_dots(part, delta), round_down(part, delta)
        assert dots.mass.min() >= 0.0
        assert dots.mass.sum() == pytest.approx(part.mass.sum(), rel=1e-12)
        Q = np.dot(part.mass, np.exp(-part.loss))
        assert np.dot(dots.mass, np.exp(-dots.loss)) == pytest.approx(Q, rel=1e-9)
        assert down.mass.sum() == pytest.approx(part.mass.sum(), rel=1e-12)
        assert down.last * delta <= part.loss.max() + 1e-9


def test_the_transforms_error_bound_holds_against_direct_convolution() -> None:
    rng = np.random.default_rng(5)
    parts = [(GridLosses(-20, rng.random(50), 0.01), 3), (GridLosses(-7, rng.random(30), 0.01), 2)]
    for tilt in (0.0, 3.0, -2.0):
        result = convolve(parts, tilt, -80, 512)
        direct = np.ones(1, dtype=np.longdouble)
        for part, count in parts:
            weight = part.mass.astype(np.longdouble) * np.exp(tilt * part.loss)
            for _ in range(count):
                direct = np.convolve(direct, weight / weight.sum())
        start = sum(part.first * count for part, count in parts) + 80
        expected = np.zeros(512)
        expected[start : start + len(direct)] = direct
        assert np.abs(result.mass - expected).max() <= result.error
        assert result.error < 1e-13


def test_wrapped_mass_reappears_in_the_window() -> None:
    part = GridLosses(-3, np.array([0.25, 0.25, 0.25, 0.25]), 1.0)
    result = convolve([(part, 1)], 0.0, 0, 8)
    assert result.mass == pytest.approx([0.25, 0, 0, 0, 0, 0.25, 0.25, 0.25][:8], abs=1e-15)


def test_the_largest_exponent_may_have_no_mass() -> None:
    mass, loss = np.array([0.25, 0.75, 0.0]), np.array([-1.0, 1.0, 2.0])
    for tilt in (10.0, 700.0, 1e6):
        assert log_mgf(mass, loss, tilt) == pytest.approx(tilt + math.log(0.75), rel=1e-9)
    assert log_mgf(np.zeros(2), loss[:2], 1.0) == -math.inf


def test_cumulants_are_those_of_the_losses() -> None:
    parts = [(part, 3) for part in binomial_losses(50, 0.25)]
    step = 1e-4
    K, mean, variance = cumulants(parts, 2.0)
    ahead, behind = cumulants(parts, 2.0 + step)[0], cumulants(parts, 2.0 - step)[0]
    assert pytest.approx(sum(3 * log_mgf(p.mass, p.loss, 2.0) for p, _ in parts)) == K
    assert mean == pytest.approx((ahead - behind) / (2 * step), rel=1e-6)
    assert variance == pytest.approx((ahead - 2 * K + behind) / step**2, rel=1e-3)


def test_tilt_and_window_centre_on_the_epsilon_that_matters() -> None:
    parts = [(part, 18) for part in binomial_losses(2006, 0.5)]
    tilt = choose_tilt(parts, 1e-5)
    K, mean, _ = cumulants(parts, tilt)
    assert K - tilt * mean == pytest.approx(math.log(1e-5), rel=1e-3)
    window = choose_window(parts, tilt)
    assert window.low < 1.0 < mean < window.high
    assert window.high - window.low < 6.0


def line() -> Curve:
    return Curve(np.array([0.5, 1.0, 2.0]), np.array([0.25, 0.25, 0.125]), 0.01, 0.0)


@given(st.floats(0.0, 3.0))
def test_epsilon_inverts_delta(epsilon: float) -> None:
    curve = line()
    delta = curve.delta(epsilon)
    back = curve.epsilon(delta)
    assert back <= epsilon + 1e-12
    assert curve.delta(back) == pytest.approx(delta, abs=1e-12)


@given(st.floats(0.0101, 0.5), st.floats(1e-9, 1e-3))
def test_overflow_is_solved_for_the_first_epsilon_that_fits(delta: float, eta: float) -> None:
    curve = line()
    found = curve.epsilon(delta, eta)
    grid = np.linspace(0.0, 3.0, 301)
    fits = [e for e in grid if curve.delta(e) + (1 + math.exp(e)) * eta <= delta]
    if math.isfinite(found):
        assert curve.delta(found) + (1 + math.exp(found)) * eta <= delta + 1e-12
        assert not fits or found <= fits[0] + 1e-12
    else:
        assert not fits


@pytest.mark.parametrize("eta", [1e-306, 1e-300])
def test_overflow_is_charged_beyond_the_largest_double(eta: float) -> None:
    """e^800 eta is far above one, though e^700 eta is nothing."""
    curve = Curve(np.array([500.0, 800.0]), np.array([0.5, 0.5]), 0.0, 0.0)
    assert curve.epsilon(0.2, 0.0) == pytest.approx(800.0 + math.log(0.6))
    assert curve.epsilon(0.2, eta) == math.inf
    ends = curve.epsilon(0.2, -eta)
    assert ends == pytest.approx(math.log(0.3 / eta), abs=1.0)


@pytest.mark.parametrize("loss", [20.0, 599.0, 601.0, 1e5])
def test_a_loss_far_from_zero_is_solved_for(loss: float) -> None:
    curve = Curve(np.array([-1.0, loss, loss + 1e4]), np.array([0.3, 0.5, 0.1]), 0.0, 0.0)
    assert curve.epsilon(0.4) == pytest.approx(loss + math.log(1 - 0.3 / 0.5), rel=1e-9)
    assert curve.epsilon(0.05) == pytest.approx(loss + 1e4 + math.log(0.5), rel=1e-9)
    assert curve.epsilon(0.0) == loss + 1e4


def test_a_curve_says_nothing_below_its_start() -> None:
    curve = Curve(np.array([0.5, 1.0]), np.array([0.3, 0.3]), 0.0, 0.7)
    assert curve.delta(0.6) == 1.0
    assert curve.epsilon(0.9) == 0.7


def test_bisection_finds_the_first_of_losses_that_are_very_close() -> None:
    curve = Curve(1.0 + 1e-13 * np.arange(100.0), np.full(100, 0.01), 0.0, 0.0)
    for delta in np.geomspace(1e-16, 4e-12, 100).tolist():
        first = next(i for i in range(100) if i == 99 or curve._is_past(i, delta, 0.0))
        assert curve._first_past(delta, 0.0) == first


def test_a_curve_refuses_impossible_arguments() -> None:
    with pytest.raises(ValueError, match="epsilon must not be negative"):
        line().delta(-0.1)
    with pytest.raises(ValueError, match="delta must lie"):
        line().epsilon(1.5)
    assert line().epsilon(0.001) == math.inf


def test_losses_of_a_single_outcome_compose() -> None:
    point = Losses(np.ones(1), np.zeros(1), 0.0, 0.0, 0.0)
    assert choose_tilt([(point, 2)], 1e-5) == 0.0
    assert choose_window([(point, 2)], 0.0).high == 0.0
