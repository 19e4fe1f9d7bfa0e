"""Privacy losses of the noise on one counter, and the privacy cost of padding.

**Losses.** The analyzer sees a counter as c + Z: its count c plus noise Z ~ Binomial(N, p).
Replacing one user moves c up or down by one. Let P be the law of the output on one input, and Q the
law on a neighbouring input. The loss of an outcome y is L(y) = log P(y) / Q(y). If y is impossible
under Q, the loss is infinite. The delta of P and Q is E_P[(1 - exp(epsilon - L))_+].

Let b(z) = Pr[Z = z] and r(y) = log b(y) / b(y - 1) = log((N - y + 1) p / (y (1 - p))).

* Up (the output is 1 + Z under P, Z under Q): for z < N, the outcome z + 1 has mass b(z) and loss
  -r(z + 1). The outcome N + 1 has mass b(N) and infinite loss.
* Down (the output is Z under P, 1 + Z under Q): for y > 0, the outcome y has mass b(y) and loss
  r(y). The outcome 0 has mass b(0) and infinite loss.

The code computes b from sums of r(y), and then normalises b. Outcomes farther than w from the mean
N p are left out, where w = D / 3 + sqrt(D^2 / 9 + 2 N p (1 - p) D) and D = `TAIL_EXPONENT`. By
Bernstein's inequality, their mass is at most exp(-D) on each side. Upper bounds count this mass as
infinite loss; lower bounds ignore it. Paper 000 (section V, appendix D) has Chernoff bounds and the
constant 96 in place of the exact distribution.

**Padding.** A report has `noise_slots` slots for its noise bits that are 1 (1-bits). Let S ~
Binomial(bits * counters, p) be the number of 1-bits before any are dropped. Let M be the mechanism
with unlimited slots, which is (epsilon, beta_c)-DP, and M' the mechanism that drops noise. If M and
M' draw the same noise, their outputs differ only if some user's S exceeds noise_slots. Data has
slots of its own, so on *every* input the outputs differ with probability at most
eta = n Pr[S > noise_slots]. Hence for neighbours D, D' and any set E

    Pr[M'(D) in E] <= Pr[M(D) in E] + eta
                   <= e^epsilon Pr[M(D') in E] + beta_c + eta
                   <= e^epsilon (Pr[M'(D') in E] + eta) + beta_c + eta,

so M' is (epsilon, beta_c + (1 + e^epsilon) eta)-DP.
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
    """The privacy losses if one counter moves by one: the finite `loss[i]` has the mass `mass[i]`.

    `infinite` is the mass at infinite loss, `dropped` bounds the mass left out, and `mass_error`
    bounds the relative error of `mass` and `infinite`. Arrays have shape (atoms,). Masses are
    probabilities under P (see the module).
    """

    mass: FloatArray
    loss: FloatArray
    infinite: float
    dropped: float
    mass_error: float


def support(N: int, p: float) -> tuple[int, int]:
    """Returns the first and last outcome of Binomial(N, p) that `binomial_losses` keeps."""
    D, mean = TAIL_EXPONENT, N * p
    width = D / 3.0 + math.sqrt(D * D / 9.0 + 2.0 * mean * (1.0 - p) * D)
    return max(0, math.floor(mean - width)), min(N, math.ceil(mean + width))


@lru_cache(maxsize=16)
def binomial_losses(N: int, p: float) -> tuple[Losses, Losses]:
    """Returns the losses of raising and of lowering a counter with Binomial(N, p) noise by one."""
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
    """Returns the privacy losses if a counter with discrete Laplace noise Z moves up or down by 1.

    Pr[Z = z] is proportional to q**|z|. The loss is log(1 / q) with probability Pr[Z >= 0] =
    1 / (1 + q), and otherwise log(q). A bit that is flipped with probability f = q / (1 + q) has
    the same losses.
    """
    if not 0.0 < q < 1.0:
        raise ValueError(f"the ratio q must lie strictly between 0 and 1, got {q}")
    a = -math.log(q)
    mass = np.array([q / (1.0 + q), 1.0 / (1.0 + q)])
    return Losses(mass, np.array([-a, a]), 0.0, 0.0, 8.0 * UNIT_ROUNDOFF)


def trim(losses: Losses, budget: float) -> Losses:
    """On each side, cuts the longest tail of mass at most `budget`. `dropped` gets the cut mass.

    A tail of tiny mass at huge loss would dominate the bounds on the errors.
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
    """Returns masses of sum 1 with log(mass[i + 1] / mass[i]) = r[i], and their relative error."""
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
    """Returns (1 + e^epsilon) eta, by which dropping noise with probability eta raises beta.

    If epsilon is above LARGEST_EPSILON, any eta except 0 costs infinity.
    """
    if eta == 0.0:
        return eta
    return (1.0 + math.exp(epsilon) if epsilon <= LARGEST_EPSILON else math.inf) * eta


def fewest_slots(n: int, trials: int, p: float, epsilon: float, beta: float) -> int:
    """Returns the fewest noise slots at which dropped noise costs at most `beta` > 0 (`charge`)."""
    low, high = -1, math.ceil(trials * p) + 16
    while high < trials and charge(epsilon, overflow_probability(n, trials, p, high)) > beta:
        low, high = high, 2 * high
    high = min(high, trials)
    while high - low > 1:
        middle = (low + high) // 2
        fits = charge(epsilon, overflow_probability(n, trials, p, middle)) <= beta
        low, high = (low, middle) if fits else (middle, high)
    return high
