"""Searches over the accountant: how much noise an (epsilon, beta) takes.

Epsilon falls like 1 / sqrt(variance), faster where counters are almost empty. The last two trials
predict the next; a bracket of one failing and one sufficient value keeps the search honest where
the prediction is not, and what is returned has been checked itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

from riffle.common.accounting.bounds import VARIANCE_CAP, Moves, epsilon
from riffle.common.accounting.gaussian import gaussian_variance
from riffle.common.noise import MAX_P_LOG2

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
