"""Post-processing of private counts: Eq. 7, the add-on, E, flow, and the absorbing MDP of 000.

Everything here is a function of released counts, so it costs no privacy.

**Eq. 7.** For every (h, x, a), let c be the noisy transition counts N(x, a, .), N the noisy visits
N(x, a), and [l, u] = [N - E/4, N + E/4]. Eq. 7 asks for

    min t   subject to   n >= 0,  |n(x') - c(x')| <= t,  l <= sum n <= u.

There are many minimisers. `project` returns the Euclidean projection of c onto the set {n >= 0, l
<= sum n <= u}. It is a minimiser (the tests compare it with a linear program), it is unique, and it
is continuous in the data. With c sorted in descending order and S_k its prefix sums,

    lambda = max(0, min_k (l - S_k) / k) + min(0, min_k (u - S_k) / k),    n = max(c + lambda, 0).

If u < 0, no n is feasible, and `project` returns n = 0.

**Flow.** The true transition counts N_h(x, a, x') of n episodes satisfy, exactly and in every MDP,

    sum_{x,a,x'} N_0(x, a, x') = n,
    sum_{x,a} N_{h-1}(x, a, y) = sum_{a,x'} N_h(y, a, x')      for all y, h >= 1,

in short B N = b. Private counts c violate them. `conserve` projects c onto these equations by least
squares, weighted by precision. The projection is linear and unbiased, and takes stacks of counts.
Only noise violates the equations, so the projection removes noise and nothing else. There are 1 +
(H - 1) X independent equations for H X^2 A counts. So it removes the share
(1 + (H - 1) X) / (H X^2 A) of the noise's total variance, and a far larger share in sums such as
the visits of a state. If visits are counted separately (families `paper`), they enter with their
own precision. With Sigma the covariance of the combined noise,

    N = c - Sigma B' (B Sigma B')^-1 (B c - b).

**Absorbing MDP** (000, section III-B). Tuples (h, x, a, x') in W lead to x-dagger, which earns 0:

    P~(x' | x, a) = N(x, a, x') / N(x, a)  off W,   0 on W,   the rest of the row to x-dagger,
    r~(x, a)      = clip(R(x, a) / N(x, a), 0, 1).

These are `Estimate Transition` and `Estimate Rewards`, which paper 000 does not write out. P~ is
sub-stochastic (see `planning`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from riffle.coordinator.learning.learner import BoolArray, FloatArray


def project(c: FloatArray, total: FloatArray, tolerance: float) -> FloatArray:
    """Returns n (..., X) of Eq. 7 for rows c (..., X), noisy totals (...), tolerance E/4 (counts).

    Raises ValueError if the tolerance E/4 is negative or the shapes disagree.
    """
    if tolerance < 0:
        raise ValueError(f"tolerance (E/4) must be >= 0, got {tolerance}")
    if c.shape[:-1] != total.shape:
        raise ValueError(f"counts {c.shape} need totals of shape {c.shape[:-1]}, got {total.shape}")
    k, S = np.arange(1, c.shape[-1] + 1), np.cumsum(-np.sort(-c, axis=-1), axis=-1)
    up = np.maximum(0.0, (((total - tolerance)[..., None] - S) / k).min(axis=-1))
    down = np.minimum(0.0, (((total + tolerance)[..., None] - S) / k).min(axis=-1))
    n = np.maximum(c + (up + down)[..., None], 0.0)
    n *= (total + tolerance >= 0)[..., None]
    return np.asarray(n)


@dataclass(frozen=True, slots=True)
class ConsistentCounts:
    """Counts that satisfy Assumption 4: N(x,a) = sum_x' N(x,a,x'); shapes (..., X, A[, X])."""

    transitions: FloatArray
    visits: FloatArray


def consistent(
    transitions: FloatArray, visits: FloatArray, E: float, *, add_on: bool = True
) -> ConsistentCounts:
    """Applies Eq. 7, then the add-on: it adds E/(2X) to every tuple and so E/2 to every pair.

    transitions (..., X, A, X), visits (..., X, A), E in counts. Without `add_on`, the counts are
    only projected: unbiased up to clipping, but possibly below the true ones.
    """
    n = project(transitions, visits, E / 4)
    if add_on:
        n = n + E / (2 * n.shape[-1])
    return ConsistentCounts(n, n.sum(axis=-1))


def precision(variance: float, counters: int, delta: float, term: float = 1.0) -> float:
    """Returns E of Assumption 4: with probability 1 - delta all noises are within E/4 (Bernstein).

    A counter's noise is a centred sum of independent terms. Each term is at most `term`, and
    `variance` is the variance of the sum. So P(|noise| > s) <= 2 exp(-s^2 / (2 variance + 2 term s
    / 3)), and a union bound over the counters gives E.
    """
    log_term = math.log(2 * counters / delta)
    linear = term * log_term / 3
    return 4 * (linear + math.sqrt(linear**2 + 2 * variance * log_term))


def divergence(N: FloatArray) -> FloatArray:
    """Returns B N (..., 1 + (H - 1) X) for counts N (..., H, X, A, X)."""
    inflow = N[..., :-1, :, :, :].sum(axis=(-3, -2))
    outflow = N[..., 1:, :, :, :].sum(axis=(-2, -1))
    total = N[..., 0, :, :, :].sum(axis=(-3, -2, -1))
    balance = (inflow - outflow).reshape(*N.shape[:-4], -1)
    return np.concatenate([total[..., None], balance], axis=-1)


def adjoint(multipliers: FloatArray, shape: tuple[int, ...]) -> FloatArray:
    """Returns B' lambda (..., H, X, A, X) for multipliers lambda (..., 1 + (H - 1) X)."""
    H, X, A, _ = shape
    nodes = multipliers[..., 1:].reshape(*multipliers.shape[:-1], H - 1, X)
    out = np.zeros((*multipliers.shape[:-1], H, X, A, X))
    out[..., :-1, :, :, :] += nodes[..., None, None, :]
    out[..., 1:, :, :, :] -= nodes[..., :, None, None]
    out[..., 0, :, :, :] += multipliers[..., :1, None, None]
    return out


