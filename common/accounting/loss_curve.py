"""Bounds epsilon and delta of replacing one user, by composing the losses of all changed counters.

Replacing one user moves at most `cells` counters up by one and at most `cells` down. All counters
carry independent noise. The total loss is therefore a sum of independent losses: those of `cells`
moves up and `cells` moves down (`binomial`). Fewer moves are a post-processing of these moves.

One delta must bound Pr[M(D) in E] - e^epsilon Pr[M(D') in E] for the mechanism M, all neighbours D
and D', and any set E of outputs. Exchanging D and D' turns every move up into a move down, and
every move down into a move up. There are `cells` of each, so the delta stays the same.
Moves up and down have different losses, so composing 2 * cells moves up would be wrong.

`convolution` works on a grid, with transforms of length M. Every error is counted on the safe side:

* Aliases: transforms add indices modulo M. Mass below the window reappears at its top, which only
  raises the upper bound. Mass above the window is lost, so the upper bound adds it to delta.
  Chernoff's bound limits both masses, and the lower bound subtracts both.
* Rounding of transforms: the upper bound adds `Convolved.error` to every mass; the lower bound
  subtracts it.
* Other rounding: both bounds allow for the errors of masses, tilts and losses in each move.
* Masses that `binomial` leaves out count as infinite losses in the upper bound, and not at all in
  the lower bound.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from riffle.common.accounting.binomial import (
    LARGEST_EPSILON,
    LOSS_ERROR,
    UNIT_ROUNDOFF,
    FloatArray,
    Losses,
    binomial_losses,
    charge,
    step_losses,
    trim,
)
from riffle.common.accounting.convolution import (
    Convolved,
    GridPart,
    Part,
    Window,
    choose_tilt,
    choose_window,
    connect_the_dots,
    convolve,
    cumulants,
    log_mgf,
    round_down,
    tilt_at,
)

Bound = Literal["lower", "estimate", "upper"]

SIGNS: dict[Bound, float] = {"lower": -1.0, "estimate": 0.0, "upper": 1.0}
"""The direction in which the errors move each bound."""

TRIM_SHARE = 1e-5
"""The share of delta that all cut tails together may cost."""

VARIANCE_CAP = 1e8
"""Noise of a larger variance is accounted as if it had this variance. The cap is valid because more
noise is post-processing.
"""

SMALLEST_DELTA = 1e-15

AMPLIFICATION, RETRIES = 14.0, 4
"""A tilt is replaced, at most 4 times, if its errors exceed e^14 times the best tilt's errors."""

DOTS = 2**14
"""Grid length M for `connect_the_dots`, whose error is of order Delta^2 for a grid step Delta."""

DOWN_PER_MOVE, DOWN_MOST = 2**10, 2**19
"""Grid length per move, and its limit, for `round_down`, whose error is moves * Delta / 2."""

FAR = 600.0
"""A distance of two losses at which e^-distance is still far from underflow."""


@dataclass(frozen=True, slots=True)
class Moves:
    """`cells` counters rise by 1 and `cells` others fall by 1, all with Binomial(N, p) noise."""

    N: int
    p: float
    cells: int

    def __post_init__(self) -> None:
        if self.N < 1 or self.cells < 1 or not 0.0 < self.p < 1.0:
            got = f"N={self.N}, cells={self.cells}, p={self.p}"
            raise ValueError(f"moves need N >= 1 noise bits, cells >= 1 and 0 < p < 1, got {got}")

    @property
    def capped(self) -> bool:
        """Returns whether the noise's variance exceeds VARIANCE_CAP."""
        return _most_bits(self.p) < self.N

    def losses(self) -> tuple[Losses, Losses]:
        """Returns the losses of one counter that moves up, and of one counter that moves down."""
        return binomial_losses(min(self.N, _most_bits(self.p)), self.p)


@dataclass(frozen=True, slots=True)
class Steps:
    """Moves of `cells` counters up by one and of `cells` counters down; losses are +-log(1/q)."""

    q: float
    cells: int
    capped = False

    def losses(self) -> tuple[Losses, Losses]:
        """Returns the losses of raising and of lowering one counter by one, which are equal."""
        one = step_losses(self.q)
        return one, one


