"""The forward check: what a batch's noise and padding give its users.

Every role runs `account` on the descriptor it is shown, and believes nobody else's number.
beta pays for two things: the composition of the counters' losses (`composition`), and noise that
finds no slot (`overflow`). epsilon_upper, the guarantee as shipped, is the smallest epsilon at
which both together stay within beta. Only honest reports' noise counts; dishonest ones are
independent of the user's data whatever they contain.

Local and central batches (`Flips`; `Laplace`, `FairBits`) cut no noise and count on nobody else's:
their beta is for composition alone, and n and the dishonest fraction change nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from riffle.common.accounting import bounds
from riffle.common.accounting.bounds import AnyMoves, Moves, Steps
from riffle.common.accounting.overflow import charge, overflow_probability
from riffle.common.noise import BatchNoise, FairBits, Flips, Laplace, Noise, Padding, honest_reports

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
