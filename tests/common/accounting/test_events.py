"""Several batches: parallel for users who appear once, sequential for users who appear again."""

import math
from dataclasses import replace

import pytest

from riffle.common.accounting import (
    BatchEvent,
    account,
    loss_curve,
    one_of_each_guarantee,
    repeated_user_guarantee,
    run_guarantee,
)
from riffle.common.accounting.loss_curve import Moves
from riffle.common.mechanism.parameters import Guarantee, Noise, Padding
from tests.common.accounting.deltas import delta_bound
from tests.common.accounting.exact import float_pair, product_delta

FINE = BatchEvent(Noise(126, 1, 10), Padding(18, 90), 4096, 0.0, 18, 288)
CRUDE = BatchEvent(Noise(15, 1, 10), Padding(2, 12), 4096, 0.1, 2, 40)


def test_a_run_costs_its_worst_batch() -> None:
    batches = [Guarantee(1.0, 1e-5, 0.2), Guarantee(0.5, 1e-4, 0.1)]
    assert run_guarantee(batches) == Guarantee(1.0, 1e-4, 0.1)
    assert run_guarantee([*batches, Guarantee(math.inf, 1.0)]).epsilon == math.inf
    assert run_guarantee([]) == Guarantee(0.0, 0.0)


def test_one_batch_repeated_once_is_its_account() -> None:
    once = repeated_user_guarantee([FINE], 1e-5)
    assert once.epsilon == account(FINE, 1e-5).epsilon_upper


def test_two_batches_cost_more_than_one_and_less_than_the_sum() -> None:
    once = account(FINE, 1e-5).epsilon_upper
    twice = repeated_user_guarantee([FINE, FINE], 1e-5).epsilon
    assert 1.35 * once < twice < 1.6 * once


def test_equal_batches_compose_like_one_with_more_cells() -> None:
    events = [replace(FINE, padding=Padding(18, 126 * 288))] * 3
    exact = loss_curve.epsilon([Moves(126 * 4096, 2.0**-10, 54)], 1e-5)
    assert repeated_user_guarantee(events, 1e-5).epsilon == exact


def test_different_batches_compose_exactly() -> None:
    """Against every joint outcome of both batches' counters, in both directions."""
    moves = [Moves(9, 0.5, 1), Moves(13, 0.25, 1)]
    (P, Q), (R, S) = float_pair(9, 0.5), float_pair(13, 0.25)
    for epsilon in (0.1, 1.0, 3.0):
        exact = product_delta([(P, Q), (Q, P), (R, S), (S, R)], epsilon)
        assert delta_bound(moves, epsilon, "lower") <= exact + 1e-12
        assert exact - 1e-12 <= delta_bound(moves, epsilon, "upper") <= exact * 1.005


def test_the_order_of_batches_does_not_matter_and_the_weakest_fraction_holds() -> None:
    there, back = (
        repeated_user_guarantee(events, 1e-5) for events in ([FINE, CRUDE], [CRUDE, FINE])
    )
    assert there.epsilon == pytest.approx(back.epsilon, rel=1e-9)
    assert there.dishonest_fraction == 0.0
    assert repeated_user_guarantee([], 1e-5) == Guarantee(0.0, 0.0)


def test_impossible_batches_are_refused() -> None:
    with pytest.raises(ValueError, match="beta"):
        repeated_user_guarantee([FINE], 0.0)
    with pytest.raises(ValueError, match="cells"):
        repeated_user_guarantee([replace(FINE, cells=0)], 1e-5)


def test_one_batch_of_each_group_is_bounded_by_the_weakest_choice() -> None:
    """Also where no batch is the weakest in every choice."""
    noises = [Noise(900, 1, 1), Noise(40, 1, 6), Noise(1_000, 1, 1)]
    events = [BatchEvent(noise, Padding(6, 5_000), 60, 0.0, 6, 40) for noise in noises]
    alone = [repeated_user_guarantee([event], 1e-5).epsilon for event in events]
    assert one_of_each_guarantee([events], 1e-5).epsilon == max(alone)
    pairs = [repeated_user_guarantee([a, b], 1e-5).epsilon for a in events for b in events]
    assert one_of_each_guarantee([events, events[::-1]], 1e-5).epsilon == max(pairs)
    many = one_of_each_guarantee([events] * 70, 1e-5)
    assert many.epsilon >= repeated_user_guarantee([events[0]] * 70, 1e-5).epsilon
