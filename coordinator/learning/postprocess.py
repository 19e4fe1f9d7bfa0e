"""Post-processing of private counts: Eq. 7 of paper 000, equations of flow, the absorbing MDP.

Everything here is a function of released counts, so it costs no privacy.

**Eq. 7.** For every (h, x, a), let c be the noisy transition counts N(x, a, .), and N the noisy
visits N(x, a). Let l = N - E/4 and u = N + E/4, where E is the precision of 000, Assumption 4.
Eq. 7 asks for a vector n that attains

    min t   subject to   n >= 0,  |n(x') - c(x')| <= t,  l <= sum n <= u.

There are many minimisers. `project` returns one of them: the Euclidean projection of c onto the set
{n >= 0, l <= sum n <= u}. If c is sorted in descending order and S_k sums its first k entries,

    lambda = max(0, min_k (l - S_k) / k) + min(0, min_k (u - S_k) / k),    n = max(c + lambda, 0).

If u < 0, no n is feasible, and `project` returns n = 0.

**Flow.** The true transition counts N_h(x, a, x') of n episodes satisfy, in every MDP,

    sum_{x,a,x'} N_0(x, a, x') = n,
    sum_{x,a} N_{h-1}(x, a, y) = sum_{a,x'} N_h(y, a, x')      for all y, h >= 1,

in short B N = b. `conserve` projects private counts c onto these equations by least squares,
weighted by the inverse variances. Let Sigma be the covariance of the noise on c, and B' the
transpose of B. The projection is linear and unbiased:

    N = c - Sigma B' (B Sigma B')^-1 (B c - b).

If visits have counters of their own (families `paper`), the visit counts first correct c.

**Absorbing MDP** (000, section III-B). W is the set of infrequent tuples (h, x, a, x'). These
tuples lead to the state x-dagger, which earns 0:

    P~(x' | x, a) = N(x, a, x') / N(x, a)  off W,   0 on W,   the rest of the row to x-dagger,
    r~(x, a)      = clip(R(x, a) / N(x, a), 0, 1).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from riffle.coordinator.learning.learner import BoolArray, FloatArray


def project(c: FloatArray, total: FloatArray, tolerance: float) -> FloatArray:
    """Returns the rows n >= 0 nearest to c (..., X) with sums within `tolerance` of `total` (...).

    These rows solve Eq. 7 of 000. Raises ValueError if `tolerance` is negative or shapes disagree.
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
    """`visits` (..., X, A) are exactly the sums over x' of `transitions` (..., X, A, X)."""

    transitions: FloatArray
    visits: FloatArray


def consistent(
    transitions: FloatArray,
    visits: FloatArray,
    E: float,
    *,
    add_on: bool = True,
    possible: BoolArray | None = None,
) -> ConsistentCounts:
    """Applies Eq. 7 of 000. The add-on then splits E/2 evenly over `possible` x' of each (x, a).

    The shapes are (..., X, A, X) for transitions and (..., X, A) for visits. Without `add_on`,
    counts are only projected: unbiased up to clipping, but perhaps below the true counts.
    """
    mask = np.ones(transitions.shape[-1:], dtype=np.bool_) if possible is None else possible
    tuples = mask.sum(axis=-1, keepdims=True)
    n = project(np.where(mask | (tuples == 0), transitions, -np.inf), visits, E / 4)
    if add_on:
        n = n + E / (2 * np.maximum(tuples, 1)) * mask
    return ConsistentCounts(n, n.sum(axis=-1))


def precision(variance: float, counters: int, delta: float, term: float = 1.0) -> float:
    """Returns E of 000, Assumption 4: with probability 1 - delta, all noise is within E/4.

    Every counter's noise satisfies Bernstein's inequality P(|noise| > s) <= 2 exp(-s^2 / (2
    variance + 2 term s / 3)). A union bound over all `counters` counters gives E.
    """
    log_term = math.log(2 * counters / delta)
    linear = term * log_term / 3
    return 4 * (linear + math.sqrt(linear**2 + 2 * variance * log_term))


def divergence(N: FloatArray) -> FloatArray:
    """Returns the left sides B N of the equations of flow for counts N (..., H, X, A, X).

    B N is (..., 1 + (H - 1) X): the total at step 0, then inflow minus outflow of each (h, y).
    """
    inflow = N[..., :-1, :, :, :].sum(axis=(-3, -2))
    outflow = N[..., 1:, :, :, :].sum(axis=(-2, -1))
    total = N[..., 0, :, :, :].sum(axis=(-3, -2, -1))
    balance = (inflow - outflow).reshape(*N.shape[:-4], -1)
    return np.concatenate([total[..., None], balance], axis=-1)


def adjoint(multipliers: FloatArray, shape: tuple[int, ...]) -> FloatArray:
    """Applies `divergence` transposed to one number for each equation: (..., 1 + (H - 1) X)."""
    H, X, A, _ = shape
    nodes = multipliers[..., 1:].reshape(*multipliers.shape[:-1], H - 1, X)
    out = np.zeros((*multipliers.shape[:-1], H, X, A, X))
    out[..., :-1, :, :, :] += nodes[..., None, None, :]
    out[..., 1:, :, :, :] -= nodes[..., :, None, None]
    out[..., 0, :, :, :] += multipliers[..., :1, None, None]
    return out


