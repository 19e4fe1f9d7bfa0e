"""What padding costs: the noise that finds no slot.

A report has `noise_slots` slots for its 1-bits of noise, S ~ Binomial(bits * counters, p) of them
before any is cut. Let M be the mechanism without a limit, (epsilon, beta_c)-DP, and M' the real
one, which drops what does not fit. Draw both from the same noise: they give the same output unless
some user's S exceeds noise_slots. That event depends on noise alone, so on *every* input its
probability is at most eta = n Pr[S > noise_slots]. Hence for neighbours D, D' and any set E

    Pr[M'(D) in E] <= Pr[M(D) in E] + eta
                   <= e^epsilon Pr[M(D') in E] + beta_c + eta
                   <= e^epsilon (Pr[M'(D') in E] + eta) + beta_c + eta,

so M' is (epsilon, beta_c + (1 + e^epsilon) eta)-DP. Slots reserved for data keep the event
independent of the data; without them a long episode would push noise out.
"""

from __future__ import annotations

import math

from scipy import special

TAIL_SAFETY = 1.0 + 1e-6
"""Binomial tails are raised by this, far above the rounding error of the incomplete beta."""

SMALLEST_TAIL = 2.0**-1022
"""Tails below this are accounted as this: they underflow, and e^epsilon may be as large."""

LARGEST_EPSILON = 700.0
"""Where e^epsilon nears a double's end: beyond, every eta costs all of beta."""


def tail(trials: int, p: float, slots: int) -> float:
    """Upper bound on Pr[Binomial(trials, p) > slots]."""
    if slots >= trials:
        return 0.0
    found = float(special.betainc(slots + 1.0, float(trials - slots), p))
    return min(1.0, TAIL_SAFETY * max(found, SMALLEST_TAIL))


def overflow_probability(n: int, trials: int, p: float, slots: int) -> float:
    """eta = n Pr[S > slots], capped at one, for S ~ Binomial(trials, p)."""
    return min(1.0, n * tail(trials, p, slots))


def charge(epsilon: float, eta: float) -> float:
    """(1 + e^epsilon) eta, what overflow adds to beta; beyond LARGEST_EPSILON infinity."""
    if eta == 0.0:
        return eta
    return (1.0 + math.exp(epsilon) if epsilon <= LARGEST_EPSILON else math.inf) * eta


def fewest_slots(n: int, trials: int, p: float, epsilon: float, beta: float) -> int:
    """Smallest noise_slots whose charge at epsilon is at most beta (> 0)."""
    low, high = -1, math.ceil(trials * p) + 16
    while high < trials and charge(epsilon, overflow_probability(n, trials, p, high)) > beta:
        low, high = high, 2 * high
    high = min(high, trials)
    while high - low > 1:
        middle = (low + high) // 2
        fits = charge(epsilon, overflow_probability(n, trials, p, middle)) <= beta
        low, high = (low, middle) if fits else (middle, high)
    return high
