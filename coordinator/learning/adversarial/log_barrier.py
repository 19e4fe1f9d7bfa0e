"""The step of Private UOB-LBPS (Eq. 4.3-4.4 of paper 004): mirror descent with a log-barrier.

    min over q in Delta(P_{k+1}) of   <l^, q> + D_psi(q || q_k) / eta,   psi(q) = -sum ln q,

Multiplied by eta, and up to constants, this is

    min  c.q - sum ln q,   c(x,a,x') = eta l^(x,a) + 1 / q_k(x,a,x'),

    subject to   A q = b   (outflow(x_0) = 1, outflow = inflow at inner states),
                 s_u = upper m - q >= 0,   s_l = q - lower m >= 0,   m(x,a) = sum_x' q(x,a,x').

The method is a primal-dual interior-point method. y, z_u and z_l are the multipliers of the three
constraints. A further variable z equals 1 / q at the minimum. The optimality conditions are:

    q z = 1,   s_u z_u = mu,   s_l z_l = mu,   mu -> 0,
    c - z + (z_u - sum_x' upper z_u) - (z_l - sum_x' lower z_l) + A^T y = 0.

q is feasible throughout. Eliminating the rows of Newton's matrix leaves one equation for each
state. Bounds that cannot bind (upper >= 1, lower <= 0) are moved far away.

Certificate. Take any y and any z_u, z_l >= 0 for which the last equation gives z > 0. Then, by
Lagrange duality, sum (1 + ln z) - y(x_0) is a lower bound on the minimum. `gap` is the objective
minus this bound.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from riffle.coordinator.learning.adversarial.confidence import Box
from riffle.coordinator.learning.adversarial.layered import (
    Layers,
    induced_policy,
    induced_transitions,
    violation,
)
from riffle.coordinator.learning.adversarial.omd import Step
from riffle.coordinator.learning.learner import FloatArray, LearnerError
from riffle.coordinator.learning.planning import Floats, Ints, compiled

GAP = 1e-7
MAX_ITERATIONS = 100
ROUNDING = 1e-12  # smallest mu: below it, the certificate only gains rounding errors
INSIDE = 0.1  # the start keeps at least this share of the centre's distance to a bound
START = 0.01  # first mu; it is small because consecutive answers are close
STAY = 0.99  # share of the way to the boundary that a step may go


def log_barrier_step(layers: Layers, box: Box, cost: FloatArray, q: FloatArray) -> Step:
    """Returns the mirror-descent step from `q` (H, W, A, W) > 0. `cost` (H, W, A) is eta * losses.

    If rounding keeps the gap above GAP (as in boxes almost without interior), the search stops
    early. The answer states its gap. Raises LearnerError if the numbers are too extreme.
    """
    sizes, own, after = _structure(layers)
    problem, rows = start(np.array(layers.widths), box.lower, box.upper, cost, q)
    y = np.zeros(own[-1] + 1)
    try:
        with np.errstate(all="ignore"):  # loops that are not compiled would warn
            gap, iterations = minimise(sizes, own, after, problem, rows, y)
    except np.linalg.LinAlgError as error:
        raise LearnerError("the log-barrier step stopped at a gap out of reach") from error
    if not np.isfinite(gap) or iterations == MAX_ITERATIONS:
        raise LearnerError(f"the log-barrier step stopped at a gap of {gap:.1e}")
    return answer(layers, rows[0], gap, iterations)


def answer(layers: Layers, rows: FloatArray, gap: float, iterations: int) -> Step:
    """Returns the `Step` to the occupancy measure `rows` (R, W). Each row belongs to one (x, a)."""
    q = np.zeros(layers.cells.shape)
    q[layers.pairs] = rows
    log_q = np.log(q, out=np.full_like(q, -np.inf), where=q > 0)
    policy, P = induced_policy(layers, q), induced_transitions(layers, q)
    return Step(q, log_q, policy, P, violation(layers, q), gap, iterations, np.zeros((0, 0)))


@compiled
def start(
    widths: Ints, lower: Floats, upper: Floats, cost: Floats, q: Floats
) -> tuple[Floats, Floats]:
    """Returns the arrays `problem` and `rows` that `minimise` starts with.

    In ``rows``, the new q has the policy of the old `q`. The old transitions are moved well inside
    `lower` and `upper`. In ``problem``, bounds that cannot bind are moved far away.
    """
    (H, W, A), i = cost.shape, 0
    R, visits = widths[:-1].sum() * A, np.zeros((H + 1, W))
    problem, rows = np.zeros((3, R, W)), np.zeros((6, R, W))
    visits[0, 0] = 1.0
    for h in range(H):
        n = widths[h + 1]
        for x in range(widths[h]):
            total = q[h, x, :, :n].sum()
            for a in range(A):
                row, low, high = q[h, x, a, :n], lower[h, x, a, :n], upper[h, x, a, :n]
                pair, here, at = row.sum(), problem[:, i, :n], rows[:, i, :n]
                P = move_inside(low, high, row / pair if pair > 0 else np.full(n, 1 / n))
                at[0] = P * (visits[h, x] * (pair / total if total > 0 else 1 / A))
                visits[h + 1, :n] += at[0]
                m = at[0].sum()
                for w in range(n):
                    here[0, w] = cost[h, x, a] + 1 / row[w]
                    here[1, w] = high[w] if high[w] < 1 else 2.0
                    here[2, w] = low[w] if low[w] > 0 else -1.0
                    at[1, w], at[2, w] = here[1, w] * m - at[0, w], at[0, w] - here[2, w] * m
                    at[3, w], at[4, w], at[5, w] = 1 / at[0, w], START / at[1, w], START / at[2, w]
                i += 1
    return problem, rows


@compiled
def move_inside(lower: Floats, upper: Floats, P: Floats) -> Floats:
    """Returns the row P, moved towards its bounds' centre until P is well inside (`INSIDE`)."""
    room, theta = upper - lower, 0.0
    centre = lower + room * ((1 - lower.sum()) / max(room.sum(), 1e-300))
    for at, best in ((P - lower, centre - lower), (upper - P, upper - centre)):
        for w in range(len(P)):
            if at[w] < INSIDE * best[w]:
                theta = max(theta, (INSIDE * best[w] - at[w]) / (best[w] - at[w]))
    return np.asarray((1 - theta) * P + theta * centre)


