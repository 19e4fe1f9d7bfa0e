"""The analytic Gaussian mechanism, the yardstick for the binomial one.

Balle and Wang 2018, Theorem 8: noise of variance sigma^2 on a vector whose L2 sensitivity is S is
(epsilon, delta)-DP if and only if Phi(S / (2 sigma) - epsilon sigma / S)
- e^epsilon Phi(-S / (2 sigma) - epsilon sigma / S) <= delta. Here `cells` counters move up by one
and `cells` down by one, so S = sqrt(2 cells).
"""

from __future__ import annotations

import math
from collections.abc import Callable

from scipy import optimize, special


def gaussian_variance(epsilon: float, beta: float, cells: int) -> float:
    """Smallest variance a counter that is (epsilon, beta)-DP with Gaussian noise.

    Where it lies outside of 2 cells e^-40 to 2 cells e^80, the nearer of the two.
    """
    check_guarantee(epsilon, beta)
    if cells < 1:
        raise ValueError(f"cells must be at least 1, got {cells}")
    # Delta falls in x = log(sigma / S).
    x = _root(lambda v: _log_delta(math.exp(v), epsilon) - math.log(beta), -20.0, 40.0)
    return 2.0 * cells * math.exp(2.0 * x)


def _root(falling: Callable[[float], float], low: float, high: float) -> float:
    if falling(low) <= 0.0:
        return low
    if falling(high) >= 0.0:
        return high
    return float(optimize.brentq(falling, low, high))


def check_guarantee(epsilon: float, beta: float) -> None:
    """Raise ValueError unless epsilon is positive and finite and 0 < beta < 1."""
    if not 0.0 < epsilon < math.inf:
        raise ValueError(f"epsilon must be positive and finite, got {epsilon}")
    if not 0.0 < beta < 1.0:
        raise ValueError(f"beta must lie strictly between 0 and 1, got {beta}")


def _log_delta(sigma: float, epsilon: float) -> float:
    """log delta at unit sensitivity."""
    near = float(special.log_ndtr(0.5 / sigma - epsilon * sigma))
    if near == -math.inf:
        return near
    far = epsilon + float(special.log_ndtr(-0.5 / sigma - epsilon * sigma))
    return near + math.log(max(-math.expm1(far - near), 1e-300))
