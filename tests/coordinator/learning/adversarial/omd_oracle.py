"""`omd.ftrl_step` in NumPy, on padded arrays: the oracle of the compiled loops."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from riffle.coordinator.learning.adversarial.confidence import Box
from riffle.coordinator.learning.adversarial.layered import Layers, occupancy
from riffle.coordinator.learning.adversarial.omd import (
    DAMPING,
    HOPELESS,
    LOG_ZERO,
    LONGEST_STEP,
    MAX_ITERATIONS,
    RIDGE,
    TINY,
    TOLERANCE,
    Step,
)
from riffle.coordinator.learning.learner import FloatArray, LearnerError

ABSENT = 1e12  # cost of a padding pair: its m is zero


def ftrl_step(
    layers: Layers,
    box: Box,
    cost: FloatArray,
    start: FloatArray | None = None,
    tolerance: float = TOLERANCE,
) -> Step:
    """Solve for cost = eta L~ (H, W, A), from dual values `start` (H + 1, W) or from zero.

    Stops above `tolerance` where rounding forbids more (costs beyond 10^3); residual and gap of the
    answer say so. Raises LearnerError when the residual stays above HOPELESS.
    """
    bounds = Bounds.of(layers, box, cost)
    point = _evaluate(bounds, np.zeros((layers.H + 1, layers.W)) if start is None else start)
    longest = LONGEST_STEP + float(np.ptp(cost)) / 10
    for iterations in range(MAX_ITERATIONS):
        if point.residual <= tolerance:
            return answer(layers, cost, point, iterations)
        advanced = _advance(layers, bounds, point, longest)
        if advanced is None:
            break
        point = advanced
    if point.residual > HOPELESS:
        raise LearnerError(f"the FTRL step stopped at flow residual {point.residual:.1e}")
    return answer(layers, cost, point, iterations)


@dataclass(frozen=True, slots=True)
class Bounds:
    """Logarithms of the box (H, W, A, W), the box, and the cost with padding pairs priced out."""

    log_lower: FloatArray
    log_upper: FloatArray
    lower: FloatArray
    upper: FloatArray
    cost: FloatArray

    @classmethod
    def of(cls, layers: Layers, box: Box, cost: FloatArray) -> Bounds:
        """The arguments of `ftrl_step`."""
        both = np.array((box.lower, box.upper))
        lower, upper = np.log(both, out=np.full_like(both, LOG_ZERO), where=both > 0)
        return cls(lower, upper, box.lower, box.upper, np.where(layers.pairs, cost, ABSENT))


@dataclass(frozen=True, slots=True)
class Point:
    """f and its gradient (H - 1, W) at v (H + 1, W); m, ln m (H, W, A); p, ln p, free cells."""

    v: FloatArray
    f: float
    gradient: FloatArray
    log_m: FloatArray
    m: FloatArray
    log_p: FloatArray
    p: FloatArray
    p_free: FloatArray

    @property
    def residual(self) -> float:
        """Largest violation of flow."""
        return float(np.abs(self.gradient).max(initial=0.0))


def _evaluate(bounds: Bounds, v: FloatArray) -> Point:
    after = v[1:, None, None, :]
    log_p, p, p_free = _project_rows(bounds, after)
    phi = np.vecdot(p, log_p - after)
    s = -bounds.cost - v[:-1, :, None] - phi
    top = s.max(axis=(1, 2), keepdims=True)
    e = np.exp(s - top)
    Z = e.sum(axis=(1, 2), keepdims=True)
    log_Z = top + np.log(Z)
    m = e / Z
    H, W = v.shape[0] - 1, v.shape[1]
    inflow = (m.reshape(H, 1, -1) @ p.reshape(H, -1, W))[:-1, 0]
    gradient = inflow - m.sum(axis=2)[1:]
    return Point(v, float(log_Z.sum()), gradient, s - log_Z, m, log_p, p, p_free)


def _project_rows(bounds: Bounds, after: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
    """ln p, p and p on free cells (zero elsewhere), for the dual values after each row."""
    ones = np.ones((after.shape[-1], 1))  # a product with it is the quickest sum of a short row
    low, high = bounds.log_lower - after, bounds.log_upper - after
    breaks = np.concatenate((low, high), axis=-1)
    raised = np.maximum(after[..., None, :] + breaks[..., None], bounds.log_lower[..., None, :])
    np.minimum(raised, bounds.log_upper[..., None, :], out=raised)
    total = (np.exp(raised, out=raised) @ ones)[..., 0]
    last = np.where(total <= 1.0, breaks, -np.inf).max(axis=-1, keepdims=True)
    full = high <= last
    free = (low <= last) & ~full
    left = 1.0 - np.where(full, bounds.upper, np.where(free, 0.0, bounds.lower)) @ ones
    inside = np.where(free, after, -np.inf)
    shift = np.maximum(inside.max(axis=-1, keepdims=True), -ABSENT)
    mass = np.exp(inside - shift) @ ones
    delta = np.log(np.maximum(left, TINY) / np.maximum(mass, TINY)) - shift
    delta = np.where(mass > 0, np.maximum(delta, last), last)
    log_p = np.minimum(np.maximum(after + delta, bounds.log_lower), bounds.log_upper)
    p = np.exp(log_p)
    return log_p, p, p * free


@dataclass(frozen=True, slots=True)
class _Derivatives:
    """Flows of the inner layers (H - 1, W) and the blocks of their derivatives in v.

    Of inflow at a layer: `into` (H - 1, W, W) in the layer's own v, -`across` transposed in v of
    the layer before. Of outflow: -`leave` in its own v, -`across` (H - 2, W, W) in v of the next.
    """

    inflow: FloatArray
    outflow: FloatArray
    into: FloatArray
    leave: FloatArray
    across: FloatArray

    @classmethod
    def of(cls, layers: Layers, point: Point) -> _Derivatives:
        H, W, m = layers.H, layers.W, point.m
        p, free = point.p.reshape(H, -1, W), point.p_free.reshape(H, -1, W)
        weighted = m.reshape(H, -1, 1) * p
        flow = weighted.reshape(H, W, -1, W).sum(axis=2)
        out, inflow = m.sum(axis=2), flow.sum(axis=1)
        # p moves on free cells only: dp = diag(p) - p p^T / sum p there.
        share = m.reshape(H, -1, 1) / np.maximum(free.sum(axis=-1, keepdims=True), TINY)
        into = weighted.swapaxes(1, 2) @ p - (free * share).swapaxes(1, 2) @ free
        into += np.eye(W) * (m.reshape(H, 1, -1) @ free) - _outer(inflow, inflow)
        leave = np.eye(W) * out[:, None, :] - _outer(out, out)
        across = _outer(out, inflow) - flow
        return cls(inflow[:-1], out[1:], into[:-1], leave[1:], across[1:-1])


def _advance(layers: Layers, bounds: Bounds, point: Point, longest: float) -> Point | None:
    """A better point: Newton on the logarithms if it gives one, else damped Newton, else none."""
    derivatives = _Derivatives.of(layers, point)
    step = _logarithmic_step(layers, derivatives)
    step *= min(1.0, longest / max(float(np.abs(step).max()), TINY))
    tried = _better(bounds, point, step)
    for damping in DAMPING:
        if tried is not None:
            break
        tried = _better(bounds, point, _damped_step(layers, derivatives, damping))
    return tried


def _better(bounds: Bounds, point: Point, step: FloatArray) -> Point | None:
    """The point after the step, if f decreases enough or the residual halves (near the end)."""
    v = point.v.copy()
    v[1:-1] += step
    tried = _evaluate(bounds, v)
    slope = float((point.gradient * step).sum())
    rounding = 1e-13 * (1.0 + abs(point.f))
    descends = slope < 0 and tried.f <= point.f + 1e-4 * slope + rounding
    return tried if descends or tried.residual <= point.residual / 2 else None


def _logarithmic_step(layers: Layers, d: _Derivatives) -> FloatArray:
    """Newton's step (H - 1, W) on ln inflow - ln outflow = 0; padding states stay."""
    inflow, outflow = np.maximum(d.inflow, TINY), np.maximum(d.outflow, TINY)
    i, o = 1 / inflow[..., None], 1 / outflow[..., None]
    above, below = d.across * o[:-1], d.across.swapaxes(1, 2) * i[1:]
    matrix = _tridiagonal(d.into * i + d.leave * o, above, below) + _null_space(layers)
    target: FloatArray = np.where(layers.states[1:], np.log(outflow) - np.log(inflow), 0.0)
    return np.asarray(np.linalg.solve(matrix, target.ravel()).reshape(target.shape))


