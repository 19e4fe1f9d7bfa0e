"""Spends: exact at the boundary of the promise, monotone beyond it, refused beyond the budget."""

import math
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from riffle.common.accounting import BatchEvent, account, repeated_user_guarantee, run_guarantee
from riffle.common.mechanism.parameters import Guarantee
from riffle.common.mechanism.policy import Mixture
from riffle.common.protocol.descriptor import BatchDescriptor
from riffle.common.protocol.errors import LocalError
from riffle.common.protocol.verification import batch_event
from riffle.coordinator.batches.issue import Issuer
from riffle.coordinator.batches.ledger import (
    Spend,
    composed,
    dishonest_at_least,
    planned,
    recorded,
    refuse_beyond,
    spent,
)
from riffle.coordinator.learning.learner import Deployment
from tests.coordinator.world import RUN, SHUFFLER_ID, spec

POLICY = Mixture.single([[0, 0], [0, 0]])


@cache
def batch(
    n: int = 400, gamma: float = 0.1, test_seed: int | None = None, **way: str
) -> BatchDescriptor:
    fields = {"dishonest_fraction": gamma, "test_seed": test_seed, **way}
    wanted = spec(**fields, epsilon=1.0, beta=1e-3)
    issuer = Issuer(SHUFFLER_ID, lambda: "0" * 64, lambda: 0.0)
    deployment = Deployment(0, "manual", POLICY, n, None)
    return issuer.issue(RUN, wanted, deployment, index=0, step=0).descriptor


def test_a_planned_spend_is_within_the_budget() -> None:
    spend = planned(batch())
    assert 0 < spend.epsilon_lower <= spend.epsilon_upper <= 1.0
    assert (spend.beta, spend.dishonest, spend.within_promise) == (1e-3, 40, True)


@pytest.mark.parametrize("reports", [1, 40])
def test_failures_within_the_promise_cost_nothing_more(reports: int) -> None:
    L = batch().padding.messages
    assert spent(batch(), reports * L) == planned(batch())


def test_past_the_promise_every_lying_report_costs() -> None:
    L = batch().padding.messages
    spends = [spent(batch(), 40 * L + 1), spent(batch(), 80 * L), spent(batch(), 200 * L)]
    assert [s.dishonest for s in spends] == [41, 80, 200]
    assert not any(s.within_promise for s in spends)
    uppers = [planned(batch()).epsilon_upper, *(s.epsilon_upper for s in spends)]
    assert uppers == sorted(set(uppers))


@pytest.mark.parametrize("trust", ["shuffle", "local", "central"])
@pytest.mark.parametrize(("n", "gamma", "most"), [(400, 0.1, 40), (45, 0.1, 4), (100, 0.29, 29)])
def test_the_promise_ends_at_gamma_under_every_trust_model(
    trust: str, n: int, gamma: float, most: int
) -> None:
    d = batch(n, gamma, trust=trust)
    L = d.padding.messages
    within = [spent(d, failed).within_promise for failed in (0, most * L, most * L + 1, n * L)]
    assert within == [True, True, False, False]
    assert spent(d, 0).dishonest == most, "as many reports of sums may be without data"
    assert spent(d, most * L) == planned(d)


@pytest.mark.parametrize("aggregation", ["messages", "sums"])
@pytest.mark.parametrize("gamma", [0.05, 0.1])
def test_a_spend_never_counts_on_the_noise_of_a_share_gamma(aggregation: str, gamma: float) -> None:
    """Silent reports cannot be seen, so each batch of both aggregations may have as many."""
    d = batch(gamma=gamma, aggregation=aggregation)
    at_gamma, all_honest = (
        account(batch_event(d, fraction), d.guarantee.beta).epsilon_upper for fraction in (gamma, 0)
    )
    for spend in (planned(d), spent(d, 0)):
        assert spend.epsilon_upper == at_gamma > all_honest


def test_when_nobody_is_honest_nothing_is_promised() -> None:
    L = batch().padding.messages
    assert spent(batch(), 400 * L).epsilon_upper == math.inf


@pytest.mark.parametrize("dishonest", [1, 7, 57, 113, 199, 399])
def test_a_lying_report_is_never_counted_as_honest(dishonest: int) -> None:
    d = batch(gamma=0.0)
    layout = d.layout
    spend = spent(d, dishonest * d.padding.messages)
    fraction = math.nextafter(dishonest / d.n, 1.0)
    event = BatchEvent(d.batch_noise, d.padding, d.n, fraction, layout.cells, layout.counters)
    honest = account(event, d.guarantee.beta)
    assert honest.honest_reports == d.n - dishonest
    assert spend.epsilon_upper == honest.epsilon_upper


@given(st.integers(0, 10_000))
def test_failures_imply_the_fewest_reports_that_can_hold_them(failed: int) -> None:
    L = batch().padding.messages
    reports = dishonest_at_least(batch(), failed)
    assert (reports - 1) * L < failed <= reports * L


def test_a_seeded_batch_has_no_guarantee() -> None:
    assert planned(batch(test_seed=1)).epsilon_upper == math.inf


def test_beyond_the_budget_is_refused() -> None:
    budget = Guarantee(1.0, 1e-5)
    refuse_beyond(budget, Spend(0.9, 1.0, 1e-5, 0, True), seeded=False)
    for spend in (
        Spend(0.9, 1.0000001, 1e-5, 0, True),
        Spend(0.9, 1.0, 1.1e-5, 0, True),
        Spend(0.9, math.nan, 1e-5, 0, True),
    ):
        with pytest.raises(LocalError, match="nothing was issued"):
            refuse_beyond(budget, spend, seeded=False)
        refuse_beyond(budget, spend, seeded=True)


def test_a_runs_spend_is_its_largest_batchs() -> None:
    small, large = batch(), batch(n=100)
    pairs = [(small, planned(small)), (large, spent(large, 30 * large.padding.messages))]
    total = run_guarantee([recorded(descriptor.n, spend) for descriptor, spend in pairs])
    assert total.epsilon == max(spend.epsilon_upper for _, spend in pairs)
    assert total.beta == 1e-3


def test_a_run_over_epochs_adds_up_what_a_person_spends_in_each() -> None:
    first, same, later = (
        batch().model_copy(update={"expires_at": end, "epoch_seconds": 60}) for end in (0, 59, 60)
    )
    spend = planned(batch())
    once = composed([(first, spend), (same, spend)])
    assert once.epsilon == spend.epsilon_upper
    event = batch_event(batch(), 0.1)
    twice = composed([(first, spend), (same, spend), (later, spend)])
    assert twice.epsilon == repeated_user_guarantee([event] * 2, spend.beta).epsilon > once.epsilon
