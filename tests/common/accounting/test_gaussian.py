"""The analytic Gaussian mechanism against its definition and the literature's limit."""

import math

import pytest
from scipy import integrate

from riffle.common.accounting import gaussian_variance


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 4.0])
@pytest.mark.parametrize("cells", [1, 18])
def test_variance_makes_delta_exactly_beta(epsilon: float, cells: int) -> None:
    """The hockey-stick divergence of N(S, v) and N(0, v), integrated numerically."""
    v, S, beta = gaussian_variance(epsilon, 1e-5, cells), math.sqrt(2 * cells), 1e-5
    sigma = math.sqrt(v)
    start = epsilon * v / S + S / 2

    def integrand(x: float) -> float:
        P = math.exp(-((x - S) ** 2) / (2 * v))
        Q = math.exp(-(x**2) / (2 * v))
        return (P - math.exp(epsilon) * Q) / (sigma * math.sqrt(2 * math.pi))

    area, _ = integrate.quad(integrand, start, start + 12 * sigma, epsabs=1e-14)
    assert area == pytest.approx(beta, rel=1e-5)


def test_variance_is_proportional_to_cells() -> None:
    assert gaussian_variance(1.0, 1e-5, 18) == pytest.approx(18 * gaussian_variance(1.0, 1e-5, 1))
    assert gaussian_variance(1.0, 1e-5, 18) == pytest.approx(501.03, abs=0.01)


@pytest.mark.parametrize(
    ("epsilon", "beta", "cells", "message"),
    [(0.0, 1e-5, 1, "epsilon"), (1.0, 0.0, 1, "beta"), (1.0, 1.0, 1, "beta"), (1, 0.1, 0, "cells")],
)
def test_impossible_guarantees_are_refused(
    epsilon: float, beta: float, cells: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        gaussian_variance(epsilon, beta, cells)


@pytest.mark.parametrize(
    ("epsilon", "beta", "low", "high"),
    [(5e-324, 5e-324, 1e30, 1e40), (100.0, 1 - 2**-53, 1e-20, 1e-2), (1e300, 1e-5, 1e-20, 1e-2)],
)
def test_extreme_guarantees_have_an_answer(
    epsilon: float, beta: float, low: float, high: float
) -> None:
    assert low < gaussian_variance(epsilon, beta, 1) < high
