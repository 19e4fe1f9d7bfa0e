"""Bounds on epsilon and delta for users whose data moves counters with binomial noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from riffle.common.accounting.binomial import Losses, binomial_losses, step_losses, trim
from riffle.common.accounting.composition import Bound, Composition, composition
from riffle.common.accounting.convolution import (
    Part,
    choose_tilt,
    choose_window,
    cumulants,
    tilt_at,
)
from riffle.common.accounting.curve import Curve

TRIM_SHARE = 1e-5
"""Share of delta that cut tails may cost in all."""

VARIANCE_CAP = 1e8
"""Noise of more variance is accounted as if it had this much: true, since adding noise to a
counter is post-processing, and enough for epsilon = 0.003 at 18 cells and beta = 1e-5."""

SMALLEST_DELTA = 1e-15

AMPLIFICATION, RETRIES = 14.0, 4
"""Errors may be exp(14) times what they are at a perfect tilt; else the tilt is chosen anew."""


@dataclass(frozen=True, slots=True)
class Moves:
    """`cells` counters up and `cells` down by one, each with Binomial(N, p) noise."""

    N: int
    p: float
    cells: int

    def __post_init__(self) -> None:
        if self.N < 1 or self.cells < 1 or not 0.0 < self.p < 1.0:
            raise ValueError(
                "moves need N >= 1 noise bits, cells >= 1 and 0 < p < 1, "
                f"got N={self.N}, cells={self.cells}, p={self.p}"
            )

    @property
    def capped(self) -> bool:
        """Whether it is accounted as if it had less noise."""
        return _most_bits(self.p) < self.N

    def losses(self) -> tuple[Losses, Losses]:
        """Losses of one move up and of one down."""
        return binomial_losses(min(self.N, _most_bits(self.p)), self.p)


@dataclass(frozen=True, slots=True)
class Steps:
    """`cells` counters up and `cells` down by one, the loss of each +log(1/q) or -log(1/q)."""

    q: float
    cells: int
    capped = False

    def losses(self) -> tuple[Losses, Losses]:
        """Losses of one move up and of one down, which are the same."""
        one = step_losses(self.q)
        return one, one


AnyMoves = Moves | Steps


def curve(moves: tuple[AnyMoves, ...], delta: float, bound: Bound) -> Curve:
    """Composition of all moves, sharpest near this delta in (0, 1); valid for every delta."""
    if bound == "lower" and any(m.capped for m in moves):
        return Curve(np.zeros(1), np.zeros(1), 0.0, 0.0)
    near = min(max(delta, SMALLEST_DELTA), 0.5)
    dots, upper = sharpest(moves, near)
    if bound == "lower":
        return composition(dots.parts, dots.window, bound).curve(bound)
    return upper if bound == "upper" else dots.curve(bound)


@lru_cache(maxsize=32)
def sharpest(moves: tuple[AnyMoves, ...], near: float) -> tuple[Composition, Curve]:
    """Composition at a tilt where errors are small beside delta, and the upper curve that it gives.

    Errors at epsilon grow with exp(K(lambda) - lambda epsilon). Chernoff's lambda is right where
    tails are like a Gaussian's; where counters that are almost empty make the loss's tail heavier,
    the lambda of the epsilon found replaces it.
    """
    parts = _parts(moves, near)
    tilt = choose_tilt(parts, near)
    dots, upper = _composed(parts, tilt)
    for _ in range(RETRIES):
        epsilon = upper.epsilon(near)
        if cumulants(parts, tilt)[0] - tilt * epsilon < math.log(near) + AMPLIFICATION:
            break
        tilt = tilt_at(parts, epsilon, tilt)
        dots, upper = _composed(parts, tilt)
    return dots, upper


def epsilon(
    moves: Sequence[AnyMoves], delta: float, bound: Bound = "upper", overflow: float = 0.0
) -> float:
    """Bound on epsilon at this delta, of which (1 + e^epsilon) overflow goes to padding.

    In a lower bound the same amount is taken off delta(epsilon): cut noise moves the true delta by
    at most that much in either direction. The estimate ignores it. Infinity when no epsilon works.
    """
    sign = {"lower": -1.0, "estimate": 0.0, "upper": 1.0}[bound]
    return curve(tuple(moves), delta, bound).epsilon(delta, sign * overflow)


def delta(moves: Sequence[AnyMoves], epsilon: float, bound: Bound = "upper") -> float:
    """Bound on delta at this epsilon >= 0, padding left out."""
    near = 1e-3
    for _ in range(3):
        near = min(max(curve(tuple(moves), near, "upper").delta(epsilon), SMALLEST_DELTA), 0.5)
    return curve(tuple(moves), near, bound).delta(epsilon)


def _composed(parts: Sequence[Part], tilt: float) -> tuple[Composition, Curve]:
    dots = composition(parts, choose_window(parts, tilt), "upper")
    return dots, dots.curve("upper")


def _most_bits(p: float) -> int:
    return math.floor(VARIANCE_CAP / (p * (1.0 - p)))


def _parts(moves: Sequence[AnyMoves], near: float) -> list[Part]:
    budget = TRIM_SHARE * near / (4 * sum(m.cells for m in moves))
    return [(trim(losses, budget), m.cells) for m in moves for losses in m.losses()]
