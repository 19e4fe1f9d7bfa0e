"""Privacy losses of the noise on one counter, and the privacy cost of padding.

**Losses.** The analyzer sees a counter as c + Z: its count c plus noise Z ~ Binomial(N, p). Let
b(z) = Pr[Z = z]. Replacing one user moves c up or down by one. Let P be the law of the output on
one input, and Q the law on a neighbouring input. An outcome y drawn from P has the loss L(y) = log
P(y) / Q(y); if y is impossible under Q, L(y) is +infinity. The delta of P and Q is E_P[(1 -
exp(epsilon - L))_+]. Let r(y) = log b(y) / b(y - 1) = log((N - y + 1) p / (y (1 - p))). The two
moves are:

* up (the output is 1 + Z under P, Z under Q): for y = z + 1 with z < N, the mass under P is b(z),
  and the loss is -r(z + 1). The outcome y = N + 1 is impossible under Q, so its mass b(N) = p^N has
  infinite loss.
* down (the output is Z under P, 1 + Z under Q): for y > 0, the mass under P is b(y), and the loss
  is r(y). The outcome y = 0 is impossible under Q, so its mass b(0) = (1 - p)^N has infinite loss.

The code computes b from the r(y) alone (b(y) / b(y - 1) = exp r(y)), and then normalises b. No
gamma function of N is subtracted from another. The log of a mass is a sum of r(y), each rounded
once; the relative error of a mass is at most `mass_error`. Outcomes farther than w from the mean N
p are left out, where w = D / 3 + sqrt(D^2 / 9 + 2 N p (1 - p) D) and D = `TAIL_EXPONENT`. By
Bernstein's inequality, their mass is at most exp(-D) on each side. Upper bounds count this mass as
infinite loss; lower bounds ignore it.

This module analyses the protocol of paper 000 (section V, appendix D). Where the paper uses
Chernoff bounds and the constant 96, this module uses the exact distribution.

**Padding.** A report has `noise_slots` slots for its noise bits that are 1 (1-bits). The number of
these 1-bits, before any are dropped, is S ~ Binomial(bits * counters, p). Let M be the mechanism
with unlimited slots, which is (epsilon, beta_c)-DP. Let M' be the real mechanism, which drops noise
bits that do not fit. If M and M' draw the same noise, their outputs differ only if some user's S
exceeds noise_slots. That event depends on noise alone, so on *every* input its probability is at
most eta = n Pr[S > noise_slots]. Hence for neighbours D, D' and any set E

    Pr[M'(D) in E] <= Pr[M(D) in E] + eta
                   <= e^epsilon Pr[M(D') in E] + beta_c + eta
                   <= e^epsilon (Pr[M'(D') in E] + eta) + beta_c + eta,

so M' is (epsilon, beta_c + (1 + e^epsilon) eta)-DP. Data has slots of its own, so this event is
independent of the data. If data and noise shared slots, a long episode would displace noise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy import special

FloatArray = NDArray[np.float64]

TAIL_EXPONENT = 60.0
"""The exponent D. The outcomes left out have probability at most exp(-D), 9e-27, on each side."""

UNIT_ROUNDOFF = 2.0**-53

LOSS_ERROR = 2.0**-46
"""A bound on the rounding error of one loss: at most five roundings with |logarithm| below 100."""


EXACT = 2**53
"""Doubles represent counts exactly up to this number."""

SMALLEST_MASS = 1e-300
"""Masses below this may have underflowed, and are negligible beside any dropped mass."""

TAIL_SAFETY = 1.0 + 1e-6
"""Binomial tails are raised by this factor, far above the incomplete beta's rounding error."""

SMALLEST_TAIL = 2.0**-1022
"""Smaller tails are raised to this value: a tail that underflowed, times e^epsilon, may matter."""

LARGEST_EPSILON = 700.0
"""About the largest epsilon whose e^epsilon fits a double. Above it, any eta costs all of beta."""


@dataclass(frozen=True, slots=True, eq=False)
class Losses:
    """The losses of one move: probability `mass[i]` under P at the finite loss `loss[i]`.

    `infinite` is the mass at infinite loss, `dropped` bounds the mass left out, and `mass_error`
    bounds the relative error of `mass` and `infinite`. Arrays have shape (atoms,).
    """

    mass: FloatArray
    loss: FloatArray
    infinite: float
    dropped: float
    mass_error: float


def support(N: int, p: float) -> tuple[int, int]:
    """Returns the first and last outcome of Binomial(N, p) that are not left out."""
    D, mean = TAIL_EXPONENT, N * p
    width = D / 3.0 + math.sqrt(D * D / 9.0 + 2.0 * mean * (1.0 - p) * D)
    return max(0, math.floor(mean - width)), min(N, math.ceil(mean + width))


