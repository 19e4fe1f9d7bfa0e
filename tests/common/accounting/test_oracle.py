"""dp-accounting as an oracle. Its import takes seconds, hence inside the tests.

`symmetric=False` matters: with its default the library builds one direction and would compose ups
with ups only.
"""

import math
from typing import Any

import pytest

from riffle.common.accounting import loss_curve
from riffle.common.accounting.loss_curve import Moves
from tests.common.accounting.deltas import delta_bound


def log_binomial(N: int, p: float) -> dict[int, float]:
    result = {}
    for z in range(N + 1):
        log_mass = math.lgamma(N + 1) - math.lgamma(z + 1) - math.lgamma(N - z + 1)
        log_mass += z * math.log(p) + (N - z) * math.log1p(-p)
        if log_mass > -60.0:
            result[z] = log_mass
    return result


def oracle(N: int, p: float, cells: int, pessimistic: bool) -> Any:
    from dp_accounting.pld import privacy_loss_distribution as pld

    lower = log_binomial(N, p)
    upper = {z + 1: mass for z, mass in lower.items()}
    pairs = [
        pld.from_two_probability_mass_functions(
            a, b, pessimistic_estimate=pessimistic, value_discretization_interval=2e-5,
            symmetric=False,
        )
        for a, b in ((lower, upper), (upper, lower))
    ]  # fmt: skip
    return pairs[0].self_compose(cells).compose(pairs[1].self_compose(cells))


@pytest.mark.parametrize(
    ("N", "p", "cells"), [(2006, 0.5, 18), (225, 0.5, 2), (7700, 1 / 128, 2), (60, 0.5, 3)]
)
def test_epsilon_agrees_with_dp_accounting(N: int, p: float, cells: int) -> None:
    above, below = oracle(N, p, cells, True), oracle(N, p, cells, False)
    moves = [Moves(N, p, cells)]
    for beta in (1e-4, 1e-5, 1e-6):
        high, low = above.get_epsilon_for_delta(beta), below.get_epsilon_for_delta(beta)
        assert loss_curve.epsilon(moves, beta, "upper") >= low - 1e-9
        assert loss_curve.epsilon(moves, beta, "lower") <= high + 1e-9
        assert loss_curve.epsilon(moves, beta, "estimate") == pytest.approx(high, rel=2e-3)
    for epsilon in (0.25, 1.0):
        assert delta_bound(moves, epsilon, "upper") >= below.get_delta_for_epsilon(epsilon) - 1e-14
        assert delta_bound(moves, epsilon, "lower") <= above.get_delta_for_epsilon(epsilon) + 1e-14
