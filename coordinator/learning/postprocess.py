"""Post-processing of private counts: Eq. 7 of 000 in closed form, the add-on, and E.

For every (h, x, a), with c the noisy transition counts N(x, a, .), N the noisy visits N(x, a) and
[l, u] = [N - E/4, N + E/4], Eq. 7 asks for

    min t   subject to   n >= 0,  |n(x') - c(x')| <= t,  l <= sum n <= u.

It has many minimisers. This module returns one that is unique and continuous in the data, the
Euclidean projection of c onto {n >= 0, l <= sum n <= u}, which is also optimal for Eq. 7. With c
sorted in descending order and S_k its prefix sums,

    lambda = max(0, min_k (l - S_k) / k) + min(0, min_k (u - S_k) / k),    n = max(c + lambda, 0),
    t*     = max(0, -min c, (l - S_X) / X, max_k (S_k - u) / k).

Both are computed; `excess` = max |n - c| - t* certifies optimality (zero up to rounding). With
u < 0 no n is feasible: n = 0, flagged. All of it is post-processing and costs no privacy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Projection:
    """Solution of Eq. 7 for stacked rows, with its certificate.

    n (..., X); t (...) the optimal value; excess (...) = max |n - c| - t, at rounding level when
    optimal; feasible (...) False where u < 0 and n was set to zero.
    """

    n: FloatArray
    t: FloatArray
    excess: FloatArray
    feasible: NDArray[np.bool_]


def project(c: FloatArray, total: FloatArray, tolerance: float) -> Projection:
    """Solve Eq. 7 for rows c (..., X) and noisy totals (...), with tolerance E/4 >= 0 in counts.

    Raises ValueError when the tolerance is negative or the shapes disagree.
    """
    n = nearest(c, total, tolerance)
    lower, upper = (total - tolerance)[..., None], (total + tolerance)[..., None]
    t = _optimal_value(c, _prefix_sums(c), np.arange(1, c.shape[-1] + 1), lower, upper)
    return Projection(n, t, np.abs(n - c).max(axis=-1) - t, upper[..., 0] >= 0)


def nearest(c: FloatArray, total: FloatArray, tolerance: float) -> FloatArray:
    """The n (..., X) of `project` without its certificate."""
    if tolerance < 0:
        raise ValueError(f"tolerance (E/4) must be >= 0, got {tolerance}")
    if c.shape[:-1] != total.shape:
        raise ValueError(f"counts {c.shape} need totals of shape {c.shape[:-1]}, got {total.shape}")
    k, S = np.arange(1, c.shape[-1] + 1), _prefix_sums(c)
    raised = np.maximum(0.0, (((total - tolerance)[..., None] - S) / k).min(axis=-1))
    lowered = np.minimum(0.0, (((total + tolerance)[..., None] - S) / k).min(axis=-1))
    n = np.maximum(c + (raised + lowered)[..., None], 0.0)
    n *= (total + tolerance >= 0)[..., None]
    return np.asarray(n)


def _prefix_sums(c: FloatArray) -> FloatArray:
    """S_k, of counts in descending order."""
    return np.asarray(np.cumsum(-np.sort(-c, axis=-1), axis=-1))


def _optimal_value(
    c: FloatArray, S: FloatArray, k: NDArray[np.int64], lower: FloatArray, upper: FloatArray
) -> FloatArray:
    below = np.maximum(-c.min(axis=-1), (lower[..., 0] - S[..., -1]) / k[-1])
    above = ((S - upper) / k).max(axis=-1)
    t: FloatArray = np.maximum(0.0, np.maximum(below, above))
    return t


@dataclass(frozen=True, slots=True)
class ConsistentCounts:
    """Counts that satisfy Assumption 4: N(x,a) = sum_x' N(x,a,x'); shapes (..., X, A[, X])."""

    transitions: FloatArray
    visits: FloatArray


def consistent(
    transitions: FloatArray, visits: FloatArray, E: float, *, add_on: bool = True
) -> ConsistentCounts:
    """Eq. 7 and then the add-on: E/(2X) on every tuple and so E/2 on every pair.

    transitions (..., X, A, X), visits (..., X, A), E in counts. Without `add_on` the counts stay
    as projected: unbiased up to clipping, but possibly below the true ones.
    """
    n = nearest(transitions, visits, E / 4)
    if add_on:
        n = n + E / (2 * n.shape[-1])
    return ConsistentCounts(n, n.sum(axis=-1))


def precision(variance: float, counters: int, delta: float, term: float = 1.0) -> float:
    """E of Assumption 4: with probability 1 - delta all noises are within E/4 (Bernstein).

    A counter's noise is a centred sum of independent terms of size at most `term` and total
    `variance`, hence P(|noise| > s) <= 2 exp(-s^2 / (2 variance + 2 term s / 3)); union over
    counters.
    """
    log_term = math.log(2 * counters / delta)
    linear = term * log_term / 3
    return 4 * (linear + math.sqrt(linear**2 + 2 * variance * log_term))
