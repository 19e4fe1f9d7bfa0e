"""Local and central noise: calibration, and the accountant against brute force and an oracle."""

import math
from fractions import Fraction
from itertools import permutations, product

import numpy as np
import pytest

from riffle.common.accounting import (
    BatchEvent,
    CalibrationError,
    account,
    calibrate_central,
    calibrate_local,
    loss_curve,
    repeated_user_guarantee,
)
from riffle.common.accounting.calibrate import SCALE
from riffle.common.accounting.loss_curve import Moves, Steps
from riffle.common.mechanism.parameters import (
    MAX_DRAWS,
    BatchNoise,
    FairBits,
    Flips,
    Laplace,
    Padding,
)
from tests.common.accounting.deltas import delta_bound
from tests.common.accounting.exact import Distribution, hockey_stick, steps_delta

EPSILONS = (0.0, 0.1, 0.5, 1.0, 2.0, 4.0)
TINY = 1e-12
BETA = 1e-5


def flipped(data: tuple[int, ...], f: Fraction) -> Distribution:
    """Exact law of a report: every outcome of every bit."""
    law: Distribution = {}
    for outcome in product((0, 1), repeat=len(data)):
        flips = sum(a != b for a, b in zip(data, outcome, strict=True))
        law[outcome] = f**flips * (1 - f) ** (len(data) - flips)
    return law


@pytest.mark.parametrize("f", [Fraction(1, 4), Fraction(2, 5), Fraction(15, 32)])
@pytest.mark.parametrize(("group", "cells"), [(2, 1), (3, 1), (2, 2)])
def test_flips_against_all_reports_of_all_neighbours(group: int, cells: int, f: Fraction) -> None:
    """Data: one 1 in each of `cells` groups, or none where a reward or the episode is missing."""
    unit = [tuple(int(i == c) for i in range(group)) for c in range(group)]
    choices = [sum(choice, ()) for choice in product([*unit, (0,) * group], repeat=cells)]
    laws = {data: flipped(data, f) for data in choices}
    q = float(f / (1 - f))
    for epsilon in EPSILONS:
        worst = max(
            hockey_stick(laws[a], laws[b], Fraction(math.exp(epsilon)))
            for a, b in permutations(choices, 2)
        )
        assert delta_bound([Steps(q, cells)], epsilon, "lower") <= float(worst) + TINY
        assert delta_bound([Steps(q, cells)], epsilon, "upper") >= float(worst) - TINY
        assert delta_bound([Steps(q, cells)], epsilon, "upper") <= float(worst) * 1.01 + 1e-9


@pytest.mark.parametrize(
    ("cells", "epsilon", "beta"), [(2, 2.243109202643756, 1e-16), (3, 0.06425, 1.03e-17)]
)
def test_flips_meet_epsilon_where_bounds_are_loose(cells: int, epsilon: float, beta: float) -> None:
    """Below `SMALLEST_DELTA` the bound of the next f may be above that of the ratio searched."""
    flips = calibrate_local(cells, epsilon, beta)
    assert loss_curve.epsilon([Steps(flips.f / (1 - flips.f), cells)], beta) <= epsilon


@pytest.mark.parametrize(("numerator", "log2"), [(1, 1), (7, 3)])
@pytest.mark.parametrize("epsilon", EPSILONS)
def test_laplace_against_its_own_masses(numerator: int, log2: int, epsilon: float) -> None:
    """One counter up, one down, noise of |z| <= 60: the sum over the product, both directions."""
    q = numerator / 2**log2
    z = np.arange(-60, 61)
    mass = (1 - q) / (1 + q) * q ** np.abs(z).astype(float)
    here = np.append(mass, 0.0)
    there = np.append(0.0, mass)
    P, Q = np.outer(here, there), np.outer(there, here)
    deltas = [float(np.clip(a - math.exp(epsilon) * b, 0, None).sum()) for a, b in ((P, Q), (Q, P))]
    cut = 4 * q**60
    assert deltas[0] == pytest.approx(deltas[1], abs=1e-12)
    assert delta_bound([Steps(q, 1)], epsilon, "upper") >= deltas[0] - cut
    assert delta_bound([Steps(q, 1)], epsilon, "lower") <= deltas[0] + cut