@lru_cache(maxsize=64)
def _structure(layers: Layers) -> tuple[Ints, Ints, Ints]:
    """Returns for every row its number of successors, its state, and the next layer's first state.

    Rows are the R pairs (x, a). The first state is -1 if it is x_H, which has no equation of flow.
    """
    h, x, _ = np.nonzero(layers.pairs)
    widths = np.array(layers.widths)
    first = np.cumsum(widths) - widths
    after = np.where(h + 1 < layers.H, first[h + 1], -1)
    return widths[h + 1], first[h] + x, after


@compiled
def minimise(
    sizes: Ints, own: Ints, after: Ints, problem: Floats, rows: Floats, y: Floats
) -> tuple[float, int]:
    """Changes `rows` and `y` by Newton steps; returns the duality gap and the number of steps.

    `problem` holds the cost c and the bounds `upper` and `lower`. `rows` holds q, the slacks s_u
    and s_l, and the multipliers z, z_u and z_l. Each is (R, W), for R pairs (x, a). The slacks are
    updated, because computing them from q near a bound would lose all digits.
    """
    sigma, change = 0.1, np.zeros(rows.shape)
    count = sizes.sum()
    for iteration in range(MAX_ITERATIONS):
        gap, mu = duality_gap(sizes, own, after, problem, rows, y), 0.0
        for i in range(len(sizes)):
            for w in range(sizes[i]):
                mu += rows[1, i, w] * rows[4, i, w] + rows[2, i, w] * rows[5, i, w]
        mu /= 2 * count
        if not (gap > GAP and mu > ROUNDING):
            return gap, iteration
        y_new = newton(sizes, own, after, problem, rows, sigma * mu, change)
        t, u = longest(sizes, rows[:3], change[:3]), longest(sizes, rows[3:], change[3:])
        rows[:3] += t * change[:3]
        rows[3:] += u * change[3:]
        y += u * (y_new - y)
        sigma = min(0.5, max(0.01, (1 - min(t, u)) ** 2))
    return gap, MAX_ITERATIONS


@compiled
def pull(own: int, after: int, w: int, y: Floats) -> float:
    """Returns (A^T y)(x, a, x') = y(x) - y(x') for the matrix A of the module; y(x_H) is 0."""
    return float(y[own] - (y[after + w] if after >= 0 else 0.0))


@compiled
def duality_gap(
    sizes: Ints, own: Ints, after: Ints, problem: Floats, rows: Floats, y: Floats
) -> float:
    """Returns the objective minus the Lagrangian bound, or infinity if some z <= 0 (no bound)."""
    gap = float(y[0])
    for i in range(len(sizes)):
        row = 0.0
        for w in range(sizes[i]):
            row += problem[2, i, w] * rows[5, i, w] - problem[1, i, w] * rows[4, i, w]
        for w in range(sizes[i]):
            z = problem[0, i, w] + (rows[4, i, w] - rows[5, i, w] + row)
            z += pull(own[i], after[i], w, y)
            if z <= 0:
                return np.inf
            q = rows[0, i, w]
            gap += problem[0, i, w] * q - np.log(q) - 1 - np.log(z)
    return gap


