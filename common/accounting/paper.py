"""The papers' own calibration, kept as an option (paper 000, section V and proof of Lemma 10).

epsilon' = epsilon / (3 H), beta' = beta / (H X A), tau = 96 log(2 / beta') / epsilon'^2, the
smallest tau for which the proof's sqrt(6 log(2 / beta') / tau) is epsilon' / 4. With n <= tau each
user adds m = ceil(tau / n) fair bits to every counter, else one bit of p = tau / (2 n).

The split undercounts: replacing one user moves two cells a layer and family, not one, so by its
own composition this calibration would give 2 epsilon. The constant 96 overcounts by so much that
the exact guarantee, which `account` computes, is far below epsilon all the same.
"""

from __future__ import annotations

import math

from riffle.common.accounting.overflow import LARGEST_EPSILON
from riffle.common.accounting.search import CalibrationError
from riffle.common.counters import Sizes
from riffle.common.noise import MAX_BITS, MAX_P_LOG2, Noise


def paper_tau(epsilon: float, beta: float, sizes: Sizes) -> int:
    """tau rounded up: twice the expected 1-bits of a counter.

    Raises:
        CalibrationError: it is above 2^53, so that no report could draw it.
    """
    per_counter = min(epsilon / (3 * sizes.H), LARGEST_EPSILON)  # its square is a double
    log = math.log(2.0 * sizes.H * sizes.X * sizes.A) - math.log(beta)
    if 96.0 * log >= MAX_BITS * per_counter**2:
        raise CalibrationError(
            f"epsilon={epsilon:.6g} at beta={beta:g} takes the papers' tau above 2^53, more than "
            "is drawn; ask for more epsilon"
        )
    return math.ceil(96.0 * log / per_counter**2)


def paper_noise(n: int, tau: int) -> Noise:
    """The papers' noise of one user in a batch of n, p rounded up to a multiple of 2^-32."""
    if n <= tau:
        return Noise(bits=-(-tau // n), p_numerator=1, p_log2=1)
    numerator = -(-(tau << MAX_P_LOG2) // (2 * n))
    return Noise(bits=1, p_numerator=numerator, p_log2=MAX_P_LOG2)
