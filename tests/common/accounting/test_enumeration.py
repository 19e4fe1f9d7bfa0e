"""Brute force: every neighbour and every outcome of small mechanisms, in exact fractions."""

import math
from collections import defaultdict
from fractions import Fraction
from itertools import permutations, product

import pytest

from riffle.common.accounting import BatchEvent, account
from riffle.common.accounting.binomial import charge, overflow_probability
from riffle.common.accounting.loss_curve import Moves
from riffle.common.mechanism.parameters import Noise, Padding
from tests.common.accounting.deltas import delta_bound
from tests.common.accounting.exact import Distribution, Outcome, hockey_stick, noisy_counts

EPSILONS = (0.0, 0.1, 0.5, 1.0, 2.0, 4.0)
E_EPSILONS = [(epsilon, Fraction(math.exp(epsilon))) for epsilon in EPSILONS]
TINY = 1e-12


@pytest.mark.parametrize("p", [Fraction(1, 2), Fraction(1, 4), Fraction(5, 8)])
@pytest.mark.parametrize(("N", "counters", "cells"), [(1, 2, 1), (4, 2, 1), (9, 2, 1), (3, 4, 2)])
def test_all_neighbours_and_outcomes_of_exclusive_counters(
    N: int, counters: int, cells: int, p: Fraction
) -> None:
    """A user adds one to one counter of each of `cells` groups: enumerate both users' data."""
    group = counters // cells
    choices = [
        tuple(int(i == c) for c in choice for i in range(group))
        for choice in product(range(group), repeat=cells)
    ]
    outputs = {data: noisy_counts(data, N, p) for data in choices}
    for epsilon, e_epsilon in E_EPSILONS:
        worst = max(
            hockey_stick(outputs[a], outputs[b], e_epsilon) for a, b in permutations(choices, 2)
        )
        moves = [Moves(N, float(p), cells)]
        assert delta_bound(moves, epsilon, "lower") <= float(worst) + TINY
        assert delta_bound(moves, epsilon, "upper") >= float(worst) - TINY
        assert delta_bound(moves, epsilon, "upper") <= float(worst) * 1.01 + 1e-9


@pytest.mark.parametrize(("N", "p"), [(2, Fraction(1, 2)), (5, Fraction(1, 4))])
def test_neighbours_that_move_fewer_counters_are_covered(N: int, p: Fraction) -> None:
    """Rewards may be absent: data are any 0/1 vector with at most one 1, so moves may be lone."""
    data = [(0, 0), (1, 0), (0, 1)]
    outputs = {d: noisy_counts(d, N, p) for d in data}
    for epsilon, e_epsilon in E_EPSILONS:
        upper = delta_bound([Moves(N, float(p), 1)], epsilon)
        for a, b in permutations(data, 2):
            assert float(hockey_stick(outputs[a], outputs[b], e_epsilon)) <= upper + TINY


def capped_report(noise: Noise, counters: int, slots: int) -> Distribution:
    """Noise of one user over all counters when only the first `slots` 1-bits are kept."""
    free = noisy_counts((0,) * counters, noise.bits, Fraction(noise.p_numerator, 2**noise.p_log2))
    result: defaultdict[Outcome, Fraction] = defaultdict(Fraction)
    for ones, mass in free.items():
        kept, room = [], slots
        for count in ones:
            kept.append(min(count, room))
            room -= kept[-1]
        result[tuple(kept)] += mass
    return dict(result)


def total(reports: list[Distribution]) -> Distribution:
    """Distribution of the sum of independent reports."""
    result: Distribution = {(0,) * len(next(iter(reports[0]))): Fraction(1)}
    for report in reports:
        added: defaultdict[Outcome, Fraction] = defaultdict(Fraction)
        for (a, x), (b, y) in product(result.items(), report.items()):
            added[tuple(i + j for i, j in zip(a, b, strict=True))] += x * y
        result = dict(added)
    return result


def shifted(distribution: Distribution, data: Outcome) -> Distribution:
    return {tuple(i + j for i, j in zip(y, data, strict=True)): m for y, m in distribution.items()}


@pytest.mark.parametrize(
    ("n", "noise", "slots"),
    [
        (1, Noise(2, 1, 1), 2),
        (2, Noise(1, 1, 1), 1),
        (3, Noise(1, 1, 2), 1),
        (3, Noise(2, 1, 2), 2),
        (2, Noise(3, 3, 3), 4),
    ],
)
def test_the_real_protocol_with_capped_noise_keeps_its_guarantee(
    n: int, noise: Noise, slots: int
) -> None:
    """All users' capped noise convolved: delta <= composition + (1 + e^epsilon) overflow."""
    counters = 2
    summed = total([capped_report(noise, counters, slots)] * n)
    outputs = [shifted(summed, (1, 0)), shifted(summed, (0, 1))]
    eta = overflow_probability(n, noise.bits * counters, noise.p, slots)
    for epsilon, e_epsilon in E_EPSILONS:
        worst = max(hockey_stick(a, b, e_epsilon) for a, b in permutations(outputs, 2))
        composed = delta_bound([Moves(n * noise.bits, noise.p, 1)], epsilon)
        lower = delta_bound([Moves(n * noise.bits, noise.p, 1)], epsilon, "lower")
        assert float(worst) <= composed + charge(epsilon, eta) + TINY
        assert float(worst) >= lower - charge(epsilon, eta) - TINY


@pytest.mark.parametrize("beta", [0.05, 0.2, 0.6])
def test_account_of_a_tiny_batch_is_a_true_guarantee(beta: float) -> None:
    noise, n, counters, slots = Noise(4, 1, 1), 2, 2, 8
    summed = total([capped_report(noise, counters, slots)] * n)
    achieved = account(BatchEvent(noise, Padding(1, slots), n, 0, 1, counters), beta)
    outputs = [shifted(summed, (1, 0)), shifted(summed, (0, 1))]
    for bound, sign in ((achieved.epsilon_upper, 1), (achieved.epsilon_lower, -1)):
        e_epsilon = Fraction(math.exp(bound))
        worst = max(hockey_stick(a, b, e_epsilon) for a, b in permutations(outputs, 2))
        assert sign * (beta - float(worst)) >= -1e-9 or bound == 0.0
