"""Losses moved to a grid of multiples of Delta, so that they can be convolved.

Upper (`connect_the_dots`; Doroshenko, Ghazi, Kamath, Kumar, Manurangsi 2022): an atom (p, q) of
P and Q at loss l in [k Delta, (k + 1) Delta] is replaced by two atoms, at k Delta and at
(k + 1) Delta, with the same sum of P and the same sum of Q. Merging the two gives the atom back,
and merging is post-processing, so the pair on the grid is at least as easy to tell apart as the
true one, also after composition. With f = l - k Delta, the upper atom gets the share
(1 - exp(-f)) / (1 - exp(-Delta)) of p. The error is of second order in Delta.

Lower (`round_down`): every loss is rounded down. (1 - exp(epsilon - L))_+ grows with L, and a sum
of smaller losses is smaller, so delta of the composition is never above the true one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from riffle.common.accounting.losses import FloatArray, Losses


@dataclass(frozen=True, slots=True, eq=False)
class GridLosses:
    """Mass `mass[i]` at loss (first + i) delta, finite losses only."""

    first: int
    mass: FloatArray
    delta: float

    @property
    def last(self) -> int:
        """Index of the largest loss."""
        return self.first + len(self.mass) - 1

    @property
    def index(self) -> NDArray[np.int64]:
        """Losses in units of delta, shape (len(mass),)."""
        return np.arange(self.first, self.last + 1, dtype=np.int64)

    @property
    def loss(self) -> FloatArray:
        """Losses, shape (len(mass),)."""
        return self.index.astype(np.float64) * self.delta


def connect_the_dots(losses: Losses, delta: float) -> GridLosses:
    """Grid losses that dominate the given ones, with mass split between two neighbours."""
    k = np.floor(losses.loss / delta)
    share = np.expm1(-np.clip(losses.loss - k * delta, 0.0, delta)) / np.expm1(-delta)
    first = int(k.min()) if len(k) else 0
    index = (k - first).astype(np.int64)
    size = int(index.max(initial=0)) + 2
    mass = binned(index, losses.mass * (1.0 - share), size)
    return GridLosses(first, mass + binned(index + 1, losses.mass * share, size), delta)


def round_down(losses: Losses, delta: float) -> GridLosses:
    """Grid losses that are dominated by the given ones: every loss rounded down."""
    k = np.floor(losses.loss / delta)
    first = int(k.min()) if len(k) else 0
    index = (k - first).astype(np.int64)
    return GridLosses(first, binned(index, losses.mass, int(index.max(initial=0)) + 1), delta)


def binned(index: NDArray[np.int64], weight: FloatArray, size: int) -> FloatArray:
    """Sums of weight by index, as an array of this size."""
    return np.bincount(index, weight, size).astype(np.float64)