AnyMoves = Moves | Steps


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """Masses `mass` (M,) at ascending losses `loss` (M,), and the mass `infinite` at infinite loss.

    delta(epsilon) = infinite + sum over l > epsilon of mass(l) (1 - exp(epsilon - l)), the
    hockey-stick divergence. Between two neighbouring losses, delta is linear in exp(epsilon). The
    curve is valid from epsilon = `start` on. Below `start`, the method `delta` returns 1; the
    method `epsilon` returns at least `start`.
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
        """Returns the least epsilon >= `start` at which the total delta is at most ``delta``.

        To delta(epsilon), the total adds `charge(epsilon, overflow)`, the cost of dropped noise.
        Returns infinity if no epsilon is enough. For a lower bound, ``overflow`` is negative.
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
        """Returns the right derivative, in epsilon, of delta plus the cost of dropped noise."""
        i = int(np.searchsorted(self.loss, epsilon, side="right"))
        finite = float(np.sum(self.mass[i:] * np.exp(epsilon - self.loss[i:])))
        if epsilon > LARGEST_EPSILON:
            return charge(epsilon, overflow) - finite
        return overflow * math.exp(epsilon) - finite

    def _first_past(self, delta: float, overflow: float) -> int:
        """Returns the index of the first loss where `_total` is at most delta or no longer falls.

        `_total` is a convex function of exp(epsilon), so bisection finds this loss. If only the
        last loss is left, returns its index without a test.
        """
        first = int(np.searchsorted(self.loss, self.start, side="right"))
        indices = range(first, len(self.loss) - 1)
        return first + bisect_left(indices, True, key=lambda i: self._is_past(i, delta, overflow))

    def _is_past(self, i: int, delta: float, overflow: float) -> bool:
        epsilon = float(self.loss[i])
        if self._total(epsilon, overflow) <= delta:
            return True
        # Only overflow makes the total rise; without overflow, a slope of zero is an underflow.
        return overflow > 0.0 and self._slope(epsilon, overflow) >= 0.0

    def _solve(self, after: int, delta: float, overflow: float) -> float:
        """Returns the epsilon at which the curve's piece up to loss[after] falls to `delta`."""
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
        """Returns the epsilon at which the curve's piece that ends at loss `end` meets `delta`.

        For overflow 0 only. The computation starts from `end`: at the piece's beginning,
        exp(beginning - loss) would underflow, and the piece would seem flat.
        """
        i = int(np.searchsorted(self.loss, end))
        fall = float(np.sum(self.mass[i:] * np.exp(end - self.loss[i:])))
        missing = (delta - self._total(end, 0.0)) / fall
        return end + math.log1p(-missing) if missing < 1.0 else 0.0


def curve(moves: tuple[AnyMoves, ...], delta: float, bound: Bound) -> Curve:
    """Returns the `Curve` of all moves of counters: valid everywhere, and tightest near `delta`."""
    if bound == "lower" and any(m.capped for m in moves):
        return Curve(np.zeros(1), np.zeros(1), 0.0, 0.0)
    near = min(max(delta, SMALLEST_DELTA), 0.5)
    dots, upper = sharpest(moves, near)
    if bound == "lower":
        return compose(dots.parts, dots.window, bound).curve(bound)
    return upper if bound == "upper" else dots.curve(bound)


@lru_cache(maxsize=32)
def sharpest(moves: tuple[AnyMoves, ...], near: float) -> tuple[Composition, Curve]:
    """Returns the moves' composition and its upper curve, with errors far below the delta `near`.

    The first tilt (`convolution`) comes from Chernoff's bound and suits tails like a Gaussian's.
    Almost empty counters have heavier tails. They need another tilt, chosen for the epsilon found.
    """
    budget = TRIM_SHARE * near / (4 * sum(m.cells for m in moves))
    parts = [(trim(losses, budget), m.cells) for m in moves for losses in m.losses()]
    tilt = choose_tilt(parts, near)
    for _ in range(1 + RETRIES):
        dots = compose(parts, choose_window(parts, tilt), "upper")
        upper = dots.curve("upper")
        epsilon = upper.epsilon(near)
        if cumulants(parts, tilt)[0] - tilt * epsilon < math.log(near) + AMPLIFICATION:
            break
        tilt = tilt_at(parts, epsilon, tilt)
    return dots, upper


