"""Flow-consistent counts: what every user must have done, used against the noise.

The true transition counts N_h(x, a, x') of n episodes satisfy, exactly and whatever the MDP,

    sum_{x,a,x'} N_0(x, a, x') = n,
    sum_{x,a} N_{h-1}(x, a, y) = sum_{a,x'} N_h(y, a, x')      for all y, h >= 1,      N >= 0,

written B N = b. Private counts c do not. Their precision-weighted least-squares projection onto
these constraints is post-processing and costs no privacy; as only noise violates them, it takes
noise away and nothing else. There are r = 1 + (H - 1) X independent equations for H X^2 A counts,
so the equations alone remove exactly the share r / (H X^2 A) of the noise's total variance, and far
more of it in sums such as visits of a state.

`conserve` is the projection onto the equations: linear, unbiased, for stacks of counts; visits that
were counted on their own (family paper) enter with their precision. With Sigma the covariance of
the combined noise,

    N = c - Sigma B' (B Sigma B')^-1 (B c - b).

`project_flow` adds N >= 0. With multipliers lambda its solution is N = max(c - B' lambda, 0), where
lambda maximises the concave dual q(lambda) = |c|^2 / 2 - |max(c - B' lambda, 0)|^2 / 2 - b' lambda
by Newton steps on its pieces; the certificate is the residual |B N - b| and the duality gap.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from riffle.coordinator.learning.learner import FloatArray

MOST_ITERATIONS = 200
RIDGE = 1e-9


@dataclass(frozen=True, slots=True)
class FlowCounts:
    """Counts (H, X, A, X) that conserve flow, with their certificate.

    residual: largest violation of an equation, in counts; gap: primal minus dual value relative to
    the primal; iterations: Newton steps.
    """

    transitions: FloatArray
    residual: float
    gap: float
    iterations: int


def divergence(N: FloatArray) -> FloatArray:
    """B N for counts (..., H, X, A, X): shape (..., 1 + (H - 1) X)."""
    inflow = N[..., :-1, :, :, :].sum(axis=(-3, -2))
    outflow = N[..., 1:, :, :, :].sum(axis=(-2, -1))
    total = N[..., 0, :, :, :].sum(axis=(-3, -2, -1))
    balance = (inflow - outflow).reshape(*N.shape[:-4], -1)
    return np.concatenate([total[..., None], balance], axis=-1)


def spread(multipliers: FloatArray, shape: tuple[int, ...]) -> FloatArray:
    """B' lambda (..., H, X, A, X), the adjoint of `divergence`."""
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
    visits: FloatArray | None = None,
    ratio: float = 0.0,
) -> FloatArray:
    """Project counts (..., H, X, A, X) onto the equations.

    `visits` (..., H, X, A) are visits counted on their own, of noise variance 1 / `ratio` times
    that of a transition count; None when they are sums of the transitions.
    """
    shape = transitions.shape[-4:]
    share = 0.0 if visits is None else ratio / (1 + shape[-1] * ratio)
    if visits is not None:
        surplus = transitions.sum(axis=-1) - visits
        transitions = transitions - share * surplus[..., None]
    excess = divergence(transitions)
    excess[..., 0] -= n
    multipliers = excess @ _inverse(shape, share)
    correction: FloatArray = transitions - _covariance(spread(multipliers, shape), share)
    return correction


def conserve_total(transitions: FloatArray, n: float) -> FloatArray:
    """Counts (..., Hs, X, A, X) of one batch a step: each step's sum is n, and no more is known."""
    surplus = transitions.sum(axis=(-3, -2, -1), keepdims=True) - n
    result: FloatArray = transitions - surplus / np.prod(transitions.shape[-3:])
    return result


def project_flow(transitions: FloatArray, n: float, tolerance: float = 1e-9) -> FlowCounts:
    """Project counts (H, X, A, X) onto the equations and N >= 0; residual at most tolerance * n.

    Raises ValueError when n is negative: no counts satisfy the equations then.
    """
    if n < 0:
        raise ValueError(f"n must be >= 0, got {n}")
    c = np.asarray(transitions, dtype=np.float64)
    b = np.zeros(1 + (c.shape[0] - 1) * c.shape[1])
    b[0] = n
    multipliers = np.zeros_like(b)
    N, gradient = _at(c, b, multipliers)
    iterations = 0
    while np.abs(gradient).max() > tolerance * max(n, 1.0) and iterations < MOST_ITERATIONS:
        step = np.asarray(np.linalg.solve(_hessian(N), gradient), dtype=np.float64)
        multipliers = _ascend(c, b, multipliers, step, gradient)
        N, gradient = _at(c, b, multipliers)
        iterations += 1
    primal = float(((N - c) ** 2).sum()) / 2
    gap = abs(primal - _dual(c, b, multipliers)) / max(primal, 1.0)
    return FlowCounts(N, float(np.abs(gradient).max()), gap, iterations)


def _at(c: FloatArray, b: FloatArray, multipliers: FloatArray) -> tuple[FloatArray, FloatArray]:
    """N(lambda) and the dual's gradient B N - b."""
    N = np.maximum(c - spread(multipliers, c.shape), 0.0)
    return N, divergence(N) - b


def _dual(c: FloatArray, b: FloatArray, multipliers: FloatArray) -> float:
    N = np.maximum(c - spread(multipliers, c.shape), 0.0)
    return float(((c**2).sum() - (N**2).sum()) / 2 - b @ multipliers)


def _ascend(
    c: FloatArray, b: FloatArray, multipliers: FloatArray, step: FloatArray, gradient: FloatArray
) -> FloatArray:
    """The longest of the steps 1, 1/2, 1/4, ... that raises the dual enough (Armijo)."""
    start, slope, t = _dual(c, b, multipliers), float(gradient @ step), 1.0
    slack = 1e-12 * (abs(start) + 1)
    while t > 1e-10 and _dual(c, b, multipliers + t * step) < start + 1e-4 * t * slope - slack:
        t /= 2
    return multipliers + t * step


def _hessian(N: FloatArray) -> FloatArray:
    """B D B' with D the positive counts, and a ridge for equations that none of them enters."""
    identity = np.eye(1 + (N.shape[0] - 1) * N.shape[1])
    return divergence(spread(identity, N.shape) * (N > 0)) + RIDGE * identity


def _covariance(array: FloatArray, share: float) -> FloatArray:
    """Sigma times an array, in units of a transition count's variance."""
    return array - share * array.sum(axis=-1, keepdims=True) if share else array


@lru_cache(maxsize=16)
def _inverse(shape: tuple[int, ...], share: float) -> FloatArray:
    """(B Sigma B')^-1."""
    return np.asarray(np.linalg.inv(_gram(shape, share)), dtype=np.float64)


def _gram(shape: tuple[int, ...], share: float) -> FloatArray:
    """B Sigma B', written out: B itself has H X^2 A columns.

    With S the sums over x', v' Sigma w = v'w - share (S v)'(S w). The equation of step 0 has X^2 A
    ones; that of (h, y) has X A ones at step h - 1 (one for each S) and minus A rows at step h.
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
    return gram
