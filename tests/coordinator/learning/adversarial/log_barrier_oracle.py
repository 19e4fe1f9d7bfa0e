"""`log_barrier.log_barrier_step` in NumPy, on padded rows: the oracle of the compiled loops."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from riffle.coordinator.learning.adversarial.confidence import Box
from riffle.coordinator.learning.adversarial.layered import (
    Layers,
    induced_policy,
    induced_transitions,
    occupancy,
)
from riffle.coordinator.learning.adversarial.log_barrier import (
    GAP,
    INSIDE,
    MAX_ITERATIONS,
    ROUNDING,
    START,
    STAY,
    answer,
)
from riffle.coordinator.learning.adversarial.omd import Step
from riffle.coordinator.learning.learner import BoolArray, FloatArray, LearnerError


def log_barrier_step(
    layers: Layers, box: Box, cost: FloatArray, q: FloatArray, tolerance: float = GAP
) -> Step:
    """Solve for cost = eta l^ (H, W, A), from q_k (H, W, A, W), positive on cells.

    Stops above `tolerance` where rounding forbids more (rows of the box near MARGIN); the gap of
    the answer says so. Raises LearnerError when the numbers are out of its reach: made for
    cost q_k <= 10, as eta l^ q_k <= eta in the algorithm.
    """
    problem = Problem.of(layers, box, cost, q)
    point = start_at(layers, box, problem, q)
    iterations = 0
    while (gap := problem.gap(point)) > tolerance and point.mu(problem.one) > ROUNDING:
        if iterations == MAX_ITERATIONS:
            raise LearnerError(f"the log-barrier step stopped at a gap of {gap:.1e}")
        try:
            with np.errstate(over="raise", divide="raise", invalid="raise"):
                point = _advance(problem, point)
        except (np.linalg.LinAlgError, FloatingPointError) as error:
            raise LearnerError(f"the log-barrier step stopped at a gap of {gap:.1e}") from error
        iterations += 1
    return answer(layers, point.q, gap, iterations)


@dataclass(frozen=True, slots=True)
class Problem:
    """Rows are the R pairs (x, a): c, upper, lower (R, W), zero beyond their successors.

    one (R, W) marks successors; A (S, R, W) holds +1 at a state's own rows and -1 where it is
    entered, x_0 first; b (S,).
    """

    c: FloatArray
    upper: FloatArray
    lower: FloatArray
    one: FloatArray
    A: FloatArray
    b: FloatArray

    @classmethod
    def of(cls, layers: Layers, box: Box, cost: FloatArray, q: FloatArray) -> Problem:
        """The arguments of `log_barrier_step`, by rows."""
        pairs, cells = layers.pairs, layers.cells[layers.pairs]
        inverse = np.divide(1.0, q[pairs], out=np.zeros(cells.shape), where=cells)
        c = (cost[pairs][:, None] + inverse) * cells
        upper, lower = box.upper[pairs], box.lower[pairs]
        A, b = _flow(layers)
        return cls(
            c,
            np.where(upper >= 1, 2.0, upper) * cells,
            np.where(lower <= 0, -1.0, lower) * cells,
            cells.astype(np.float64),
            A,
            b,
        )

    def slacks(self, q: FloatArray) -> tuple[FloatArray, FloatArray]:
        """s_u and s_l (R, W); one beyond the successors, where nothing is asked."""
        m, beyond = q.sum(axis=1, keepdims=True), 1 - self.one
        return self.upper * m - q + beyond, q - self.lower * m + beyond

    def pull(self, upper_part: FloatArray, lower_part: FloatArray, y: FloatArray) -> FloatArray:
        """G_u^T upper_part + G_l^T lower_part + A^T y, (R, W)."""
        row = (self.lower * lower_part - self.upper * upper_part).sum(axis=1, keepdims=True)
        pulled: FloatArray = (upper_part - lower_part + row) * self.one
        return pulled + np.tensordot(y, self.A, axes=1)

    def gap(self, point: Point) -> float:
        """Objective at q minus the Lagrangian bound; infinite when the duals bound nothing."""
        z = self.c + self.pull(point.z_u, point.z_l, point.y)
        inside = self.one > 0
        if (z[inside] <= 0).any():
            return np.inf
        primal = (self.c * point.q).sum() - np.log(point.q[inside]).sum()
        dual = inside.sum() + np.log(z[inside]).sum() - self.b @ point.y
        return float(primal - dual)


@dataclass(frozen=True, slots=True)
class Point:
    """Primal q, its slacks s_u, s_l (R, W); duals z, z_u, z_l (R, W), y (S,); mu's next factor.

    Slacks are kept, not recomputed: near a bound the difference would lose all its digits.
    """

    q: FloatArray
    s_u: FloatArray
    s_l: FloatArray
    z: FloatArray
    z_u: FloatArray
    z_l: FloatArray
    y: FloatArray
    sigma: float

    @classmethod
    def start(cls, problem: Problem, q: FloatArray) -> Point:
        """At q (R, W), with duals that fit it."""
        one = problem.one
        s_u, s_l = problem.slacks(q)
        z = one / (q + (1 - one))
        z_u, z_l = START * one / s_u, START * one / s_l
        return cls(q, s_u, s_l, z, z_u, z_l, np.zeros(len(problem.b)), 0.1)

    def mu(self, one: FloatArray) -> float:
        """Mean of s_u z_u and s_l z_l."""
        return float((self.s_u * self.z_u + self.s_l * self.z_l).sum() / (2 * one.sum()))


def start_at(layers: Layers, box: Box, problem: Problem, q: FloatArray) -> Point:
    """Where to start after q: the same policy, its transitions moved well inside the box."""
    P = _inside(layers, box, induced_transitions(layers, q))
    return Point.start(problem, occupancy(P, induced_policy(layers, q))[layers.pairs])


def _advance(problem: Problem, point: Point) -> Point:
    """One Newton step towards sigma mu, damped to stay inside; sigma shrinks as steps go well."""
    q, s_u, s_l, one = point.q, point.s_u, point.s_l, problem.one
    mu = point.sigma * point.mu(one) * one
    inverse = one / (q + (1 - one))
    # The barrier's gradient without A^T y, and its Hessian's inverse, row by row.
    g = problem.c - inverse + problem.pull(mu / s_u, mu / s_l, np.zeros_like(point.y))
    D, D_u, D_l = point.z * inverse, point.z_u / s_u, point.z_l / s_l
    R = _inverse(_row_hessian(problem, D, D_u, D_l))
    y, dq = _eliminate(problem, R, g, problem.b - np.tensordot(problem.A, q, axes=2))
    dm = dq.sum(axis=1, keepdims=True)
    ds_u, ds_l = problem.upper * dm - dq, dq - problem.lower * dm
    dz = inverse - point.z - D * dq
    dz_u, dz_l = mu / s_u - point.z_u - D_u * ds_u, mu / s_l - point.z_l - D_l * ds_l
    t = _length((q, dq), (s_u, ds_u), (s_l, ds_l))
    u = _length((point.z, dz), (point.z_u, dz_u), (point.z_l, dz_l))
    return Point(
        q + t * dq,
        s_u + t * ds_u,
        s_l + t * ds_l,
        point.z + u * dz,
        point.z_u + u * dz_u,
        point.z_l + u * dz_l,
        point.y + u * (y - point.y),
        min(0.5, max(0.01, (1 - min(t, u)) ** 2)),
    )


def _row_hessian(problem: Problem, D: FloatArray, D_u: FloatArray, D_l: FloatArray) -> FloatArray:
    """D + G_u^T D_u G_u + G_l^T D_l G_l of every row, (R, W, W); identity beyond successors."""
    one, upper, lower = problem.one, problem.upper, problem.lower
    cross = (D_u * upper + D_l * lower)[:, :, None] * one[:, None, :]
    total = (D_u * upper**2 + D_l * lower**2).sum(axis=1)[:, None, None]
    hessian = total * one[:, :, None] * one[:, None, :] - cross - cross.swapaxes(1, 2)
    diagonal = D + D_u + D_l + (1 - one)
    return np.asarray(hessian + diagonal[:, :, None] * np.eye(one.shape[1]))


def _inverse(rows: FloatArray) -> FloatArray:
    """Inverses of positive definite (R, W, W), scaled to a unit diagonal and kept off singular."""
    s = 1 / np.sqrt(np.einsum("rww->rw", rows))
    scale = s[:, :, None] * s[:, None, :]
    return np.asarray(np.linalg.inv(rows * scale + 1e-15 * np.eye(rows.shape[1])) * scale)


def _eliminate(
    problem: Problem, R: FloatArray, g: FloatArray, missing: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """y and dq with H dq + A^T y = -g and A dq = missing, given R = H^-1 by rows."""
    S = len(problem.b)
    A = problem.A.reshape(S, -1)
    AR = (problem.A[:, :, None, :] @ R)[:, :, 0, :].reshape(S, -1)
    y: FloatArray = np.asarray(np.linalg.solve(AR @ A.T, -AR @ g.ravel() - missing))
    pulled = g + np.tensordot(y, problem.A, axes=1)
    return y, -(R @ pulled[..., None])[..., 0] * problem.one


def _length(*pairs: tuple[FloatArray, FloatArray]) -> float:
    """Longest step <= 1 that keeps all values positive, with a margin."""
    rates = [-step / np.where(value > 0, value, np.inf) for value, step in pairs]
    worst = max(float(rate.max()) for rate in rates)
    return min(1.0, STAY / worst) if worst > 0 else 1.0


def _inside(layers: Layers, box: Box, P: FloatArray) -> FloatArray:
    """P moved towards a centre of the box until it is well inside every bound."""
    lower, room = box.lower, box.upper - box.lower
    need = 1 - lower.sum(axis=-1, keepdims=True)
    centre = lower + room * need / np.maximum(room.sum(axis=-1, keepdims=True), 1e-300)
    theta = np.zeros(need.shape)
    for at, best in ((P - box.lower, centre - box.lower), (box.upper - P, box.upper - centre)):
        short = layers.cells & (at < INSIDE * best)
        part = np.divide(INSIDE * best - at, best - at, out=np.zeros(P.shape), where=short)
        theta = np.maximum(theta, part.max(axis=-1, keepdims=True))
    return np.asarray(((1 - theta) * P + theta * centre) * layers.cells)


@lru_cache(maxsize=64)
def _flow(layers: Layers) -> tuple[FloatArray, FloatArray]:
    """A (S, R, W) and b (S,)."""
    number = np.full((layers.H + 1, layers.W), -1)
    number[:-1][layers.states] = np.arange(layers.states.sum())
    h, x, _ = np.nonzero(layers.pairs)
    states = np.arange(layers.states.sum())[:, None, None]
    cells: BoolArray = layers.cells[layers.pairs]
    own = number[h, x][:, None] == states
    entered = number[h + 1] == states
    A = (own * 1.0 - entered) * cells
    b = np.zeros(len(A))
    b[0] = 1.0
    return A, b