def epsilon(
    moves: Sequence[AnyMoves], delta: float, bound: Bound = "upper", overflow: float = 0.0
) -> float:
    """Returns a bound on epsilon at this delta; infinity if no epsilon works.

    Dropped noise uses up a part of delta: (1 + e^epsilon) * overflow. A lower bound subtracts this
    part instead, because dropped noise may also lower the true delta.
    """
    return curve(tuple(moves), delta, bound).epsilon(delta, SIGNS[bound] * overflow)


def _most_bits(p: float) -> int:
    return math.floor(VARIANCE_CAP / (p * (1.0 - p)))


@dataclass(frozen=True, slots=True, eq=False)
class Composition:
    """The losses of `parts`, composed on one grid. Upper bound and estimate share this object."""

    parts: Sequence[Part]
    window: Window
    gridded: Sequence[GridPart]
    convolved: Convolved
    first: int

    def curve(self, bound: Bound) -> Curve:
        """Returns the untilted curve. Errors raise an upper bound and reduce a lower bound."""
        convolved, sign = self.convolved, SIGNS[bound]
        loss, error = convolved.loss, convolved.error
        above = _alias(self.gridded, convolved, self.window.step_high, self.first + len(loss))
        if bound == "lower":
            # An alias may be in any cell. It only raises upper bounds; lower bounds subtract it.
            below = _alias(self.gridded, convolved, -self.window.step_low, self.first - 1)
            error += below + above
        # Capped at e^700, where a mass's error is far above one. No mass exceeds one in the end.
        scale = np.exp(np.minimum(convolved.log_scale - convolved.tilt * loss, 700.0))
        relative = math.exp(sign * _relative_error(self.parts, convolved.tilt))
        mass = np.maximum(convolved.mass + sign * error, 0.0) * scale * relative
        beyond = float(scale[-1]) * above if bound == "upper" else 0.0
        return Curve(
            loss=loss + sign * LOSS_ERROR * sum(count for _, count in self.parts),
            mass=np.minimum(mass, 1.0),
            infinite=min(1.0, (_infinite(self.parts, bound) + beyond) * relative),
            start=0.0 if bound == "lower" else max(0.0, float(loss[0])),
        )


def compose(parts: Sequence[Part], window: Window, bound: Bound) -> Composition:
    """Composes the losses of all parts, on the grid that this bound needs."""
    moves = sum(count for _, count in parts)
    power = 1 << (moves - 1).bit_length()
    down = min(DOWN_PER_MOVE * power, DOWN_MOST) if bound == "lower" else 0
    M = max(DOTS, down, 8 * power)
    spread = max(float(np.ptp(part.loss)) for part, _ in parts)
    span = max(window.high - window.low, spread / 4.0, 1e-6 * (1.0 + abs(window.low)))
    delta = span / (M - 2 * moves - 4)
    to_grid = round_down if bound == "lower" else connect_the_dots
    gridded = [(to_grid(part, delta), count) for part, count in parts]
    first = math.floor(window.low / delta) - moves - 1
    return Composition(parts, window, gridded, convolve(gridded, window.tilt, first, M), first)


def _alias(parts: Sequence[GridPart], convolved: Convolved, step: float, edge: int) -> float:
    """Returns Chernoff's bound on the tilted mass above `edge`, or below `edge` if `step` < 0."""
    if step > 0.0 and sum(count * part.last for part, count in parts) < edge:
        return 0.0
    if step < 0.0 and sum(count * part.first for part, count in parts) > edge:
        return 0.0
    moved = sum(
        count * log_mgf(part.mass, part.loss, convolved.tilt + step) for part, count in parts
    )
    exponent = moved - convolved.log_scale - step * edge * parts[0][0].delta
    return math.exp(min(0.0, exponent))


def _relative_error(parts: Sequence[Part], tilt: float) -> float:
    """Returns a composed mass's relative error, which comes from the parts' masses and the tilt."""
    total = 0.0
    for part, count in parts:
        exponent = abs(tilt) * float(np.abs(part.loss).max())
        total += count * (part.mass_error + 16.0 * UNIT_ROUNDOFF * (1.0 + exponent))
    return total


def _infinite(parts: Sequence[Part], bound: Bound) -> float:
    """Returns the mass at infinite loss. Upper bounds also count the dropped mass as infinite."""
    log_finite = 0.0  # log of the product of all (1 - infinite)
    for part, count in parts:
        share = part.infinite + (part.dropped if bound == "upper" else 0.0)
        if share >= 1.0:
            return 1.0
        log_finite += count * math.log1p(-share)
    return -math.expm1(log_finite)
