"""Calibration: the bars of the reference setting, minimality, limits, and the papers' own."""

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from riffle.common.accounting import (
    BatchEvent,
    Calibration,
    CalibrationError,
    CalibrationName,
    account,
    calibrate,
    gaussian_variance,
    paper_tau,
)
from riffle.common.accounting.calibrate import paper_noise
from riffle.common.mechanism.counters import CounterLayout, Families, Sizes
from riffle.common.mechanism.parameters import MAX_DRAWS, Guarantee, Noise

SIZES = Sizes(X=4, A=2, H=6)


def reference(
    families: Families,
    layer: int | None = None,
    *,
    n: int = 4096,
    epsilon: float = 1.0,
    beta: float = 1e-5,
    dishonest_fraction: float = 0.0,
    sizes: Sizes = SIZES,
    **options: Any,
) -> Calibration[Noise]:
    layout = CounterLayout(sizes, families, layer)
    return calibrate(layout, n, Guarantee(epsilon, beta, dishonest_fraction), **options)


@pytest.mark.parametrize(
    ("families", "layer", "ones", "ratio"),
    [("paper", None, 510, 1.02), ("paper", 2, 60, 1.07), ("joint", None, 172, 1.03)],
)
def test_bars_of_the_reference_batch(
    families: Families, layer: int | None, ones: float, ratio: float
) -> None:
    result = reference(families, layer)
    cells = CounterLayout(SIZES, families, layer).cells
    assert result.account.expected_ones <= ones
    assert result.account.variance <= ratio * gaussian_variance(1.0, 1e-5, cells)
    assert result.account.epsilon_upper <= 1.0
    assert result.account.epsilon_upper - result.account.epsilon_lower <= 0.01


@settings(max_examples=12, deadline=None)
@given(
    st.integers(1, 10**7),
    st.sampled_from([0.0, 0.1, 1 / 3, 0.9]),
    st.sampled_from([0.1, 0.5, 1.0, 2.0, 4.0]),
    st.sampled_from([("joint", 0), ("paper", 0), ("paper", None)]),
)
def test_every_calibration_keeps_its_promise(
    n: int, fraction: float, epsilon: float, scope: tuple[Families, int | None]
) -> None:
    layout = CounterLayout(SIZES, *scope)
    result = calibrate(layout, n, Guarantee(epsilon, 1e-5, fraction))
    event = BatchEvent(result.noise, result.padding, n, fraction, layout.cells, layout.counters)
    again = account(event, 1e-5)
    assert again == result.account
    assert again.epsilon_upper <= epsilon
    assert again.beta_overflow <= 0.01 * 1e-5 * (1 + 1e-9)


@pytest.mark.parametrize("n", [1, 100, 4096, 10**5, 10**7])
def test_less_noise_would_break_the_promise(n: int) -> None:
    result = reference("paper", n=n)
    k = result.noise.p_numerator << (32 - result.noise.p_log2)
    less = Noise(result.noise.bits, math.floor(0.995 * k), 32)
    a = account(BatchEvent(less, result.padding, n, 0.0, cells=18, counters=288), 1e-5)
    assert a.epsilon_upper > 1.0


def test_expected_ones_do_not_depend_on_n() -> None:
    ones = [reference("paper", n=n).account.expected_ones for n in (1, 1000, 65536, 10**7)]
    assert max(ones) <= 1.003 * min(ones)


def test_large_batches_use_one_bit_of_p_off_the_grid() -> None:
    noise = reference("paper", n=10**7).noise
    assert (noise.bits, noise.p_log2) == (1, 32)
    assert noise.p < 2.0**-10


def test_fair_bits_win_at_large_epsilon() -> None:
    noise = reference("paper", 0, epsilon=8.0, n=1).noise
    assert (noise.p_numerator, noise.p_log2) == (1, 1)


def test_a_report_that_is_too_long_names_the_smallest_n_that_works() -> None:
    with pytest.raises(CalibrationError, match="the smallest n that works is") as info:
        reference("paper", n=40, max_messages=200)
    smallest = int(str(info.value).rsplit(" ", 1)[1])
    assert reference("paper", n=smallest, max_messages=200).padding.messages <= 200
    with pytest.raises(CalibrationError, match=r"needs 20[1-9] messages"):
        reference("paper", n=smallest - 1, max_messages=200)


