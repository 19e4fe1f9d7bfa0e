"""The accountant: the guarantee of one batch (`account`).

Every role runs `account` on each descriptor that it gets, and trusts no guarantee that others
claim.

**Neighbours.** Each user gives one report. Two populations of n reports are neighbours if one
user's report differs between them ("replace one user"). The number of users is public.

**One batch.** beta pays for the counters' privacy losses (`loss_curve`) and for noise that does not
fit into a report's slots (`binomial`). The guarantee, epsilon_upper, is the smallest epsilon at
which these two costs together are at most beta. Only the noise of honest reports counts. With local
noise (`Flips`) or central noise (`Laplace`, `FairBits`), no noise is dropped, and no user relies on
other users' noise. The guarantee of such a batch depends on neither n nor the dishonest fraction.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from riffle.common.accounting import loss_curve
from riffle.common.accounting.binomial import charge, overflow_probability, tail
from riffle.common.accounting.loss_curve import AnyMoves, Moves, Steps
from riffle.common.mechanism.parameters import (
    BatchNoise,
    FairBits,
    Flips,
    Laplace,
    Noise,
    Padding,
    honest_reports,
)

MAX_CELLS, MAX_COUNTERS = 1 << 16, 1 << 53
"""Up to these limits, arrays fit into memory and doubles are finite."""


@dataclass(frozen=True, slots=True)
class BatchEvent:
    """A batch of n reports over `counters` counters.

    Replacing one user increases at most `cells` counters by one and decreases at most `cells` by
    one. Up to `dishonest_fraction` of the reports carry no noise. `word_bits` is the size of a
    counter's word in a summed batch (`common.mechanism.sums`), and None in any other batch.
    """

    noise: BatchNoise
    padding: Padding
    n: int
    dishonest_fraction: float
    cells: int
    counters: int
    word_bits: int | None = None

    @property
    def honest(self) -> int:
        """The number of reports that count as honest."""
        return honest_reports(self.n, self.dishonest_fraction)

    @property
    def overflow(self) -> float:
        """A bound on the probability that some report lacks noise slots (eta in `binomial`).

        In a summed batch, eta bounds the probability that some counter's sum exceeds its word.
        """
        noise = self.noise
        if not isinstance(noise, Noise):  # only noise that users send needs slots
            return 0.0
        if self.word_bits:
            room = 2**self.word_bits - 1 - self.n
            return min(1.0, self.counters * tail(self.n * noise.bits, noise.p, room))
        trials = noise.bits * self.counters
        return overflow_probability(self.n, trials, noise.p, self.padding.noise_slots)


@dataclass(frozen=True, slots=True)
class Account:
    """The (epsilon, beta)-DP that a batch gives each user, and the cost of the batch's noise.

    `epsilon_upper` is the guarantee; `epsilon_lower` is a lower bound on the true epsilon.
    `beta_overflow` is the part of beta that dropped noise uses up if epsilon is `epsilon_upper`.
    `variance` and `expected_ones` describe one counter's noise if all n reports are honest.
    `expected_ones_per_report` counts one report's noise bits that are 1, over all counters; it is 0
    for central noise.
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


def account(event: BatchEvent, beta: float) -> Account:
    """Returns the guarantee of a batch at beta, with lower and upper bounds on epsilon.

    If no epsilon holds at this beta, epsilon is infinity. Raises ValueError if an argument is out
    of range.
    """
    _ = event.honest  # checks n and the dishonest fraction
    check_batch(event.cells, event.counters, beta)
    return _account(event, beta)


def check_batch(cells: int, counters: int, beta: float) -> None:
    """Raises ValueError if cells, counters or beta is out of range."""
    if not 1 <= cells <= counters:
        got = f"cells={cells}, counters={counters}"
        raise ValueError(f"cells must be 1 to the number of counters, got {got}")
    if cells > MAX_CELLS or counters > MAX_COUNTERS:
        raise ValueError(f"at most {MAX_CELLS} cells of 2**53 counters are accounted for")
    if not 0.0 < beta < 1.0:
        raise ValueError(f"beta must lie strictly between 0 and 1, got {beta}")


def moves_of(noise: BatchNoise, honest: int, cells: int) -> AnyMoves:
    """Returns how replacing one user moves counters that carry the noise of `honest` reports."""
    match noise:
        case Noise():
            return Moves(honest * noise.bits, noise.p, cells)
        case Flips():
            return Steps(noise.f / (1.0 - noise.f), cells)
        case Laplace():
            return Steps(noise.q, cells)
        case FairBits():
            return Moves(noise.bits, 0.5, cells)


@lru_cache(maxsize=1024)
def _account(event: BatchEvent, beta: float) -> Account:
    noise, n, eta = event.noise, event.n, event.overflow
    moves = [moves_of(noise, event.honest, event.cells)]
    upper = loss_curve.epsilon(moves, beta, "upper", eta)
    lower = loss_curve.epsilon(moves, beta, "lower", eta)
    estimate = loss_curve.epsilon(moves, beta, "estimate")
    from_user = isinstance(noise, Noise | Flips)
    return Account(
        epsilon_lower=min(lower, upper),
        epsilon_estimate=min(max(estimate, lower), upper),
        epsilon_upper=upper,
        beta=beta,
        beta_overflow=min(1.0, charge(upper, eta)) if math.isfinite(upper) else min(1.0, eta),
        variance=noise.variance(n),
        expected_ones=noise.mean(n),
        expected_ones_per_report=event.counters * noise.mean(1) if from_user else 0.0,
        messages=event.padding.messages,
        n=n,
        honest_reports=event.honest,
    )
