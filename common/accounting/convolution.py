"""Puts losses on a grid, tilts them, and convolves them by discrete Fourier transforms.

**Grid.** Losses are moved to multiples of Delta.

* Upper (`connect_the_dots`; Doroshenko, Ghazi, Kamath, Kumar, Manurangsi 2022): an atom whose loss
  lies between k Delta and (k + 1) Delta is split into two atoms with these losses. The two atoms
  have the mass of the old atom, both under P and under Q (`binomial`). Merging the two atoms is
  post-processing and gives the old atom back. Therefore P and Q on the grid are at least as easy to
  tell apart as the true P and Q. The error is of order Delta^2.
* Lower (`round_down`): every loss is rounded down. (1 - exp(epsilon - L))_+ grows with the loss L,
  so delta never exceeds the true delta.

**Tilt and window.** Let S be the sum of the finite losses under P, K(s) = log E[exp(s S)], and
lambda the tilt. The tilted masses exp(lambda l) P(l) / exp(K(lambda)) are convolved instead of
P(l). The tilt puts the far tail of S, which makes up delta, in the middle of the array. All errors
of the transform are then relative to delta, not to 1. The array holds only a window of losses.
Tilt and window never affect whether the bounds hold: `loss_curve` accounts for mass outside the
window.

**Rounding.** Let u be the unit roundoff, and let the twiddle factors have errors of at most u. Then
the 2-norm error of a computed transform of length M is below 8 u log2(M) times the transform's norm
(Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., Theorem 24.2). The inverse
transform has the same bound. Propagating both bounds gives one number that no cell's error exceeds.

This package uses np.sum for sums of products: np.dot's BLAS starts threads, which spin when cores
are busy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import fft

from riffle.common.accounting.binomial import UNIT_ROUNDOFF, FloatArray, Losses

WINDOW_TAIL = 1e-13
"""The tilted mass that may lie outside the window on each side."""

STEPS = (2.0, 4.0, 5.5, 7.7, 11.0, 16.0)
"""Chernoff exponents to try, as multiples of 1 / standard deviation."""

LARGEST_EXPONENT = 2.0**30
"""The largest product of the tilt and a sum of losses. Rounding changes it by less than 1e-6."""

SMALLEST_WEIGHT = 1e-250
"""If the largest weight is smaller, the weights may be remnants of underflow."""

ComplexArray = NDArray[np.complex128]

Part = tuple[Losses, int]
"""One move's losses, and the number of moves with these losses."""


@dataclass(frozen=True, slots=True, eq=False)
class GridLosses:
    """Finite privacy losses on a grid: the loss (first + i) ``delta`` has the mass `mass[i]`."""

    first: int
    mass: FloatArray
    delta: float

    @property
    def last(self) -> int:
        """The index of the largest loss."""
        return self.first + len(self.mass) - 1

    @property
    def index(self) -> NDArray[np.int64]:
        """The losses in units of delta, shape (len(mass),)."""
        return np.arange(self.first, self.last + 1, dtype=np.int64)

    @property
    def loss(self) -> FloatArray:
        """The losses, shape (len(mass),)."""
        return self.index.astype(np.float64) * self.delta


GridPart = tuple[GridLosses, int]
"""One move's grid losses, and the number of moves with these losses."""


@dataclass(frozen=True, slots=True)
class Window:
    """The losses from `low` to `high` that are convolved, and the `tilt` of their masses.

    Chernoff's bounds on the mass outside shift the tilt by -`step_low` and by `step_high`.
    """

    tilt: float
    low: float
    high: float
    step_low: float
    step_high: float


@dataclass(frozen=True, slots=True, eq=False)
class Convolved:
    """Composed losses on M cells: loss[i] has probability mass[i] exp(log_scale - tilt loss[i]).

    Every mass is exact to within `error`.
    """

    loss: FloatArray
    mass: FloatArray
    tilt: float
    log_scale: float
    error: float


def connect_the_dots(losses: Losses, delta: float) -> GridLosses:
    """Splits each mass between two grid points. The grid losses dominate ``losses``."""
    k = np.floor(losses.loss / delta)
    share = np.expm1(-np.clip(losses.loss - k * delta, 0.0, delta)) / np.expm1(-delta)
    first = int(k.min()) if len(k) else 0
    index = (k - first).astype(np.int64)
    size = int(index.max(initial=0)) + 2
    mass = binned(index, losses.mass * (1.0 - share), size)
    return GridLosses(first, mass + binned(index + 1, losses.mass * share, size), delta)


def round_down(losses: Losses, delta: float) -> GridLosses:
    """Rounds every loss down. ``losses`` dominate the returned grid losses."""
    k = np.floor(losses.loss / delta)
    first = int(k.min()) if len(k) else 0
    index = (k - first).astype(np.int64)
    return GridLosses(first, binned(index, losses.mass, int(index.max(initial=0)) + 1), delta)


