"""The account of a batch: its properties, and the events that it refuses."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from riffle.common.accounting import Account, BatchEvent, account
from riffle.common.mechanism.parameters import Noise, Padding


def of(
    bits: int = 126, n: int = 4096, slots: int = 82, fraction: float = 0.0, **more: float
) -> Account:
    given_more = {"cells": 18, "counters": 288, "beta": 1e-5} | more
    cells, counters = int(given_more["cells"]), int(given_more["counters"])
    event = BatchEvent(Noise(bits, 1, 10), Padding(18, slots), n, fraction, cells, counters)
    return account(event, given_more["beta"])


def test_account_of_the_reference_batch() -> None:
    a = of()
    assert 0.99 < a.epsilon_lower <= a.epsilon_estimate <= a.epsilon_upper <= 1.0
    assert a.expected_ones == 504.0
    assert a.expected_ones_per_report == 126 * 288 / 1024
    assert a.variance == pytest.approx(504.0, rel=1e-3)
    assert a.messages == 100
    assert 0 < a.beta_overflow < 2e-7
    assert 0.9 < a.epsilon_upper <= 1.0
    assert a.beta == 1e-5


def test_dishonest_reports_give_no_noise() -> None:
    honest = of(fraction=0.25)
    assert honest.honest_reports == 3072
    assert honest.epsilon_upper > of().epsilon_upper
    assert honest.expected_ones == of().expected_ones


def test_too_few_slots_cost_epsilon_and_then_everything() -> None:
    enough, few, none = of(slots=120), of(slots=78), of(slots=40)
    assert enough.epsilon_upper < few.epsilon_upper < math.inf
    assert few.epsilon_lower < enough.epsilon_lower
    assert few.beta_overflow > enough.beta_overflow
    assert none.epsilon_upper == math.inf


def test_noise_below_any_epsilon_is_infinite_and_no_error() -> None:
    a = of(bits=1, n=1)
    assert a.epsilon_upper == a.epsilon_estimate == math.inf


@settings(max_examples=25, deadline=None)
@given(
    st.integers(20, 400),
    st.integers(1, 5000),
    st.integers(1, 12),
    st.sampled_from([1e-9, 1e-6, 1e-4]),
)
def test_more_noise_fewer_moves_and_more_beta_never_cost_epsilon(
    bits: int, n: int, cells: int, beta: float
) -> None:
    slots = bits * 24
    base = of(bits, n, slots, cells=cells, counters=24, beta=beta).epsilon_upper
    more_noise = of(bits + 7, n, (bits + 7) * 24, cells=cells, counters=24, beta=beta)
    more_cells = of(bits, n, slots, cells=cells + 1, counters=24, beta=beta)
    more_beta = of(bits, n, slots, cells=cells, counters=24, beta=2 * beta)
    assert more_noise.epsilon_upper <= base * (1 + 1e-4)
    assert more_cells.epsilon_upper >= base * (1 - 1e-4)
    assert more_beta.epsilon_upper <= base * (1 + 1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cells": 0}, "cells"),
        ({"cells": 300}, "cells"),
        ({"beta": 0.0}, "beta"),
        ({"beta": 1.0}, "beta"),
        ({"beta": math.nan}, "beta"),
        ({"n": 0}, "n >= 1"),
        ({"n": 10**400}, "at most 2\\*\\*53"),
        ({"counters": 10**400}, "2\\*\\*53 counters"),
        ({"cells": 10**9, "counters": 10**9}, "at most 65536 cells"),
        ({"fraction": 1.0}, "dishonest_fraction"),
    ],
)
def test_impossible_batches_are_refused(change: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        of(**change)  # type: ignore[arg-type]
