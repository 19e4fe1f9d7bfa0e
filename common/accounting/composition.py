"""Composition of moves: delta(epsilon) and epsilon(delta) with rigorous bounds.

Replacing one user moves at most `cells` counters up by one and at most `cells` down by one, and all
counters carry independent noise. With others' data fixed, the two outputs are product
distributions, and the loss is a sum of independent losses, `cells` of them up and `cells` down
(`losses`). Fewer moves are a post-processing of that many, hence covered.

Both directions. delta must bound Pr[M(D) in E] - e^epsilon Pr[M(D') in E] and the same with D and
D' exchanged. Exchanging them turns every up into a down and every down into an up; `cells` of each
remain, so the two directions have one and the same loss distribution and one delta covers both.
(A counter's up and down alone differ: composing 2 cells ups, as some libraries' defaults would,
is a different and wrong number.)

The parts are put on a grid (`grid`), tilted (`tilt`), and multiplied as powers of discrete Fourier
transforms of length M (`fourier`). What is inexact, and where it goes:

* aliases: transforms add indices modulo M. Mass below the window reappears above it, which only
  raises the upper bound; mass above the window is lost and is added to delta. Both are bounded by
  Chernoff's bound on the grid, and both are subtracted from the lower bound.
* rounding of transforms: `fourier` gives one number e that no cell's error exceeds. Upper masses
  are raised by e, lower masses lowered by e.
* other rounding: relative errors of masses and tilts, and absolute ones of losses, times the number
  of moves.
* masses left out of `losses` are infinite losses for the upper bound, and absent from the lower.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from riffle.common.accounting.binomial import LOSS_ERROR, UNIT_ROUNDOFF
from riffle.common.accounting.convolution import (
    Convolved,
    GridPart,
    Part,
    Window,
    connect_the_dots,
    convolve,
    log_mgf,
    round_down,
)
from riffle.common.accounting.curve import Curve

Bound = Literal["lower", "estimate", "upper"]

DOTS = 2**14
"""Grid length M where connecting the dots costs the square of Delta."""

DOWN_PER_MOVE, DOWN_MOST = 2**10, 2**19
"""Grid length a move, and the longest, where rounding down costs moves * Delta / 2."""


@dataclass(frozen=True, slots=True, eq=False)
class Composition:
    """Parts composed on one grid. That of the upper bound is that of the estimate as well."""

    parts: Sequence[Part]
    window: Window
    gridded: Sequence[GridPart]
    convolved: Convolved
    first: int

    def curve(self, bound: Bound) -> Curve:
        """The curve with every error put on the side that the bound asks for."""
        end = self.first + len(self.convolved.mass)
        above = _alias(self.gridded, self.convolved, self.window.step_high, end)
        if bound != "lower":
            return _curve(self.convolved, self.parts, bound, self.convolved.error, above)
        # An alias may sit in any cell. It only raises an upper bound, and is taken off a lower one.
        below = _alias(self.gridded, self.convolved, -self.window.step_low, self.first - 1)
        error = self.convolved.error + below + above
        return _curve(self.convolved, self.parts, bound, error, 0.0)


def composition(parts: Sequence[Part], window: Window, bound: Bound) -> Composition:
    """Composition of all parts on the grid of this bound."""
    moves = sum(count for _, count in parts)
    M = _length(moves, bound)
    spread = max(float(np.ptp(part.loss)) for part, _ in parts)
    span = max(window.high - window.low, spread / 4.0, 1e-6 * (1.0 + abs(window.low)))
    delta = span / (M - 2 * moves - 4)
    to_grid = round_down if bound == "lower" else connect_the_dots
    gridded = [(to_grid(part, delta), count) for part, count in parts]
    first = math.floor(window.low / delta) - moves - 1
    return Composition(parts, window, gridded, convolve(gridded, window.tilt, first, M), first)


def _length(moves: int, bound: Bound) -> int:
    power = 1 << (moves - 1).bit_length()
    down = min(DOWN_PER_MOVE * power, DOWN_MOST) if bound == "lower" else 0
    return max(DOTS, down, 8 * power)


def _alias(parts: Sequence[GridPart], convolved: Convolved, step: float, edge: int) -> float:
    """Chernoff's bound on the tilted mass at or beyond the edge, on the side of the step's sign."""
    if step > 0.0 and sum(count * part.last for part, count in parts) < edge:
        return 0.0
    if step < 0.0 and sum(count * part.first for part, count in parts) > edge:
        return 0.0
    moved = sum(
        count * log_mgf(part.mass, part.loss, convolved.tilt + step) for part, count in parts
    )
    exponent = moved - convolved.log_scale - step * edge * parts[0][0].delta
    return math.exp(min(0.0, exponent))


def _curve(
    convolved: Convolved, parts: Sequence[Part], bound: Bound, error: float, above: float
) -> Curve:
    """Undo the tilt, and put every error on the side that the bound asks for."""
    sign = {"lower": -1.0, "estimate": 0.0, "upper": 1.0}[bound]
    loss = convolved.loss
    # A mass is at most one, and e^700 times the rounding error is far above one.
    scale = np.exp(np.minimum(convolved.log_scale - convolved.tilt * loss, 700.0))
    relative = math.exp(sign * _relative_error(parts, convolved.tilt))
    mass = np.maximum(convolved.mass + sign * error, 0.0) * scale * relative
    beyond = float(scale[-1]) * above if bound == "upper" else 0.0
    return Curve(
        loss=loss + sign * LOSS_ERROR * sum(count for _, count in parts),
        mass=np.minimum(mass, 1.0),
        infinite=min(1.0, (_infinite(parts, bound) + beyond) * relative),
        start=0.0 if bound == "lower" else max(0.0, float(loss[0])),
    )


def _relative_error(parts: Sequence[Part], tilt: float) -> float:
    """Relative error of a composed mass: of the parts' masses, and of tilting there and back."""
    total = 0.0
    for part, count in parts:
        exponent = abs(tilt) * float(np.abs(part.loss).max())
        total += count * (part.mass_error + 16.0 * UNIT_ROUNDOFF * (1.0 + exponent))
    return total


def _infinite(parts: Sequence[Part], bound: Bound) -> float:
    """Mass of impossible outcomes, 1 - product of (1 - infinite); upper bounds add the dropped."""
    log_finite = 0.0
    for part, count in parts:
        share = part.infinite + (part.dropped if bound == "upper" else 0.0)
        if share >= 1.0:
            return 1.0
        log_finite += count * math.log1p(-share)
    return -math.expm1(log_finite)
