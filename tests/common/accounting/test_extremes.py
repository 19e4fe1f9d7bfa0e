"""The accountant on the extreme noise that a descriptor may hold: bounds, or infinity."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from riffle.common.accounting import Account, BatchEvent, account
from riffle.common.accounting.binomial import binomial_losses
from riffle.common.accounting.loss_curve import Moves, epsilon
from riffle.common.mechanism.parameters import BatchNoise, FairBits, Flips, Laplace, Noise, Padding
from tests.common.accounting.exact import steps_delta

ROUNDING = 1e-12


def of(noise: BatchNoise, *, cells: int, beta: float, n: int = 1, slots: int = 0) -> Account:
    return account(BatchEvent(noise, Padding(1, slots), n, 0.0, cells, cells), beta)


def ratio(noise: Flips | Laplace) -> float:
    return noise.q if isinstance(noise, Laplace) else noise.f / (1.0 - noise.f)


@pytest.mark.parametrize(
    ("noise", "cells", "beta"),
    [
        (Flips(1), 2411, 0.5),  # e^-(distance of two losses) underflows: no slope
        (Laplace(1), 24, 0.999999),
        (Flips(7_228_320), 133, 0.5),  # the same, taken for a curve that has stopped falling
        (Flips(3), 87, 1e-12),
        (Laplace(1), 19, 5e-324),
        (Laplace(1), 1, 1e-16),  # the steepest tilt leaves no mass that a double holds
        (Laplace(3), 2, 0.3),  # the variance of one outcome, which is rounding
        (Flips(2**31 - 1), 3000, 1e-5),
        (Laplace(2**32 - 1), 3000, 1e-5),
    ],
)
def test_epsilon_of_extreme_steps_lies_between_the_bounds(
    noise: Flips | Laplace, cells: int, beta: float
) -> None:
    result, q = of(noise, cells=cells, beta=beta), ratio(noise)
    assert math.isfinite(result.epsilon_upper)
    assert steps_delta(q, cells, result.epsilon_upper * (1 + ROUNDING)) <= beta * (1 + 1e-9)
    below = result.epsilon_lower * (1 - ROUNDING)
    assert below == 0.0 or steps_delta(q, cells, below) >= beta * (1 - 1e-9)
    assert result.epsilon_upper - result.epsilon_lower <= 0.03 * result.epsilon_upper


@pytest.mark.parametrize(
    ("noise", "n", "cells", "beta"),
    [
        (Noise(470, 1, 32), 1, 2, 0.999999),  # outcomes whose probability underflows
        (Noise(75, 2**30 - 1, 30), 1, 1, 0.999999),
        (Noise(1, 574_540, 21), 1, 1, 1e-300),  # one outcome only, and its rounding
        (FairBits(40), 1, 1, 5e-324),
    ],
)
def test_noise_that_hides_nothing_gives_infinity(
    noise: BatchNoise, n: int, cells: int, beta: float
) -> None:
    result = of(noise, n=n, cells=cells, beta=beta, slots=1000 * cells)
    assert result.epsilon_lower == result.epsilon_upper == math.inf


@pytest.mark.parametrize("p", [2.0**-32, 2.0**-30, 2.0**-27 + 2.0**-32])
def test_counts_beyond_the_exact_integers_are_those_of_the_zeros(p: float) -> None:
    """Above 2^53 bits y and y + 1 are one double: the ones of 1 - p are counted by their zeros."""
    N, beta = 2**55, 1e-12
    for bound in ("lower", "upper"):
        assert epsilon([Moves(N, 1.0 - p, 3)], beta, bound) == epsilon(
            [Moves(N, p, 3)], beta, bound
        )
    for part in binomial_losses(N, 1.0 - p):
        assert part.loss.min() < 0.0 < part.loss.max()


def log_integers(low: int, high: int) -> st.SearchStrategy[int]:
    """Integers of every magnitude, and the two ends."""
    spread = st.floats(math.log(low), math.log(high)).map(lambda x: min(int(math.exp(x)), high))
    return st.sampled_from([low, high]) | spread


BERNOULLI = st.integers(1, 32).flatmap(
    lambda log2: st.builds(
        Noise,
        log_integers(1, 2**32),
        st.sampled_from([1, 2**log2 - 1]) | log_integers(1, 2**log2 - 1),
        st.just(log2),
    )
)
NOISES: st.SearchStrategy[BatchNoise] = st.one_of(
    BERNOULLI,
    BERNOULLI,
    st.builds(Flips, log_integers(1, 2**31 - 1)),
    st.builds(Laplace, log_integers(1, 2**32 - 1)),
    st.builds(FairBits, log_integers(1, 2**32)),
)
BETAS = st.sampled_from([5e-324, 1e-300, 1e-16, 0.5, 1.0 - 2.0**-53]) | st.floats(-40.0, -1e-9).map(
    math.exp
)
FRACTIONS = st.sampled_from([0.0, 5e-324, 0.5, 1.0 - 2.0**-53]) | st.floats(0.0, 0.999)


@settings(max_examples=60)
@given(
    noise=NOISES,
    slots=st.sampled_from([0, 1, 2**16]) | log_integers(1, 2**16),
    n=log_integers(1, 2**32),
    fraction=FRACTIONS,
    cells=log_integers(1, 3000),
    more=st.sampled_from([1, 2, 50]),
    beta=BETAS,
)
def test_every_noise_of_a_descriptor_has_bounds(
    noise: BatchNoise, slots: int, n: int, fraction: float, cells: int, more: int, beta: float
) -> None:
    """No error, no warning (pytest makes them errors), no number that is none."""
    event = BatchEvent(noise, Padding(1, slots), n, fraction, cells, cells * more)
    result = account(event, beta)
    assert 0.0 <= result.epsilon_lower <= result.epsilon_estimate <= result.epsilon_upper
    assert 0.0 <= result.beta_overflow <= 1.0
    assert math.isfinite(result.variance)
    if isinstance(noise, Flips | Laplace):
        assert steps_delta(ratio(noise), cells, result.epsilon_upper * (1 + 1e-9)) <= beta * (
            1 + 1e-6
        )