@lru_cache(maxsize=16)
def binomial_losses(N: int, p: float) -> tuple[Losses, Losses]:
    """Returns the losses (up, down) when a counter with Binomial(N, p) noise moves by one."""
    if N < 1 or not 0.0 < p < 1.0:
        raise ValueError(f"binomial noise needs N >= 1 and 0 < p < 1, got N={N}, p={p}")
    if N > EXACT and p > 0.5:  # N - y would be inexact: exchange ones and zeros
        up, down = binomial_losses(N, 1.0 - p)
        return down, up
    first, last = support(N, p)
    y = np.arange(first + 1, last + 2, dtype=np.float64)
    with np.errstate(divide="ignore"):
        r = np.log((N - y + 1.0) * p / (y * (1.0 - p)))
    mass, error = _masses(r[:-1])
    dropped = math.exp(-TAIL_EXPONENT) * ((first > 0) + (last < N))
    up_end = -1 if last == N else len(mass)
    up = Losses(mass[:up_end], -r[:up_end], float(mass[-1]) if last == N else 0.0, dropped, error)
    down_start = 1 if first == 0 else 0
    before = math.inf if first == 0 else math.log((N - first + 1) * p / (first * (1.0 - p)))
    r_before = np.concatenate(([before], r[:-1]))
    down = Losses(
        mass[down_start:],
        r_before[down_start:],
        float(mass[0]) if first == 0 else 0.0,
        dropped,
        error,
    )
    return up, down


@lru_cache(maxsize=16)
def step_losses(q: float) -> Losses:
    """Returns the losses of a move by one, up or down, under discrete Laplace noise Z.

    Pr[Z = z] is proportional to q**|z|. Let the output be 1 + Z under P and Z under Q. The ratio
    P(y) / Q(y) is 1 / q for y >= 1, and q for y <= 0. With a = -log q, the loss is a with
    probability Pr[Z >= 0] = 1 / (1 + q), and otherwise -a. If q = f / (1 - f), a bit that is
    flipped with probability f has the same losses with the same probabilities.
    """
    if not 0.0 < q < 1.0:
        raise ValueError(f"the ratio q must lie strictly between 0 and 1, got {q}")
    a = -math.log(q)
    mass = np.array([q / (1.0 + q), 1.0 / (1.0 + q)])
    return Losses(mass, np.array([-a, a]), 0.0, 0.0, 8.0 * UNIT_ROUNDOFF)


def trim(losses: Losses, budget: float) -> Losses:
    """On each side, moves the longest tail whose mass is at most `budget` to `dropped`.

    A tail of tiny mass at huge loss adds little to delta, but it would dominate the moment
    generating function that bounds the errors.
    """
    below, above = np.cumsum(losses.mass), np.cumsum(losses.mass[::-1])
    start = int(np.searchsorted(below, budget, side="right"))
    stop = len(losses.mass) - int(np.searchsorted(above, budget, side="right"))
    if start >= stop:  # without a budget, cut only outcomes whose mass underflowed
        return losses if budget <= SMALLEST_MASS else trim(losses, SMALLEST_MASS)
    if stop - start == len(losses.mass):
        return losses
    cut = float(losses.mass[:start].sum() + losses.mass[stop:].sum()) * (1.0 + losses.mass_error)
    return replace(
        losses,
        mass=losses.mass[start:stop],
        loss=losses.loss[start:stop],
        dropped=losses.dropped + cut,
    )


def _masses(r: FloatArray) -> tuple[FloatArray, float]:
    """Returns probabilities from log ratios r(first + 1) ... r(last), and their relative error."""
    log_mass = np.concatenate(([0.0], np.cumsum(r)))
    spread = float(np.abs(log_mass).max()) + 16.0
    log_mass -= log_mass.max()
    mass = np.exp(log_mass)
    error = 8.0 * len(mass) * spread * UNIT_ROUNDOFF
    return mass / mass.sum(), error


def tail(trials: int, p: float, slots: int) -> float:
    """Returns an upper bound on Pr[Binomial(trials, p) > slots]."""
    if slots >= trials:
        return 0.0
    probability = float(special.betainc(slots + 1.0, float(trials - slots), p))
    return min(1.0, TAIL_SAFETY * max(probability, SMALLEST_TAIL))


def overflow_probability(n: int, trials: int, p: float, slots: int) -> float:
    """Returns eta = n Pr[S > slots], capped at one, for S ~ Binomial(trials, p)."""
    return min(1.0, n * tail(trials, p, slots))


def charge(epsilon: float, eta: float) -> float:
    """Returns what dropped noise costs in beta: (1 + e^epsilon) eta.

    If epsilon is above LARGEST_EPSILON, any eta except 0 costs infinity.
    """
    if eta == 0.0:
        return eta
    return (1.0 + math.exp(epsilon) if epsilon <= LARGEST_EPSILON else math.inf) * eta


def fewest_slots(n: int, trials: int, p: float, epsilon: float, beta: float) -> int:
    """Returns the fewest noise slots for which `charge`, at epsilon, is at most beta (> 0)."""
    low, high = -1, math.ceil(trials * p) + 16
    while high < trials and charge(epsilon, overflow_probability(n, trials, p, high)) > beta:
        low, high = high, 2 * high
    high = min(high, trials)
    while high - low > 1:
        middle = (low + high) // 2
        fits = charge(epsilon, overflow_probability(n, trials, p, middle)) <= beta
        low, high = (low, middle) if fits else (middle, high)
    return high
