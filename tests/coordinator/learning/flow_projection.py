"""The projection of private counts onto the equations of flow and N >= 0.

With multipliers lambda its solution is N = max(c - B' lambda, 0), where lambda maximises the
concave dual q(lambda) = |c|^2 / 2 - |max(c - B' lambda, 0)|^2 / 2 - b' lambda by Newton steps on
its pieces. The certificate is the residual |B N - b| and the duality gap. It says how much noise
non-negativity would remove beyond `postprocess.conserve`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from riffle.coordinator.learning.learner import FloatArray
from riffle.coordinator.learning.postprocess import adjoint, divergence

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


def project_flow(transitions: FloatArray, n: float, tolerance: float = 1e-9) -> FlowCounts:
    """Projects counts (H, X, A, X) onto the equations and N >= 0; residual <= tolerance * n.

    Raises ValueError when n is negative: no counts satisfy the equations then.
    """
    if n < 0:
        raise ValueError(f"n must be >= 0, got {n}")
    c = np.asarray(transitions, dtype=np.float64)
    b = np.zeros(1 + (c.shape[0] - 1) * c.shape[1])
    b[0] = n
    multipliers = np.zeros_like(b)
    N, gradient = _primal(c, b, multipliers)
    iterations = 0
    while np.abs(gradient).max() > tolerance * max(n, 1.0) and iterations < MOST_ITERATIONS:
        step = np.asarray(np.linalg.solve(_hessian(N), gradient), dtype=np.float64)
        multipliers = _ascend(c, b, multipliers, step, gradient)
        N, gradient = _primal(c, b, multipliers)
        iterations += 1
    primal = float(((N - c) ** 2).sum()) / 2
    gap = abs(primal - _dual(c, b, multipliers)) / max(primal, 1.0)
    return FlowCounts(N, float(np.abs(gradient).max()), gap, iterations)


def _primal(c: FloatArray, b: FloatArray, multipliers: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Returns N(lambda) and the dual's gradient B N - b."""
    N = np.maximum(c - adjoint(multipliers, c.shape), 0.0)
    return N, divergence(N) - b


def _dual(c: FloatArray, b: FloatArray, multipliers: FloatArray) -> float:
    N = np.maximum(c - adjoint(multipliers, c.shape), 0.0)
    return float(((c**2).sum() - (N**2).sum()) / 2 - b @ multipliers)


def _ascend(
    c: FloatArray, b: FloatArray, multipliers: FloatArray, step: FloatArray, gradient: FloatArray
) -> FloatArray:
    """Takes the longest of the steps 1, 1/2, 1/4, ... that raises the dual enough (Armijo)."""
    start, slope, t = _dual(c, b, multipliers), float(gradient @ step), 1.0
    slack = 1e-12 * (abs(start) + 1)
    while t > 1e-10 and _dual(c, b, multipliers + t * step) < start + 1e-4 * t * slope - slack:
        t /= 2
    return multipliers + t * step


def _hessian(N: FloatArray) -> FloatArray:
    """Returns B D B' with D the positive counts, and a ridge for equations that none enters."""
    identity = np.eye(1 + (N.shape[0] - 1) * N.shape[1])
    return divergence(adjoint(identity, N.shape) * (N > 0)) + RIDGE * identity
