"""Composition against enumerated products, in both directions, and against its own error bounds."""

import math
from collections.abc import Sequence

import numpy as np
import pytest

from riffle.common.accounting import loss_curve
from riffle.common.accounting.binomial import binomial_losses
from riffle.common.accounting.convolution import Part, choose_window
from riffle.common.accounting.least_noise import needed_bits
from riffle.common.accounting.loss_curve import Bound, Curve, Moves, compose
from tests.common.accounting.deltas import delta_bound
from tests.common.accounting.exact import float_pair, product_delta

CASES = [(12, 0.5, 2), (40, 0.25, 2), (300, 0.5, 1), (700, 1 / 64, 1), (9, 0.5, 3), (60, 0.125, 2)]
EPSILONS = (0.0, 0.05, 0.3, 1.0, 2.0, 3.5)


def composed_curve(parts: Sequence[Part], tilt: float, bound: Bound) -> Curve:
    return compose(parts, choose_window(parts, tilt), bound).curve(bound)


def enumerated(N: int, p: float, cells: int, epsilon: float) -> tuple[float, float]:
    """delta in the two directions, from the joint probabilities of all counters."""
    P, Q = float_pair(N, p)
    keep = (P > 1e-18) | (Q > 1e-18)
    P, Q = P[keep], Q[keep]
    downs, ups = [(P, Q)] * cells, [(Q, P)] * cells
    exchanged = [(q, p) for p, q in downs + ups]
    return product_delta(downs + ups, epsilon), product_delta(exchanged, epsilon)


@pytest.mark.parametrize(("N", "p", "cells"), CASES)
def test_bounds_enclose_the_enumerated_delta_in_both_directions(
    N: int, p: float, cells: int
) -> None:
    for epsilon in EPSILONS:
        forward, backward = enumerated(N, p, cells, epsilon)
        assert forward == pytest.approx(backward, rel=1e-9, abs=1e-14)
        lower = delta_bound([Moves(N, p, cells)], epsilon, "lower")
        upper = delta_bound([Moves(N, p, cells)], epsilon, "upper")
        assert lower <= forward * (1 + 1e-9) + 1e-14
        assert upper >= forward * (1 - 1e-9) - 1e-14
        assert upper <= forward * 1.005 + 1e-9


def test_composing_one_direction_twice_is_another_and_smaller_number() -> None:
    """2 cells ups instead of ups and downs: what a library's default does silently."""
    N, p, epsilon = 60, 0.125, 2.0
    P, Q = float_pair(N, p)
    twice_up = product_delta([(Q, P)] * 2, epsilon)
    twice_down = product_delta([(P, Q)] * 2, epsilon)
    right = product_delta([(P, Q), (Q, P)], epsilon)
    assert twice_up < 0.8 * right < right < twice_down
    assert delta_bound([Moves(N, p, 1)], epsilon, "upper") == pytest.approx(right, rel=1e-3)


@pytest.mark.parametrize("N", [5, 30, 101, 400])
def test_the_fair_binomial_mechanism_of_one_counter_in_closed_form(N: int) -> None:
    """One counter up by one: delta = Pr[Z > k] - e^epsilon Pr[Z > k + 1], k where the ratio passes.

    This is the published binary-sum case: for Z ~ Binomial(N, 1/2) the loss at y is
    log y / (N - y + 1), above epsilon for y > e^epsilon (N + 1) / (1 + e^epsilon).
    """
    up, _ = binomial_losses(N, 0.5)
    for epsilon in (0.0, 0.2, 1.0, 2.5):
        first = math.floor(math.exp(epsilon) * (N + 1) / (1 + math.exp(epsilon))) + 1
        above = sum(math.comb(N, y - 1) for y in range(first, N + 2)) / 2**N
        other = sum(math.comb(N, y) for y in range(first, N + 1)) / 2**N
        exact = above - math.exp(epsilon) * other
        for tilt in (0.0, 2.0):
            assert composed_curve([(up, 1)], tilt, "upper").delta(epsilon) >= exact - 1e-15
            assert composed_curve([(up, 1)], tilt, "lower").delta(epsilon) <= exact + 1e-15
            if exact > 1e-6:
                close = composed_curve([(up, 1)], 0.0, "upper").delta(epsilon)
                assert close == pytest.approx(exact, rel=1e-2)


@pytest.mark.parametrize("tilt", [0.0, 1.0, 5.0, 17.0, 40.0])
def test_every_tilt_gives_valid_bounds(tilt: float) -> None:
    """The tilt is a matter of sharpness: bounds hold far from where it is sharp."""
    N, p, cells = 30, 0.25, 2
    parts = [(part, cells) for part in binomial_losses(N, p)]
    upper, lower = composed_curve(parts, tilt, "upper"), composed_curve(parts, tilt, "lower")
    for epsilon in np.linspace(0.0, 8.0, 9):
        exact, _ = enumerated(N, p, cells, float(epsilon))
        assert lower.delta(float(epsilon)) <= exact + 1e-13
        assert upper.delta(float(epsilon)) >= exact - 1e-13


@pytest.mark.parametrize("beta", [1e-5, 1e-9])
@pytest.mark.parametrize("epsilon", [0.1, 0.5, 1.0, 2.0, 4.0])
@pytest.mark.parametrize("cells", [1, 2, 18, 60])
def test_upper_and_lower_are_within_one_percent(beta: float, epsilon: float, cells: int) -> None:
    for p in (0.5, 2.0**-10):
        moves = [Moves(needed_bits(p, cells, epsilon, beta), p, cells)]
        lower, middle, upper = (
            loss_curve.epsilon(moves, beta, bound) for bound in ("lower", "estimate", "upper")
        )
        assert lower <= middle <= upper <= epsilon
        assert upper - lower <= 0.005 * epsilon
        assert upper >= 0.96 * epsilon or cells * epsilon > 3.0


def test_epsilon_is_infinite_when_impossible_outcomes_are_likelier_than_beta() -> None:
    assert loss_curve.epsilon([Moves(10, 0.5, 1)], 1e-5, "upper") == math.inf
    assert loss_curve.epsilon([Moves(10, 0.5, 1)], 1e-5, "lower") == math.inf
    assert loss_curve.epsilon([Moves(1, 2.0**-32, 1)], 1e-5) == math.inf
    assert math.isfinite(loss_curve.epsilon([Moves(10, 0.5, 1)], 0.01))


def test_noise_above_the_cap_is_accounted_as_the_cap() -> None:
    capped = loss_curve.epsilon([Moves(4 * 10**8, 0.5, 1)], 1e-5)
    assert loss_curve.epsilon([Moves(10**15, 0.5, 1)], 1e-5) == capped
    assert loss_curve.epsilon([Moves(10**15, 0.5, 1)], 1e-5, "lower") == 0.0


@pytest.mark.parametrize(("N", "p", "cells"), [(0, 0.5, 1), (3, 0.0, 1), (3, 1.0, 1), (3, 0.5, 0)])
def test_impossible_moves_are_refused(N: int, p: float, cells: int) -> None:
    with pytest.raises(ValueError, match="moves need"):
        Moves(N, p, cells)