@compiled
def newton(
    sizes: Ints, own: Ints, after: Ints, problem: Floats, rows: Floats, mu: float, change: Floats
) -> Floats:
    """Writes a Newton step for the barrier weight `mu` to `change`. Returns multipliers y (S,)."""
    R, W = problem.shape[1:]
    inverses, g = np.zeros((R, W, W)), np.zeros((R, W))
    S = own[-1] + 1
    matrix, target = np.zeros((S, S)), np.zeros(S)
    target[0] = -1.0
    for i in range(R):
        n = sizes[i]
        gradient(n, problem[:, i], rows[:, i], mu, g[i])
        invert(n, problem[:, i], rows[:, i], inverses[i])
        add_to_schur(n, own[i], after[i], inverses[i], g[i], rows[0, i], matrix, target)
    y = np.linalg.solve(matrix, target)
    for i in range(R):
        for w in range(sizes[i]):
            g[i, w] += pull(own[i], after[i], w, y)
        change_row(sizes[i], problem[:, i], rows[:, i], mu, inverses[i], g[i], change[:, i])
    return y


@compiled
def gradient(n: int, problem: Floats, row: Floats, mu: float, g: Floats) -> None:
    """Writes the barrier objective's gradient at one pair (x, a) into `g`. `newton` adds A^T y."""
    shared = 0.0
    for w in range(n):
        shared += problem[2, w] * (mu / row[2, w]) - problem[1, w] * (mu / row[1, w])
    for w in range(n):
        g[w] = problem[0, w] - 1 / row[0, w] + (mu / row[1, w] - mu / row[2, w] + shared)


@compiled
def invert(n: int, problem: Floats, row: Floats, inverse: Floats) -> None:
    """Inverts the Hessian D + G_u^T D_u G_u + G_l^T D_l G_l of one (x, a).

    `row` has q, the slacks s_u and s_l of its two bounds, and their multipliers z, z_u and z_l. D,
    D_u and D_l are diagonal: z / q, z_u / s_u and z_l / s_l. G_u maps q to s_u, and G_l maps q to
    s_l. For precision, the Hessian is first scaled to a diagonal of ones.
    """
    total, matrix, scale = 0.0, np.zeros((n, n)), np.zeros(n)
    for w in range(n):
        D_u, D_l = row[4, w] / row[1, w], row[5, w] / row[2, w]
        total += D_u * problem[1, w] ** 2 + D_l * problem[2, w] ** 2
        cross = D_u * problem[1, w] + D_l * problem[2, w]
        matrix[w, w] += row[3, w] / row[0, w] + D_u + D_l
        for v in range(n):
            matrix[w, v] -= cross
            matrix[v, w] -= cross
    for w in range(n):
        scale[w] = 1 / np.sqrt(matrix[w, w] + total)
    for w in range(n):
        for v in range(n):
            matrix[w, v] = (matrix[w, v] + total) * (scale[w] * scale[v])
        matrix[w, w] += 1e-15
    for k in range(n):
        pivot, matrix[k, k] = matrix[k, k], 1.0
        for v in range(n):
            matrix[k, v] /= pivot
        for w in range(n):
            if w != k:
                factor, matrix[w, k] = matrix[w, k], 0.0
                for v in range(n):
                    matrix[w, v] -= factor * matrix[k, v]
    for w in range(n):
        for v in range(n):
            inverse[w, v] = matrix[w, v] * scale[w] * scale[v]


@compiled
def add_to_schur(
    n: int,
    own: int,
    after: int,
    inverse: Floats,
    g: Floats,
    q: Floats,
    matrix: Floats,
    target: Floats,
) -> None:
    """Adds a row's parts of A R A^T to `matrix`, and of A q - A R g to `target`.

    A is the matrix of the equations of flow, A q = b, and R is `inverse`.
    """
    for w in range(n):
        sums, rest = 0.0, q[w]
        for v in range(n):
            sums += inverse[w, v]
            rest -= inverse[w, v] * g[v]
        matrix[own, own] += sums
        target[own] += rest
        if after >= 0:
            matrix[own, after + w] -= sums
            matrix[after + w, own] -= sums
            target[after + w] -= rest
            for v in range(n):
                matrix[after + w, after + v] += inverse[w, v]


@compiled
def change_row(
    n: int, problem: Floats, row: Floats, mu: float, inverse: Floats, g: Floats, change: Floats
) -> None:
    """Writes Newton's step of one (x, a): -`inverse` `g` for q, then for slacks and multipliers."""
    dm = 0.0
    for w in range(n):
        change[0, w] = 0.0
        for v in range(n):
            change[0, w] -= inverse[w, v] * g[v]
        dm += change[0, w]
    for w in range(n):
        dq = change[0, w]
        change[1, w], change[2, w] = problem[1, w] * dm - dq, dq - problem[2, w] * dm
        change[3, w] = 1 / row[0, w] - row[3, w] - row[3, w] / row[0, w] * dq
        for s, z in ((1, 4), (2, 5)):
            change[z, w] = mu / row[s, w] - row[z, w] - row[z, w] / row[s, w] * change[s, w]


@compiled
def longest(sizes: Ints, values: Floats, steps: Floats) -> float:
    """Returns the longest step <= 1 that keeps all values positive, with a margin."""
    worst = 0.0
    for k in range(len(values)):
        for i in range(len(sizes)):
            for w in range(sizes[i]):
                worst = max(worst, -steps[k, i, w] / values[k, i, w])
    return min(1.0, STAY / worst) if worst > 0 else 1.0