def conserve(
    transitions: FloatArray, n: float, *, visits: FloatArray | None = None, ratio: float = 0.0
) -> FloatArray:
    """Projects counts (..., H, X, A, X) of n episodes onto the equations of flow.

    `visits` (..., H, X, A) are visits counted separately, whose noise has 1 / `ratio` times the
    variance of a transition count's noise. None means that visits are sums of transitions.
    """
    share = 0.0 if visits is None else ratio / (1 + transitions.shape[-1] * ratio)
    if visits is not None:
        surplus = transitions.sum(axis=-1) - visits
        transitions = transitions - share * surplus[..., None]
    return np.asarray(transitions - imbalance(transitions, n, share))


def imbalance(transitions: FloatArray, n: float, share: float = 0.0) -> FloatArray:
    """Returns the part of counts (..., H, X, A, X) that true counts of n episodes never have.

    For counts c and true counts N, this part is M (c - N) with M = Sigma B' (B Sigma B')^-1 B.
    """
    shape = transitions.shape[-4:]
    excess = divergence(transitions)
    excess[..., 0] -= n
    part = adjoint(excess @ _inverse(shape, share), shape)
    if share:  # times Sigma, in units of a transition count's variance
        part = part - share * part.sum(axis=-1, keepdims=True)
    return part


def leverage(shape: tuple[int, ...]) -> FloatArray:
    """Returns M's diagonal (see `imbalance`), (H,): all (x, a, x') of a step share one value."""
    H, X = shape[:2]
    inverse = _inverse(shape, 0.0)
    columns = np.zeros((H, len(inverse)))  # of B, for x = x' = 0
    columns[0, 0] = 1.0
    for h in range(1, H):
        columns[h, 1 + (h - 1) * X], columns[h - 1, 1 + (h - 1) * X] = -1.0, 1.0
    return np.asarray(np.einsum("hi,ij,hj->h", columns, inverse, columns))


@lru_cache(maxsize=16)
def _inverse(shape: tuple[int, ...], share: float) -> FloatArray:
    """Returns (B Sigma B')^-1 without building B, which has H X^2 A columns.

    With S summing over x', v' Sigma w = v'w - share (S v)'(S w). Row 0 of B has X^2 A ones. Row (h,
    y) has a one in each of the X A sums of step h - 1, and minus ones in A sums of step h.
    """
    H, X, A, _ = shape
    size = 1 + (H - 1) * X
    gram = np.zeros((size, size))
    gram[0, 0] = X * X * A - share * X**3 * A
    gram[0, 1 : 1 + X] = gram[1 : 1 + X, 0] = X * A - share * X * X * A
    for i in range(1, size, X):
        here = slice(i, i + X)
        gram[here, here] = (2 * X * A - share * A * X * X) * np.eye(X) - share * X * A
        gram[here, i + X : i + 2 * X] = gram[i + X : i + 2 * X, here] = share * X * A - A
    return np.asarray(np.linalg.inv(gram), dtype=np.float64)


def estimate_transition(transitions: FloatArray, W: BoolArray) -> FloatArray:
    """Returns P~ (..., X, A, X) from consistent counts of that shape. Rows without visits are 0."""
    visits = transitions.sum(axis=-1, keepdims=True)
    rows = np.divide(transitions, visits, out=np.zeros_like(transitions), where=visits > 0)
    return np.where(W, 0.0, rows)


def estimate_rewards(rewards: FloatArray, visits: FloatArray) -> FloatArray:
    """Returns r~ (..., X, A): R / N clipped to [0, 1], and 0 if there are no visits."""
    ratio = np.divide(rewards, visits, out=np.zeros_like(rewards), where=visits > 0)
    return np.clip(ratio, 0.0, 1.0)
