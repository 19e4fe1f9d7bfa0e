"""delta as a function of epsilon, for a finite loss distribution.

delta(epsilon) = infinite + sum over l > epsilon of mass(l) (1 - exp(epsilon - l)), the hockey-stick
divergence. As a function of t = exp(epsilon) it is convex, decreasing, and linear between two
neighbouring losses. So its inverse is exact: find the two neighbours, then solve a line.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass

import numpy as np

from riffle.common.accounting.binomial import LARGEST_EPSILON, FloatArray, charge

FAR = 600.0
"""Distance of two losses at which e^-distance is still far from underflow."""


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """Masses `mass` (cells,) at ascending losses `loss` (cells,), and `infinite` at infinite loss.

    The curve holds from `start` on: delta is 1 below it, and epsilon is never less.
    """

    loss: FloatArray
    mass: FloatArray
    infinite: float
    start: float

    def delta(self, epsilon: float) -> float:
        """Returns delta at this epsilon >= 0."""
        if not epsilon >= 0.0:
            raise ValueError(f"epsilon must not be negative, got {epsilon}")
        return 1.0 if epsilon < self.start else min(1.0, self._total(epsilon, 0.0))

    def epsilon(self, delta: float, overflow: float = 0.0) -> float:
        """Returns the least epsilon >= start at which delta(epsilon) + charge(overflow) <= delta.

        Infinity if there is none. Lower bounds pass a negative overflow.
        """
        if not 0.0 <= delta <= 1.0:
            raise ValueError(f"delta must lie in [0, 1], got {delta}")
        if self._total(self.start, overflow) <= delta:
            return self.start
        if overflow == 0.0 and self.infinite > delta:
            return math.inf
        after = self._first_past(delta, overflow)
        return self._solve(after, delta, overflow)

    def _total(self, epsilon: float, overflow: float) -> float:
        i = int(np.searchsorted(self.loss, epsilon, side="right"))
        finite = float(np.sum(self.mass[i:] * -np.expm1(epsilon - self.loss[i:])))
        return self.infinite + finite + charge(epsilon, overflow)

    def _slope(self, epsilon: float, overflow: float) -> float:
        """Returns exp(epsilon) times the total's derivative by t, to the right of epsilon."""
        i = int(np.searchsorted(self.loss, epsilon, side="right"))
        finite = float(np.sum(self.mass[i:] * np.exp(epsilon - self.loss[i:])))
        if epsilon > LARGEST_EPSILON:
            return charge(epsilon, overflow) - finite
        return overflow * math.exp(epsilon) - finite

    def _first_past(self, delta: float, overflow: float) -> int:
        """Returns the index of the first loss where the total is low enough or no longer falls.

        The total is convex in t, so on ascending losses this is false, then true, and bisection
        finds it. The last loss always counts, since no finite loss is beyond it.
        """
        first = int(np.searchsorted(self.loss, self.start, side="right"))
        indices = range(first, len(self.loss) - 1)
        return first + bisect_left(indices, True, key=lambda i: self._is_past(i, delta, overflow))

    def _is_past(self, i: int, delta: float, overflow: float) -> bool:
        epsilon = float(self.loss[i])
        if self._total(epsilon, overflow) <= delta:
            return True
        # Only overflow makes the total rise: a slope of zero without it has underflowed.
        return overflow > 0.0 and self._slope(epsilon, overflow) >= 0.0

    def _solve(self, after: int, delta: float, overflow: float) -> float:
        """Returns where the line between loss[after] and the point before it reaches delta."""
        end = float(self.loss[min(after, len(self.loss) - 1)])
        if end <= self.start or self._total(end, overflow) > delta:
            return math.inf
        before = max(self.start, float(self.loss[after - 1])) if after > 0 else self.start
        excess = self._total(before, overflow) - delta
        if excess <= 0.0:
            return before
        if overflow == 0.0 and end - before > FAR:
            return max(before, self._solve_back(end, delta))
        fall = -self._slope(before, overflow)
        return min(end, before + math.log1p(excess / fall)) if fall > 0.0 else end

    def _solve_back(self, end: float, delta: float) -> float:
        """Solves the line from its far end, without overflow.

        From the near end, e^(before - loss) would underflow and the line would have no slope.
        """
        i = int(np.searchsorted(self.loss, end))
        fall = float(np.sum(self.mass[i:] * np.exp(end - self.loss[i:])))
        missing = (delta - self._total(end, 0.0)) / fall
        return end + math.log1p(-missing) if missing < 1.0 else 0.0
