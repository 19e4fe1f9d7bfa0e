"""Searches for the least noise that the accountant accepts for a guarantee (epsilon, beta).

The first guess is the variance of the analytic Gaussian mechanism (Balle and Wang 2018, Theorem 8).
Let Gaussian noise of variance sigma^2 be added to a vector of L2 sensitivity S. This is (epsilon,
delta)-DP if and only if Phi(S / (2 sigma) - epsilon sigma / S) - e^epsilon Phi(-S / (2 sigma) -
epsilon sigma / S) <= delta. Replacing a user raises at most `cells` counters by one, and lowers at
most `cells` other counters by one. So S = sqrt(2 cells).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

from scipy import special

from riffle.common.accounting.loss_curve import VARIANCE_CAP, Moves, epsilon
from riffle.common.mechanism.parameters import MAX_P_LOG2

FINE, COARSE = 20, 14
"""Each is a ``resolution`` of `smallest`: FINE for bits and scales, COARSE for probabilities."""

PREDICTIONS = 12
"""The number of trials that follow predictions before plain bisection takes over."""


class CalibrationError(ValueError):
    """Raised if no noise of the allowed size gives the requested guarantee.

    ``times`` is the factor by which a batch would have to be larger, or None if it is not known.
    """

    def __init__(self, text: str, times: float | None = None) -> None:
        super().__init__(text)
        self.times = times


def check_guarantee(epsilon: float, beta: float) -> None:
    """Raises ValueError unless 0 < epsilon < infinity and 0 < beta < 1."""
    if not 0.0 < epsilon < math.inf:
        raise ValueError(f"epsilon must be positive and finite, got {epsilon}")
    if not 0.0 < beta < 1.0:
        raise ValueError(f"beta must lie strictly between 0 and 1, got {beta}")


def gaussian_variance(epsilon: float, beta: float, cells: int) -> float:
    """Returns the least variance at which Gaussian noise on each counter is (epsilon, beta)-DP.

    The answer is clipped to the range from 2 * `cells` * e^-40 to 2 * `cells` * e^80.
    """
    check_guarantee(epsilon, beta)
    if cells < 1:
        raise ValueError(f"cells must be at least 1, got {cells}")
    # Delta falls as x = log(sigma / S) grows.
    x = _root(lambda v: _log_delta(math.exp(v), epsilon) - math.log(beta), -20.0, 40.0)
    return 2.0 * cells * math.exp(2.0 * x)


def _root(falling: Callable[[float], float], low: float, high: float) -> float:
    """Bisects [low, high] for the root or nearest end, as SciPy's solver takes 0.2 s to import."""
    while low < (middle := 0.5 * (low + high)) < high:
        low, high = (middle, high) if falling(middle) > 0.0 else (low, middle)
    return middle


def _log_delta(sigma: float, epsilon: float) -> float:
    """Returns the log of the Gaussian mechanism's delta for sensitivity 1."""
    near = float(special.log_ndtr(0.5 / sigma - epsilon * sigma))
    if near == -math.inf:
        return near
    far = epsilon + float(special.log_ndtr(-0.5 / sigma - epsilon * sigma))
    return near + math.log(max(-math.expm1(far - near), 1e-300))


@lru_cache(maxsize=4096)
def needed_bits(p: float, cells: int, target: float, beta: float) -> int:
    """Returns the fewest noise bits on a counter, over all users, for (target, beta)-DP."""
    unit = p * (1.0 - p)
    guess = math.ceil(gaussian_variance(target, beta, cells) / unit)
    limit = math.floor(VARIANCE_CAP / unit)
    bits = smallest(lambda N: epsilon([Moves(N, p, cells)], beta), target, guess, limit, FINE)
    if bits is None:
        raise CalibrationError(
            f"epsilon={target:.6g} at beta={beta:g} with {cells} cells takes noise of variance "
            f"above {VARIANCE_CAP:g} a counter, more than is accounted for; ask for more epsilon"
        )
    return bits


@lru_cache(maxsize=4096)
def needed_numerator(N: int, cells: int, target: float, beta: float, guess: float) -> int | None:
    """Returns the least k for which N noise bits with p = k / 2^32 give (target, beta)-DP.

    Returns None if even p = 1/2 gives less privacy.
    """
    scale = 2**MAX_P_LOG2
    start = min(max(1, math.ceil(guess * scale)), scale // 2)
    return smallest(
        lambda k: epsilon([Moves(N, k / scale, cells)], beta), target, start, scale // 2, COARSE
    )


def smallest(
    value: Callable[[int], float], target: float, guess: int, limit: int, resolution: int
) -> int | None:
    """Returns the smallest x in 1..limit with value(x) <= target; None if there is none.

    value(x) must fall as x grows. The answer is too large by less than max(1, x / 2^resolution).
    """
    low, high = 0, limit + 1
    x, points = min(max(guess, 1), limit), list[tuple[float, float]]()
    for trial in range(200):
        y = value(x)
        low, high = (low, x) if y <= target else (x, high)
        step = max(1, high >> resolution)
        if high - low <= step:
            break
        if 0.0 < y < math.inf:
            points.append((math.log(x), math.log(y / target)))
        bisect = trial >= PREDICTIONS
        x = (low + high) // 2 if bisect else _predict(points, y, low, high, step)
    return high if high <= limit else None


def _predict(points: list[tuple[float, float]], y: float, low: int, high: int, step: int) -> int:
    """Returns the next x between low and high that `smallest` tries.

    `points` has log x and log(value(x) / target) of earlier x. A secant through the last two points
    predicts x. With only one point, value(x) is assumed to fall like 1 / sqrt(x). The result is at
    least `step` above low and below high, so that the bracket closes.
    """
    if not points or not math.isfinite(y):
        return min(2 * low, (low + high) // 2) if low else high // 2
    (log_x, excess), power = points[-1], -0.5
    if len(points) > 1 and points[-2][1] != excess:
        before = points[-2]
        power = min(max((excess - before[1]) / (log_x - before[0]), -100.0), -0.1)
    predicted = math.ceil(math.exp(log_x + min(max(-excess / power, -3.0), 3.0)))
    return min(max(predicted, low + step), high - step)
