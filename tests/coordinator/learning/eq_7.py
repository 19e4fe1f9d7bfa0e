"""Eq. 7 of 000 with a certificate: what `postprocess.project` returns, and the optimal value.

With c sorted in descending order and S_k its prefix sums,

    t* = max(0, -min c, (l - S_X) / X, max_k (S_k - u) / k),

so `excess` = max |n - c| - t* is zero (up to rounding) where n is optimal.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from riffle.coordinator.learning.learner import BoolArray, FloatArray
from riffle.coordinator.learning.postprocess import project


@dataclass(frozen=True, slots=True)
class Solution:
    """n (..., X), t* (...), excess (...), and feasible (...): False where u < 0 and n is zero."""

    n: FloatArray
    t: FloatArray
    excess: FloatArray
    feasible: BoolArray


def solve(c: FloatArray, total: FloatArray, tolerance: float) -> Solution:
    """Solves Eq. 7 for rows c (..., X) and noisy totals (...), with tolerance E/4 in counts."""
    n = project(c, total, tolerance)
    lower, upper = total - tolerance, total + tolerance
    k, S = np.arange(1, c.shape[-1] + 1), np.cumsum(-np.sort(-c, axis=-1), axis=-1)
    below = np.maximum(-c.min(axis=-1), (lower - S[..., -1]) / k[-1])
    above = ((S - upper[..., None]) / k).max(axis=-1)
    t: FloatArray = np.maximum(0.0, np.maximum(below, above))
    return Solution(n, t, np.abs(n - c).max(axis=-1) - t, upper >= 0)