def test_no_n_works_when_slots_do_not_even_hold_the_data() -> None:
    with pytest.raises(CalibrationError, match="no n up to"):
        reference("paper", max_messages=18)


@pytest.mark.parametrize("calibration", ["exact", "paper", "conference"])
@pytest.mark.parametrize("epsilon", [1e-6, 1e-200, 5e-324])
def test_an_epsilon_below_the_accountants_reach_is_refused(
    calibration: CalibrationName, epsilon: float
) -> None:
    with pytest.raises(CalibrationError, match="ask for more epsilon"):
        reference("paper", epsilon=epsilon, calibration=calibration)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epsilon": 0.0}, "epsilon"),
        ({"epsilon": math.inf}, "epsilon"),
        ({"epsilon": math.nan}, "epsilon"),
        ({"beta": 0.0}, "beta"),
        ({"n": 0}, "n >= 1"),
        ({"dishonest_fraction": 1.0}, "dishonest_fraction"),
        ({"calibration": "best"}, "exact, paper, conference; got 'best'"),
    ],
)
def test_impossible_requests_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        reference("paper", **change)


def test_the_papers_tau() -> None:
    assert paper_tau(1.0, 1e-5, SIZES) == 500_068


def test_the_conference_papers_tau_does_not_split_beta() -> None:
    assert paper_tau(1.0, 1e-5, SIZES, split=False) == math.ceil(96 * math.log(2e5) * 18**2)
    noise = reference("paper", calibration="conference").noise
    assert noise.mean(4_096) < reference("paper", calibration="paper").noise.mean(4_096)


@pytest.mark.parametrize("epsilon", [1e3, 1e155, 1e308])
def test_an_epsilon_without_meaning_takes_the_least_noise(epsilon: float) -> None:
    assert paper_tau(epsilon, 1e-5, SIZES) == 1
    assert reference("paper", epsilon=epsilon).noise == reference("paper", epsilon=1e3).noise


def test_the_papers_calibration_in_both_regimes() -> None:
    small = reference("paper", calibration="paper")
    assert small.noise == Noise(123, 1, 1)
    assert small.account.expected_ones == 123 * 4096 / 2
    assert small.account.epsilon_upper < 0.06
    large = reference("paper", calibration="paper", n=10**6)
    assert (large.noise.bits, large.noise.p_log2) == (1, 32)
    assert large.noise.p == pytest.approx(500_068 / 2e6, rel=1e-8)
    assert large.account.expected_ones >= 500_068 / 2
    ratio = small.account.expected_ones / reference("paper").account.expected_ones
    assert 480 < ratio < 520


@given(st.integers(1, 10**9), st.integers(1, 10**7))
def test_the_papers_noise_is_never_less_than_tau(n: int, tau: int) -> None:
    noise = paper_noise(n, tau)
    assert 2 * n * noise.bits * noise.p_numerator >= tau * 2**noise.p_log2
    assert noise.bits == 1 or n <= tau


@pytest.mark.parametrize("n", [499_999, 500_068, 500_069, 500_070])
def test_the_papers_regimes_meet_at_tau(n: int) -> None:
    noise = paper_noise(n, 500_068)
    assert noise.p == pytest.approx(0.5, rel=1e-5)
    assert noise.bits == (2 if n < 500_068 else 1)


def test_no_report_takes_more_noise_bits_than_a_node_draws() -> None:
    result = reference("paper", n=1, epsilon=0.1)
    assert result.noise.bits * 288 <= MAX_DRAWS
    assert result.account.epsilon_upper <= 0.1
    assert result.noise.p_log2 < 10, "the smallest p would take more bits"
    large = Sizes(X=1180, A=2, H=6)
    with pytest.raises(CalibrationError, match="make n at least about") as caught:
        reference("paper", n=1, epsilon=0.1, sizes=large)
    enough = int(str(caught.value).rsplit(" ", 1)[1])
    assert reference("paper", n=enough, epsilon=0.1, sizes=large).noise.bits <= 16
