"""The forward check: what a batch's noise and padding give its users.

Every role runs `account` on the descriptor it is shown, and believes nobody else's number.
beta pays for two things: the composition of the counters' losses (`composition`), and noise that
finds no slot (`overflow`). epsilon_upper, the guarantee as shipped, is the smallest epsilon at
which both together stay within beta. Only honest reports' noise counts; dishonest ones are
independent of the user's data whatever they contain.

Local and central batches (`Flips`; `Laplace`, `FairBits`) cut no noise and count on nobody else's:
their beta is for composition alone, and n and the dishonest fraction change nothing.

Events, neighbours and ledger entries: what happened, apart from how it is accounted.

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

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final, Literal

from riffle.common.accounting import bounds
from riffle.common.accounting.binomial import charge, overflow_probability
from riffle.common.accounting.bounds import AnyMoves, Moves, Steps
from riffle.common.mechanism.noise import (
    BatchNoise,
    FairBits,
    Flips,
    Guarantee,
    Laplace,
    Noise,
    Padding,
    honest_reports,
)

MAX_CELLS, MAX_COUNTERS = 1 << 16, 1 << 53
"""A descriptor has thousands of cells; these bounds keep arrays within memory and doubles finite.
"""


@dataclass(frozen=True, slots=True)
class Account:
    """(epsilon, beta)-DP of one batch for each user, and what its noise costs.

    `epsilon_upper` holds; the true epsilon lies between `epsilon_lower` and it. `beta_overflow` is
    the part of beta that padding takes at epsilon_upper. `variance` and `expected_ones` are those
    of one counter when all n reports are honest; `expected_ones_per_report` is one user's noise
    messages over all counters, of `messages` in all.
    """

    epsilon_lower: float
    epsilon_estimate: float
    epsilon_upper: float
    beta: float
    beta_overflow: float
    variance: float
    expected_ones: float
    expected_ones_per_report: float
    messages: int
    n: int
    honest_reports: int

    def meets(self, epsilon: float, beta: float) -> bool:
        """Whether each user has at least (epsilon, beta)-DP."""
        return self.epsilon_upper <= epsilon and self.beta <= beta


def account(
    noise: BatchNoise,
    padding: Padding,
    *,
    n: int,
    dishonest_fraction: float,
    cells: int,
    counters: int,
    beta: float,
) -> Account:
    """Guarantee at beta of a batch of n reports over `counters` counters, of which replacing one
    user moves at most `cells` up and `cells` down by one.

    Raises ValueError for impossible arguments. Epsilon is infinity when the noise is too small or
    the slots too few for any epsilon at this beta.
    """
    honest = honest_reports(n, dishonest_fraction)
    check_batch(cells, counters, beta)
    return _account(noise, padding, n=n, honest=honest, cells=cells, counters=counters, beta=beta)


def check_batch(cells: int, counters: int, beta: float) -> None:
    """Raise ValueError unless there are cells to move among the counters, and 0 < beta < 1."""
    if not 1 <= cells <= counters:
        raise ValueError(
            f"cells must be 1 to the number of counters, got cells={cells}, counters={counters}"
        )
    if cells > MAX_CELLS or counters > MAX_COUNTERS:
        raise ValueError(f"at most {MAX_CELLS} cells of 2**53 counters are accounted for")
    if not 0.0 < beta < 1.0:
        raise ValueError(f"beta must lie strictly between 0 and 1, got {beta}")


def moves_of(noise: BatchNoise, honest: int, cells: int) -> AnyMoves:
    """Losses of `cells` pairs of moves under this noise; `honest` reports carry it."""
    match noise:
        case Noise():
            return Moves(honest * noise.bits, noise.p, cells)
        case Flips():
            return Steps(noise.f / (1.0 - noise.f), cells)
        case Laplace():
            return Steps(noise.q, cells)
        case FairBits():
            return Moves(noise.bits, 0.5, cells)


def overflow_of(noise: BatchNoise, padding: Padding, n: int, counters: int) -> float:
    """eta of `overflow`: only bits that users send can find no slot."""
    if not isinstance(noise, Noise):
        return 0.0
    return overflow_probability(n, noise.bits * counters, noise.p, padding.noise_slots)


@lru_cache(maxsize=1024)
def _account(
    noise: BatchNoise,
    padding: Padding,
    *,
    n: int,
    honest: int,
    cells: int,
    counters: int,
    beta: float,
) -> Account:
    moves = [moves_of(noise, honest, cells)]
    eta = overflow_of(noise, padding, n, counters)
    upper = bounds.epsilon(moves, beta, "upper", eta)
    lower = bounds.epsilon(moves, beta, "lower", eta)
    middle = bounds.epsilon(moves, beta, "estimate")
    from_user = isinstance(noise, Noise | Flips)
    return Account(
        epsilon_lower=min(lower, upper),
        epsilon_estimate=min(max(middle, lower), upper),
        epsilon_upper=upper,
        beta=beta,
        beta_overflow=min(1.0, charge(upper, eta)) if math.isfinite(upper) else min(1.0, eta),
        variance=noise.variance(n),
        expected_ones=noise.mean(n),
        expected_ones_per_report=counters * noise.mean(1) if from_user else 0.0,
        messages=padding.messages,
        n=n,
        honest_reports=honest,
    )


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
