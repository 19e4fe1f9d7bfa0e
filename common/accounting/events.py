"""Events, neighbours and ledger entries: what happened, apart from how it is accounted.

Unit and neighbouring relation. A user is one person who gives one episode, one report in a
population. Two populations are neighbours when one user's report is replaced by another, all n
reports staying: `replace one user`. The number of users is public.

A batch is an event. What it gives each user is `account`; over several batches:

* parallel (`run_guarantee`): users that appear once. The user who differs reports in one batch b.
  Batches before b have the same distribution under both neighbours; batch b is
  (epsilon_b, beta_b)-DP given them; later batches see b's output and other users' data only, which
  is post-processing. The run is (max epsilon_b, max beta_b)-DP, however the learner adapts.
* sequential (`repeated_user_guarantee`): a user who appears in t batches. Losses of all t batches
  add, so all their moves are composed exactly, ups and downs alike, which again makes the two
  directions one. Whatever a batch's deployment depends on, its loss is dominated by the same
  distribution, so adaptive deployments are covered (Zhu, Dong and Wang 2022, Theorem 10) as long
  as the events themselves, n and noise, were fixed before. Overflow of all batches is charged:
  (1 + e^epsilon) times the sum of the eta.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from riffle.common.accounting import bounds
from riffle.common.accounting.account import Account, account, check_batch, moves_of, overflow_of
from riffle.common.accounting.bounds import AnyMoves
from riffle.common.noise import BatchNoise, Guarantee, Padding, honest_reports

Neighbours = Literal["replace one user"]

NEIGHBOURS: Final[Neighbours] = "replace one user"


@dataclass(frozen=True, slots=True)
class BatchEvent:
    """A batch of n reports over `counters` counters, of which one user moves `cells` pairs."""

    noise: BatchNoise
    padding: Padding
    n: int
    dishonest_fraction: float
    cells: int
    counters: int


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """What a batch spent: the event, and the guarantee that was recorded for it.

    `guarantee` may be weaker than the event's account: infinite epsilon for a seeded test batch.
    """

    run: str
    batch: str
    event: BatchEvent
    guarantee: Guarantee
    neighbours: Neighbours = NEIGHBOURS


def account_event(event: BatchEvent, beta: float) -> Account:
    """Account of one batch at beta."""
    return account(
        event.noise,
        event.padding,
        n=event.n,
        dishonest_fraction=event.dishonest_fraction,
        cells=event.cells,
        counters=event.counters,
        beta=beta,
    )


def run_guarantee(entries: Sequence[LedgerEntry]) -> Guarantee:
    """Guarantee of all batches together for users that appear in one of them (parallel).

    It holds up to the smallest dishonest fraction of any batch. Nothing released: (0, 0).
    """
    if not entries:
        return Guarantee(0.0, 0.0)
    guarantees = [entry.guarantee for entry in entries]
    return Guarantee(
        max(g.epsilon for g in guarantees),
        max(g.beta for g in guarantees),
        min(g.dishonest_fraction for g in guarantees),
    )


def repeated_user_guarantee(events: Sequence[BatchEvent], beta: float) -> Guarantee:
    """Guarantee at beta for a user who reports once in each of these batches (sequential)."""
    if not events:
        return Guarantee(0.0, 0.0)
    for event in events:
        check_batch(event.cells, event.counters, beta)
    eta = sum(_overflow(event) for event in events)
    return Guarantee(
        bounds.epsilon(_merged(events), beta, "upper", eta),
        beta,
        min(event.dishonest_fraction for event in events),
    )


def _overflow(event: BatchEvent) -> float:
    return overflow_of(event.noise, event.padding, event.n, event.counters)


def _merged(events: Sequence[BatchEvent]) -> list[AnyMoves]:
    """Moves of all events, those with equal noise taken together."""
    cells: Counter[AnyMoves] = Counter()
    for event in events:
        honest = honest_reports(event.n, event.dishonest_fraction)
        cells[moves_of(event.noise, honest, 1)] += event.cells
    return [replace(one, cells=count) for one, count in cells.items()]
