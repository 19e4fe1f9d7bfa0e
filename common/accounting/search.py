"""The analytic Gaussian mechanism, the yardstick for the binomial one.

Balle and Wang 2018, Theorem 8: noise of variance sigma^2 on a vector whose L2 sensitivity is S is
(epsilon, delta)-DP if and only if Phi(S / (2 sigma) - epsilon sigma / S)
- e^epsilon Phi(-S / (2 sigma) - epsilon sigma / S) <= delta. Here `cells` counters move up by one
and `cells` down by one, so S = sqrt(2 cells).

Searches over the accountant: how much noise an (epsilon, beta) takes.

Epsilon falls like 1 / sqrt(variance), faster where counters are almost empty. The last two trials
predict the next; a bracket of one failing and one sufficient value keeps the search honest where
the prediction is not, and what is returned has been checked itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

from scipy import optimize, special

from riffle.common.accounting.bounds import VARIANCE_CAP, Moves, epsilon
from riffle.common.mechanism.noise import MAX_P_LOG2


def gaussian_variance(epsilon: float, beta: float, cells: int) -> float:
    """Smallest variance a counter that is (epsilon, beta)-DP with Gaussian noise.

    Where it lies outside of 2 cells e^-40 to 2 cells e^80, the nearer of the two.
    """
    check_guarantee(epsilon, beta)
    if cells < 1:
        raise ValueError(f"cells must be at least 1, got {cells}")
    # Delta falls in x = log(sigma / S).
    x = _root(lambda v: _log_delta(math.exp(v), epsilon) - math.log(beta), -20.0, 40.0)
    return 2.0 * cells * math.exp(2.0 * x)


def _root(falling: Callable[[float], float], low: float, high: float) -> float:
    if falling(low) <= 0.0:
        return low
    if falling(high) >= 0.0:
        return high
    return float(optimize.brentq(falling, low, high))


def check_guarantee(epsilon: float, beta: float) -> None:
    """Raise ValueError unless epsilon is positive and finite and 0 < beta < 1."""
    if not 0.0 < epsilon < math.inf:
        raise ValueError(f"epsilon must be positive and finite, got {epsilon}")
    if not 0.0 < beta < 1.0:
        raise ValueError(f"beta must lie strictly between 0 and 1, got {beta}")


def _log_delta(sigma: float, epsilon: float) -> float:
    """log delta at unit sensitivity."""
    near = float(special.log_ndtr(0.5 / sigma - epsilon * sigma))
    if near == -math.inf:
        return near
    far = epsilon + float(special.log_ndtr(-0.5 / sigma - epsilon * sigma))
    return near + math.log(max(-math.expm1(far - near), 1e-300))


FINE, COARSE = 20, 14
"""Searches end when the bracket is one unit or 2^-FINE (bits), 2^-COARSE (p) of the answer wide."""

PREDICTIONS = 12
"""Trials that follow the prediction before plain bisection takes over."""


class CalibrationError(ValueError):
    """No noise of the allowed size gives the guarantee asked for.

    ``times``: a batch so many times larger would do, where that is known.
    """

    def __init__(self, text: str, times: float | None = None) -> None:
        super().__init__(text)
        self.times = times


@lru_cache(maxsize=4096)
def needed_bits(p: float, cells: int, target: float, beta: float) -> int:
    """Fewest bits N on a counter, from all users together, for (target, beta)-DP."""
    unit = p * (1.0 - p)
    guess = math.ceil(gaussian_variance(target, beta, cells) / unit)
    limit = math.floor(VARIANCE_CAP / unit)
    found = smallest(lambda N: epsilon([Moves(N, p, cells)], beta), target, guess, limit, FINE)
    if found is None:
        raise CalibrationError(
            f"epsilon={target:.6g} at beta={beta:g} with {cells} cells takes noise of variance "
            f"above {VARIANCE_CAP:g} a counter, more than is accounted for; ask for more epsilon"
        )
    return found


@lru_cache(maxsize=4096)
def needed_numerator(N: int, cells: int, target: float, beta: float, guess: float) -> int | None:
    """Smallest k with (target, beta)-DP from N bits of p = k / 2^32; None if there is none."""
    scale = 2**MAX_P_LOG2
    start = min(max(1, math.ceil(guess * scale)), scale // 2)
    return smallest(
        lambda k: epsilon([Moves(N, k / scale, cells)], beta), target, start, scale // 2, COARSE
    )


def smallest(
    value: Callable[[int], float], target: float, guess: int, limit: int, resolution: int
) -> int | None:
    """Smallest x in 1..limit with value(x) <= target, for a value that falls with x.

    To within one or 2^-resolution of x, whichever is more; what is returned has been checked.
    """
    low, high = 0, limit + 1
    x, points = min(max(guess, 1), limit), list[tuple[float, float]]()
    for trial in range(200):
        found = value(x)
        low, high = (low, x) if found <= target else (x, high)
        step = max(1, high >> resolution)
        if high - low <= step:
            break
        if 0.0 < found < math.inf:
            points.append((math.log(x), math.log(found / target)))
        bisect = trial >= PREDICTIONS
        x = (low + high) // 2 if bisect else _predict(points, found, low, high, step)
    return high if high <= limit else None


def _predict(
    points: list[tuple[float, float]], found: float, low: int, high: int, step: int
) -> int:
    """Next trial strictly between low and high: the secant in logarithms through the last points.

    A prediction next to a known end is moved a step inside, so that the bracket closes.
    """
    if not points or not math.isfinite(found):
        return min(2 * low, (low + high) // 2) if low else high // 2
    (log_x, excess), power = points[-1], -0.5
    if len(points) > 1 and points[-2][1] != excess:
        before = points[-2]
        power = min(max((excess - before[1]) / (log_x - before[0]), -100.0), -0.1)
    predicted = math.ceil(math.exp(log_x + min(max(-excess / power, -3.0), 3.0)))
    return min(max(predicted, low + step), high - step)
