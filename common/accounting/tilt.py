"""Where to look: the exponential tilt and the window in which losses are convolved.

For S = sum of the finite losses under P, K(s) = log E[exp(s S)]. Convolving the tilted masses
exp(lambda l) P(l) / exp(K) instead of P(l) puts the far tail of S, which is what delta is made of,
in the middle of the array: all errors of the discrete Fourier transform then are relative to delta
and not to 1. lambda and the window decide only how tight the bounds are, never whether they hold:
`composition` bounds afresh what falls outside.

Sums of products are written as np.sum, not np.dot, throughout this package: at these lengths a BLAS
starts threads that spin when cores are busy, and np.sum adds pairwise, with a smaller error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from riffle.common.accounting.losses import FloatArray, Losses

Part = tuple[Losses, int]
"""Losses of one move, and how many such moves there are."""

WINDOW_TAIL = 1e-13
"""Tilted mass that may lie outside the window on each side."""

STEPS = (2.0, 4.0, 5.5, 7.7, 11.0, 16.0)
"""Chernoff exponents that are tried, in units of 1 / standard deviation."""


LARGEST_EXPONENT = 2.0**30
"""Largest tilt times the largest sum of losses, which rounding moves by less than a millionth.

Where the variance is nothing but rounding, the tilt that it suggests knows no bounds."""

SMALLEST_WEIGHT = 1e-250
"""Below, what is added up may be what underflow has left."""


@dataclass(frozen=True, slots=True)
class Window:
    """Losses from `low` to `high`, tilted by `tilt`; the exponents that bound what is outside."""

    tilt: float
    low: float
    high: float
    step_low: float
    step_high: float


def log_mgf(mass: FloatArray, loss: FloatArray, s: float) -> float:
    """log sum of mass exp(s loss); minus infinity when there is no mass."""
    if not len(mass):
        return -math.inf
    weight, peak = tilted(mass, s * loss)
    total = float(np.sum(weight))
    return peak + math.log(total) if total > 0.0 else -math.inf


def tilted(mass: FloatArray, exponent: FloatArray) -> tuple[FloatArray, float]:
    """mass exp(exponent - peak), and the peak: the largest exponent.

    If it has no mass, and all other mass would underflow beside it, the largest that has mass.
    """
    peak = float(exponent.max())
    weight = mass * np.exp(exponent - peak)
    if float(weight.max()) < SMALLEST_WEIGHT and mass.any():
        peak = float(exponent[mass > 0.0].max())
        weight = mass * np.exp(np.minimum(exponent - peak, 0.0))
    return weight, peak


def cumulants(parts: Sequence[Part], s: float) -> tuple[float, float, float]:
    """K(s), K'(s) and K''(s) of the composed finite loss."""
    K = mean = variance = 0.0
    for part, count in parts:
        exponent = s * part.loss
        weight = part.mass * np.exp(exponent - exponent.max())
        total = float(weight.sum())
        m = float(np.sum(weight * part.loss)) / total
        K += count * (float(exponent.max()) + math.log(total))
        mean += count * m
        variance += count * float(np.sum(weight * (part.loss - m) ** 2)) / total
    return K, mean, variance


def choose_tilt(parts: Sequence[Part], delta: float) -> float:
    """lambda >= 0 near which Chernoff's bound on Pr[S >= K'(lambda)] equals delta."""
    target = math.log(1.0 / delta)
    variance = cumulants(parts, 0.0)[2]
    if variance <= 0.0:
        return 0.0
    most = _steepest(parts)
    start = tilt = min(math.sqrt(2.0 * target / variance), most)
    for _ in range(4):
        K, mean, _ = cumulants(parts, tilt)
        exponent = max(tilt * mean - K, target / 16.0)
        tilt *= math.sqrt(target / exponent)
    return min(tilt, 16.0 * start, most)


def _steepest(parts: Sequence[Part]) -> float:
    """The largest tilt; some loss must not be zero."""
    return LARGEST_EXPONENT / sum(count * float(np.abs(part.loss).max()) for part, count in parts)


def tilt_at(parts: Sequence[Part], epsilon: float, most: float) -> float:
    """lambda in [0, most] with K'(lambda) = epsilon, to a thousandth of `most`."""
    low, high = 0.0, most
    for _ in range(10):
        middle = 0.5 * (low + high)
        below = cumulants(parts, middle)[1] < epsilon
        low, high = (middle, high) if below else (low, middle)
    return low


def choose_window(parts: Sequence[Part], tilt: float) -> Window:
    """The shortest window with Chernoff bounds of WINDOW_TAIL outside, within the support of S."""
    K, _, variance = cumulants(parts, tilt)
    lowest = sum(count * float(part.loss.min()) for part, count in parts)
    highest = sum(count * float(part.loss.max()) for part, count in parts)
    if variance <= 0.0:
        return Window(tilt, lowest, highest, 1.0, 1.0)
    room, unit = math.log(1.0 / WINDOW_TAIL), 1.0 / math.sqrt(variance)
    above = [((cumulants(parts, tilt + z * unit)[0] - K + room) / (z * unit), z) for z in STEPS]
    below = [((K - cumulants(parts, tilt - z * unit)[0] - room) / (z * unit), z) for z in STEPS]
    high, z_high = min(above)
    low, z_low = max(below)
    return Window(tilt, max(low, lowest), min(high, highest), z_low * unit, z_high * unit)