def conserve(
    transitions: FloatArray,
    n: float,
    *,
    possible: BoolArray | None = None,
    visits: FloatArray | None = None,
    ratio: float = 0.0,
) -> FloatArray:
    """Projects counts (..., H, X, A, X) of n episodes onto the equations of flow.

    `visits` (..., H, X, A) are visits with counters of their own, or None if visits are sums over
    x'. `ratio` is the noise variance of a transition count divided by the noise variance of a visit
    count. `possible` (H, X, A, X) is the support; None means that all transitions are possible.
    """
    mask = np.ones(transitions.shape[-4:], dtype=np.bool_) if possible is None else possible
    if visits is not None:
        surplus = transitions.sum(axis=-1) - visits
        transitions = transitions - mask * (_share(mask, ratio) * surplus)[..., None]
    return np.asarray(transitions - imbalance(transitions, n, mask, ratio))


def _share(possible: BoolArray | FloatArray, ratio: float) -> FloatArray:
    """Returns s = ratio / (1 + k ratio) in shape (H, X, A); k counts the possible x' of (h, x, a).

    Let a transition count's noise variance be the unit. The covariance of the noise on the counts
    of one (h, x, a) is then the identity matrix with s subtracted from every entry.
    """
    return np.asarray(ratio / (1 + ratio * possible.sum(axis=-1)))


def imbalance(
    transitions: FloatArray, n: float, possible: BoolArray, ratio: float = 0.0
) -> FloatArray:
    """Returns the part of counts (..., H, X, A, X) that breaks the equations of flow.

    For counts c and true counts N, this part is M (c - N). In M = Sigma B' (B Sigma B')^-1 B, Sigma
    is the noise's covariance, B the matrix of the equations, and B' its transpose.
    """
    excess = divergence(transitions)
    excess[..., 0] -= n
    multipliers = excess @ _inverse(possible.tobytes(), possible.shape, ratio)
    part = possible * adjoint(multipliers, possible.shape)
    return np.asarray(part - possible * (_share(possible, ratio) * part.sum(axis=-1))[..., None])


def leverage(possible: BoolArray) -> FloatArray:
    """Returns the diagonal (H, X, A, X) of M, the matrix in `imbalance`'s docstring.

    Assumes that visits are sums of transitions, without counters of their own.
    """
    H, X = possible.shape[:2]
    inverse = _inverse(possible.tobytes(), possible.shape, 0.0)
    into = 1 + np.arange((H - 1) * X).reshape(H - 1, X)  # rows of B: arrivals in each y
    left = np.concatenate([np.zeros((1, X), dtype=np.int64), into])  # departures from each x
    sign = np.where(np.arange(H - 1) == 0, 1, -1)[:, None, None]
    own = np.broadcast_to(np.diag(inverse)[left][..., None], (H, X, X)).copy()
    own[:-1] += np.diag(inverse)[into][:, None]
    own[:-1] += 2 * sign * inverse[left[:-1, :, None], into[:, None]]
    return np.asarray(possible * own[:, :, None])


@lru_cache(maxsize=16)
def _inverse(mask: bytes, shape: tuple[int, ...], ratio: float) -> FloatArray:
    """Returns (B Sigma B')^-1 (see the module) without building B. `mask` is the support as bytes.

    Row 0 of B is 1 at all transitions of step 0. Row (h, y) is 1 at transitions of step h - 1 into
    y, and -1 at transitions of step h out of y. If a state cannot occur, its row of B is zero. A
    one on the diagonal of B Sigma B' then keeps this matrix invertible.
    """
    H, X = shape[:2]
    possible = np.frombuffer(mask, dtype=np.bool_).reshape(shape).astype(np.float64)
    gram = np.zeros((1 + (H - 1) * X,) * 2)
    for h, (m, s) in enumerate(zip(possible, _share(possible, ratio), strict=True)):
        k = m.sum(axis=-1)
        leaving = np.diag((k - s * k**2).sum(axis=-1))
        moving = -((1 - s * k)[..., None] * m).sum(axis=1)
        rows = m.reshape(-1, X)
        entering = np.diag(rows.sum(axis=0)) - rows.T @ (s.reshape(-1, 1) * rows)
        out, into = slice(1 + (h - 1) * X, 1 + h * X), slice(1 + h * X, 1 + (h + 1) * X)
        if h == 0:
            out, leaving, moving = slice(1), leaving.sum(), -moving.sum(axis=0, keepdims=True)
        gram[out, out] += leaving
        if h < H - 1:
            gram[into, into] += entering
            gram[out, into], gram[into, out] = moving, moving.T
    gram[np.diag_indices_from(gram)] += np.diag(gram) == 0
    return np.asarray(np.linalg.inv(gram), dtype=np.float64)


def estimate_transition(transitions: FloatArray, W: BoolArray) -> FloatArray:
    """Returns P~ from consistent counts (..., X, A, X): 0 where W is true and in unvisited rows."""
    visits = transitions.sum(axis=-1, keepdims=True)
    rows = np.divide(transitions, visits, out=np.zeros_like(transitions), where=visits > 0)
    return np.where(W, 0.0, rows)


def estimate_rewards(rewards: FloatArray, visits: FloatArray) -> FloatArray:
    """Returns r~ (..., X, A): rewards / visits clipped to [0, 1], and 0 if there are no visits."""
    ratio = np.divide(rewards, visits, out=np.zeros_like(rewards), where=visits > 0)
    return np.clip(ratio, 0.0, 1.0)