def binned(index: NDArray[np.int64], weight: FloatArray, size: int) -> FloatArray:
    """Returns, for each index below ``size``, the sum of its weights."""
    return np.bincount(index, weight, size).astype(np.float64)


def log_mgf(mass: FloatArray, loss: FloatArray, s: float) -> float:
    """Returns the log of sum_i mass[i] exp(s loss[i]), or minus infinity if all masses are zero."""
    if not len(mass):
        return -math.inf
    weight, peak = tilted(mass, s * loss)
    total = float(np.sum(weight))
    return peak + math.log(total) if total > 0.0 else -math.inf


def tilted(mass: FloatArray, exponent: FloatArray) -> tuple[FloatArray, float]:
    """Returns mass * exp(exponent - peak), and the peak, usually the largest exponent.

    If all weights would underflow, the peak is the largest exponent that has mass.
    """
    peak = float(exponent.max())
    weight = mass * np.exp(exponent - peak)
    if float(weight.max()) < SMALLEST_WEIGHT and mass.any():
        peak = float(exponent[mass > 0.0].max())
        weight = mass * np.exp(np.minimum(exponent - peak, 0.0))
    return weight, peak


def cumulants(parts: Sequence[Part], s: float) -> tuple[float, float, float]:
    """Returns K(s) = log E[exp(s S)], K'(s) and K''(s). S is the sum of all finite losses."""
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
    """Returns the tilt at which Chernoff's bound on Pr[loss > tilted mean loss] is about delta."""
    target = math.log(1.0 / delta)
    variance = cumulants(parts, 0.0)[2]
    if variance <= 0.0:
        return 0.0
    # The divisor is not zero: the variance is positive, so some loss is not zero.
    most = LARGEST_EXPONENT / sum(count * float(np.abs(part.loss).max()) for part, count in parts)
    start = tilt = min(math.sqrt(2.0 * target / variance), most)
    for _ in range(4):
        K, mean, _ = cumulants(parts, tilt)
        exponent = max(tilt * mean - K, target / 16.0)
        tilt *= math.sqrt(target / exponent)
    return min(tilt, 16.0 * start, most)


def tilt_at(parts: Sequence[Part], epsilon: float, most: float) -> float:
    """Returns the tilt in [0, most] whose mean loss is epsilon, within a thousandth of `most`."""
    low, high = 0.0, most
    for _ in range(10):
        middle = 0.5 * (low + high)
        below = cumulants(parts, middle)[1] < epsilon
        low, high = (middle, high) if below else (low, middle)
    return low


def choose_window(parts: Sequence[Part], tilt: float) -> Window:
    """Returns the shortest window beyond which Chernoff's bound is WINDOW_TAIL on each side."""
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


def convolve(parts: Sequence[GridPart], tilt: float, first: int, M: int) -> Convolved:
    """Convolves the tilted parts circularly on M grid losses, with indices from `first` on."""
    spectrum: ComplexArray = np.ones(M // 2 + 1, dtype=np.complex128)
    error: FloatArray = np.zeros(M // 2 + 1)
    for part, count in parts:
        weight, _ = tilted(part.mass, tilt * part.loss)
        folded = binned(part.index % M, weight / weight.sum(), M)
        spectrum, error = _times(spectrum, error, folded, count)
    mass = np.roll(fft.irfft(spectrum, M), -(first % M))
    back = _transform_error(M) * math.sqrt(2.0 * float(np.sum(np.abs(spectrum) ** 2)) / M)
    return Convolved(
        loss=np.arange(first, first + M).astype(np.float64) * parts[0][0].delta,
        mass=mass.astype(np.float64),
        tilt=tilt,
        log_scale=sum(count * log_mgf(part.mass, part.loss, tilt) for part, count in parts),
        # Doubled: only half of the spectrum is kept, and the inverse averages over all of it.
        error=2.0 * float(error.sum()) / M + back,
    )


def _times(
    spectrum: ComplexArray, error: FloatArray, mass: FloatArray, count: int
) -> tuple[ComplexArray, FloatArray]:
    """Returns `spectrum` * (transform of `mass`) ** `count`, and this product's error bound."""
    M = len(mass)
    factor = fft.rfft(mass).astype(np.complex128)
    # A coefficient's error is at most the 2-norm of all coefficients' errors.
    one = _transform_error(M) * math.sqrt(M * float(np.sum(mass * mass)))
    size = np.abs(factor) + one
    power = size ** (count - 1)
    powered = count * one * power + (8 * count + 1024) * UNIT_ROUNDOFF * power * size
    total = np.abs(spectrum) * powered + error * (power * size + powered)
    return spectrum * factor**count, total


def _transform_error(M: int) -> float:
    return 8.0 * UNIT_ROUNDOFF * math.log2(M)