@pytest.mark.parametrize("cells", [1, 2, 3, 6, 18, 120])
@pytest.mark.parametrize("epsilon", [0.05, 1.0, 4.0])
def test_calibrated_noise_is_enough_and_the_least(cells: int, epsilon: float) -> None:
    flips = calibrate_local(cells, epsilon, BETA)
    q = flips.f / (1 - flips.f)
    assert steps_delta(q, cells, epsilon) <= BETA * (1 + 1e-9)
    less = Flips(round(flips.numerator * (1 - 1e-3) - 1))
    assert steps_delta(less.f / (1 - less.f), cells, epsilon) > BETA
    central = calibrate_central(cells, 100, epsilon, BETA)
    laplace = Laplace(min(SCALE - 1, math.ceil(q * SCALE)))
    assert central.variance(1) <= laplace.variance(1) * (1 + 1e-6)


def test_numbers_of_the_documentation() -> None:
    """Variances of a counter at epsilon = 1, beta = 1e-5 for one pair of cells and for six."""
    for cells, user, coordinator in ((1, 3.92, 7.84), (6, 136.9, 167.3)):
        flips = calibrate_local(cells, 1.0, BETA)
        central = calibrate_central(cells, 100, 1.0, BETA)
        assert flips.variance(1) == pytest.approx(user, rel=2e-3)
        assert central.variance(1) == pytest.approx(coordinator, rel=2e-3)
        q = flips.f / (1 - flips.f)
        assert 2 * q / (1 - q) ** 2 == pytest.approx(2 * flips.variance(1)), (
            "Laplace: twice as much"
        )


@pytest.mark.parametrize("noise", [Flips(2**30), Laplace(3 * 2**30), FairBits(300)])
def test_the_account_depends_neither_on_n_nor_on_the_others(noise: BatchNoise) -> None:
    result = [
        account(BatchEvent(noise, Padding(1, 0), n, gamma, cells=2, counters=50), BETA)
        for n, gamma in ((1, 0.0), (1000, 0.9))
    ]
    assert result[0].epsilon_upper == result[1].epsilon_upper < math.inf
    assert result[0].epsilon_lower <= result[0].epsilon_upper
    assert result[0].beta_overflow == 0.0


def test_small_epsilon_takes_more_than_can_be_drawn() -> None:
    with pytest.raises(CalibrationError, match="ask for more epsilon"):
        calibrate_central(6, MAX_DRAWS // 1000, 0.01, BETA)
    for epsilon in (1e-4, 5e-324):
        with pytest.raises(CalibrationError, match="ask for more epsilon"):
            calibrate_local(3000, epsilon, 1e-9)


def test_beta_alone_can_pay_for_a_small_epsilon() -> None:
    """Noise at which delta(0) is below beta: epsilon is 0, and the search still finds the least."""
    flips = calibrate_local(1, 1e-7, 0.01)
    q = flips.f / (1 - flips.f)
    assert steps_delta(q, 1, 0.0) == pytest.approx(0.01, rel=1e-4)


def test_a_user_who_appears_under_every_trust_model_is_accounted_for() -> None:
    """Losses of unlike noises compose: more than the worst of them, at most their sum."""
    noises: list[BatchNoise] = [Flips(1_950_000_000), Laplace(3_900_000_000), FairBits(600)]
    events = [BatchEvent(noise, Padding(1, 0), 10, 0.0, 2, 50) for noise in noises]
    alone = [repeated_user_guarantee([event], BETA / 3).epsilon for event in events]
    together = repeated_user_guarantee(events, BETA).epsilon
    assert max(alone) < together <= sum(alone)


@pytest.mark.parametrize(("q", "cells"), [(0.6, 1), (0.9, 6), (0.97, 18)])
def test_epsilon_agrees_with_dp_accounting(q: float, cells: int) -> None:
    from dp_accounting.pld import privacy_loss_distribution as pld

    one = pld.from_discrete_laplace_mechanism(-math.log(q), value_discretization_interval=2e-5)
    oracle = one.self_compose(2 * cells).get_epsilon_for_delta(BETA)
    assert loss_curve.epsilon([Steps(q, cells)], BETA, "estimate") == pytest.approx(
        oracle, rel=2e-3
    )


def test_steps_and_moves_compose_in_one_curve() -> None:
    mixed = loss_curve.epsilon([Steps(0.9, 2), Moves(400, 0.5, 2)], BETA)
    assert mixed > loss_curve.epsilon([Steps(0.9, 2)], BETA)
    assert mixed > loss_curve.epsilon([Moves(400, 0.5, 2)], BETA)