def _damped_step(layers: Layers, d: _Derivatives, damping: float) -> FloatArray:
    """-(Hessian of f + damping)^-1 gradient, (H - 1, W)."""
    hessian = _tridiagonal(d.into + d.leave, d.across, d.across.swapaxes(1, 2))
    hessian += _null_space(layers) + damping * np.eye(len(hessian))
    gradient = d.inflow - d.outflow
    return np.asarray(np.linalg.solve(hessian, -gradient.ravel()).reshape(gradient.shape))


def _outer(a: FloatArray, b: FloatArray) -> FloatArray:
    return a[:, :, None] * b[:, None, :]


def _tridiagonal(diagonal: FloatArray, above: FloatArray, below: FloatArray) -> FloatArray:
    """The block tridiagonal matrix (n W, n W) of blocks (n, W, W) and (n - 1, W, W)."""
    n, W, _ = diagonal.shape
    blocks = np.zeros((n, W, n, W))
    i = np.arange(n)
    blocks[i, :, i, :] = diagonal
    blocks[i[:-1], :, i[1:], :] = above
    blocks[i[1:], :, i[:-1], :] = below
    return blocks.reshape(n * W, n * W)


@lru_cache(maxsize=64)
def _null_space(layers: Layers) -> FloatArray:
    """1 1^T on every layer's states, one on padding states, and a ridge against singularity."""
    states = layers.states[1:].astype(np.float64)
    n, W = states.shape
    blocks = np.zeros((n, W, n, W))
    blocks[np.arange(n), :, np.arange(n), :] = _outer(states, states)
    return blocks.reshape(n * W, n * W) + np.diag(1 - states.ravel()) + RIDGE * np.eye(n * W)


def answer(layers: Layers, cost: FloatArray, point: Point, iterations: int) -> Step:
    """The occupancy measure of the point's policy and transitions, and its certificate."""
    pairs, cells = layers.pairs, layers.cells
    log_m = point.log_m
    top = log_m.max(axis=2, keepdims=True)
    e = np.exp(log_m - top)
    policy = e / e.sum(axis=2, keepdims=True) * pairs
    P = point.p * cells
    q = occupancy(P, policy)
    log_q = np.where(cells, log_m[..., None] + point.log_p, -np.inf)
    entropy = (q * np.log(np.maximum(q, TINY))).sum()
    gap = float((q.sum(axis=-1) * cost).sum() + entropy + point.f)
    return Step(q, log_q, policy, P, point.residual, gap, iterations, point.v)
