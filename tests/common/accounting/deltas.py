"""delta at a given epsilon, which the product never asks for."""

from collections.abc import Sequence

from riffle.common.accounting.loss_curve import SMALLEST_DELTA, AnyMoves, Bound, curve


def delta_bound(moves: Sequence[AnyMoves], epsilon: float, bound: Bound = "upper") -> float:
    """Returns a bound on delta at this epsilon >= 0, without padding."""
    near = 1e-3
    for _ in range(3):
        near = min(max(curve(tuple(moves), near, "upper").delta(epsilon), SMALLEST_DELTA), 0.5)
    return curve(tuple(moves), near, bound).delta(epsilon)
